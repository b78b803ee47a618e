"""Sending and regenerating: idempotency, races, crashes between steps, refusals."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from chat.adapters.tokenizer import ByteCounter
from chat.catalogue import Catalogue
from chat.errors import (
    ContextLengthExceeded,
    ConversationBusy,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from chat.model import Cost, FinishReason, GenerationStatus, MessageStatus, Outcome, Usage
from chat.requests import RegenerateRequest, SendRequest
from chat.settings import ModelSpec, PlanSpec
from chat.usecases.context import ContextBuilder
from chat.usecases.regenerate import Regenerate
from chat.usecases.send_message import SendMessage, StartedGeneration
from chat.usecases.turns import Turns
from tests.unit.fakes import MemoryBuffer, MemoryLanes, MemoryStores

MODELS = [
    ModelSpec("mini", "small", 4_000, ["free", "plus"], 0.1, 0.2),
    ModelSpec("big", "large", 8_000, ["free", "plus"], 1.0, 2.0),
    ModelSpec("best", "large", 8_000, ["plus"], 1.0, 2.0),
]
PLANS = [PlanSpec("free", 2, 1000, 500), PlanSpec("plus", 1, 4000, 2000)]


@dataclass
class World:
    stores: MemoryStores = field(default_factory=MemoryStores)
    buffer: MemoryBuffer = field(default_factory=MemoryBuffer)
    lanes: MemoryLanes = field(default_factory=MemoryLanes)

    def __post_init__(self) -> None:
        counter = ByteCounter()
        stores: Any = self.stores
        self.turns = Turns(
            stores, stores, stores, self.buffer, self.lanes, counter,  # type: ignore[arg-type]
            Catalogue(MODELS, PLANS), ContextBuilder(counter, "Be brief.", 6000), 0.7,
        )  # fmt: skip
        self.stores.give("ada", "conv_1")

    async def send(self, content: str = "hello", ident: str = "a", user: str = "ada", **more: Any) -> StartedGeneration:
        return await SendMessage(self.turns)(user, "conv_1", SendRequest(content, ident, **more))

    async def again(self, seq: int, ident: str = "r", model: str | None = None) -> StartedGeneration:
        return await Regenerate(self.turns)("ada", "conv_1", seq, RegenerateRequest(ident, model))

    async def end(self, started: StartedGeneration, text: str = "hi", reason: FinishReason = FinishReason.STOP) -> None:
        outcome = Outcome(reason, text, Usage(5, 2), Cost(0.1))
        await self.stores.finish(started.generation_id, outcome, 3, 0)
        await self.lanes.release("large", started.generation_id)

    def prompt(self, started: StartedGeneration) -> list[str]:
        return [message.content for message in self.buffer.requests[started.generation_id].messages]


async def test_a_send_saves_both_messages_and_queues_one_job() -> None:
    world = World()
    started = await world.send("hello there")
    user, reply = world.stores.history("conv_1")
    assert (user.content, user.seq, user.status) == ("hello there", 1, MessageStatus.COMPLETED)
    assert (reply.seq, reply.status, reply.parent_id) == (2, MessageStatus.STREAMING, user.message_id)
    assert world.stores.conversations["conv_1"].title == "hello there"
    generation = world.stores.generations[started.generation_id]
    assert (generation.model, generation.pool, generation.max_tokens) == ("big", "large", 500)
    job = world.lanes.jobs[started.generation_id]
    assert job.kv_tokens == generation.prompt_tokens + generation.max_tokens == generation.hold_tokens
    assert world.prompt(started) == ["Be brief.", "hello there"]
    assert not started.attached


async def test_the_usual_send_is_one_read_one_write_and_two_scripts() -> None:
    world = World()
    await world.end(await world.send())
    for one in (world.stores, world.buffer, world.lanes):
        one.calls.clear()
    await world.send("more", "b")
    assert world.stores.calls == ["open", "begin_turn"]
    assert world.buffer.calls + world.lanes.calls == ["open", "enqueue"]


async def test_five_identical_sends_at_once_are_one() -> None:
    world = World()
    found = await asyncio.gather(*(world.send() for _ in range(5)))
    assert len({one.generation_id for one in found}) == 1
    assert sum(not one.attached for one in found) == 1
    assert len(world.stores.history("conv_1")) == 2
    assert world.lanes.enqueued == 1


async def test_different_sends_at_once_run_one_reply() -> None:
    world = World()
    found = await asyncio.gather(*(world.send(f"m{n}", f"id{n}") for n in range(8)), return_exceptions=True)
    started = [one for one in found if isinstance(one, StartedGeneration)]
    busy = [one for one in found if isinstance(one, ConversationBusy)]
    assert (len(started), len(busy)) == (1, 7)
    assert {one.generation_id for one in busy} == {started[0].generation_id}


async def test_the_same_id_with_another_content_is_a_conflict() -> None:
    world = World()
    await world.send("one")
    for more in ({"content": "two"}, {"content": "one", "max_tokens": 7}, {"content": "one", "model": "mini"}):
        with pytest.raises(IdempotencyConflict):
            await world.send(**more)  # type: ignore[arg-type]


async def test_a_replay_attaches_also_when_the_plan_lost_the_model_by_now() -> None:
    world = World()
    world.stores.plans["ada"] = "plus"
    started = await world.send(model="best", max_tokens=4000)
    await world.end(started)
    world.stores.plans["ada"] = "free"
    world.turns._plans.clear()
    replayed = await world.send(model="best", max_tokens=4000)
    assert replayed.attached
    assert replayed.generation_id == started.generation_id
    with pytest.raises(InvalidRequest):
        await world.send(ident="b", model="best")


async def test_a_replay_attaches_while_a_later_reply_runs() -> None:
    world = World()
    first = await world.send()
    await world.end(first)
    await world.send("later", "b")
    assert (await world.send()).generation_id == first.generation_id


@pytest.mark.parametrize("broken", ["open", "enqueue"])
async def test_a_send_that_cannot_be_queued_is_refused_and_can_be_sent_again(broken: str) -> None:
    world = World()
    (world.buffer if broken == "open" else world.lanes).failing.add(broken)
    with pytest.raises(Unavailable) as caught:
        await world.send()
    assert caught.value.retry_after == 2
    assert world.stores.history("conv_1")[1].status is MessageStatus.REFUSED
    assert world.stores.active == {}
    world.buffer.failing.clear()
    world.lanes.failing.clear()
    found = await asyncio.gather(*(world.send() for _ in range(3)))
    assert len({one.generation_id for one in found}) == 1
    user, reply = world.stores.history("conv_1")
    assert (user.content, reply.status, reply.generation_id) == (
        "hello",
        MessageStatus.STREAMING,
        found[0].generation_id,
    )
    assert world.stores.conversations["conv_1"].last_seq == 2


async def test_a_refused_send_is_tried_again_after_later_turns() -> None:
    world = World()
    world.lanes.failing.add("enqueue")
    with pytest.raises(Unavailable):
        await world.send("first", "a")
    world.lanes.failing.clear()
    later = await world.send("second", "b")
    with pytest.raises(ConversationBusy) as caught:
        await world.send("first", "a")
    assert caught.value.generation_id == later.generation_id
    await world.end(later)
    started = await world.send("first", "a")
    assert world.stores.generations[started.generation_id].reply_seq == 2
    assert world.prompt(started) == ["Be brief.", "first"]


@pytest.mark.parametrize("lost", ["before open", "before enqueue", "by a flush"])
async def test_a_crash_between_saving_and_queueing_is_mended_by_the_same_send(lost: str) -> None:
    world = World()
    first = await world.send("hello")
    asked = world.buffer.requests[first.generation_id]
    world.lanes.forget()
    if lost != "before enqueue":
        world.buffer.forget()
    again = await world.send("hello")
    assert (again.generation_id, again.attached) == (first.generation_id, True)
    assert list(world.lanes.jobs) == [first.generation_id]
    mended = world.buffer.requests[first.generation_id]
    assert (mended.messages, mended.max_tokens, mended.prompt_tokens, mended.message_id) == (
        asked.messages,
        asked.max_tokens,
        asked.prompt_tokens,
        asked.message_id,
    )


async def test_another_send_mends_it_too_and_is_told_to_wait() -> None:
    world = World()
    first = await world.send("hello")
    world.lanes.forget()
    world.buffer.forget()
    with pytest.raises(ConversationBusy):
        await world.send("other", "b")
    assert list(world.lanes.jobs) == [first.generation_id]


async def test_a_running_reply_is_not_queued_twice() -> None:
    world = World()
    first = await world.send()
    world.buffer.fence[first.generation_id] = 1
    world.lanes.forget()  # its assignment was taken, and the books were lost
    await world.send()
    assert world.lanes.jobs == {}


async def test_a_reply_that_is_over_does_not_hold_the_conversation() -> None:
    world = World()
    await world.end(await world.send())
    world.stores.active["conv_1"] = "gen_long_gone"
    started = await world.send("next", "b")
    assert world.stores.active["conv_1"] == started.generation_id


async def test_a_client_that_goes_away_while_saving_leaves_a_queued_turn() -> None:
    world = World()
    sending = asyncio.create_task(world.send())
    while "begin_turn" not in world.stores.calls:
        await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    while not world.lanes.jobs:
        await asyncio.sleep(0)
    assert list(world.lanes.jobs) == list(world.stores.generations)


async def test_foreign_and_unknown_conversations_look_the_same() -> None:
    world = World()
    with pytest.raises(NotFound):
        await world.send(user="eve")
    with pytest.raises(NotFound):
        await SendMessage(world.turns)("ada", "conv_none", SendRequest("x", "a"))
    assert world.stores.generations == {}


@pytest.mark.parametrize(
    ("more", "param"), [({"model": "nope"}, "model"), ({"model": "best"}, "model"), ({"max_tokens": 1001}, "maxTokens")]
)
async def test_what_the_plan_does_not_allow_is_refused_unsaved(more: dict[str, Any], param: str) -> None:
    world = World()
    with pytest.raises(InvalidRequest) as caught:
        await world.send(**more)
    assert caught.value.param == param
    assert world.stores.history("conv_1") == []


async def test_a_prompt_that_cannot_fit_is_refused_unsaved() -> None:
    world = World()
    with pytest.raises(ContextLengthExceeded):
        await world.send("x" * 30_000)
    assert world.stores.history("conv_1") == []


async def test_moderation_comes_before_saving() -> None:
    class Never:
        async def check(self, user_id: str, content: str) -> None:
            raise InvalidRequest("No.", param="content")

    world = World()
    with pytest.raises(InvalidRequest):
        await SendMessage(world.turns, Never())("ada", "conv_1", SendRequest("x", "a"))
    assert world.stores.history("conv_1") == []


async def test_the_next_turn_has_the_context_of_many_pages() -> None:
    world = World()
    for turn in range(30):
        await world.end(await world.send(f"question {turn}", f"id{turn}"), f"answer {turn}")
    prompt = world.prompt(await world.send("last", "z"))
    assert prompt[1] == "question 0"
    assert len(prompt) == 62


async def test_regenerate_keeps_both_and_leaves_the_first_out() -> None:
    world = World()
    await world.end(await world.send("hello"), "first try")
    second = await world.again(2)
    await world.end(second, "second try")
    user, first, new = world.stores.history("conv_1")
    assert (first.content, new.content, new.seq) == ("first try", "second try", 3)
    assert first.parent_id == new.parent_id == user.message_id
    assert world.prompt(second) == ["Be brief.", "hello"]
    assert world.prompt(await world.send("and now?", "b")) == ["Be brief.", "hello", "second try", "and now?"]


async def test_regenerate_is_idempotent_and_finds_a_question_far_back() -> None:
    world = World()
    await world.end(await world.send("question", "q"))
    for turn in range(45):
        await world.end(await world.again(2, f"r{turn}"))
    found = await asyncio.gather(*(world.again(2, "same") for _ in range(3)))
    assert len({one.generation_id for one in found}) == 1
    assert world.prompt(found[0]) == ["Be brief.", "question"]
    with pytest.raises(IdempotencyConflict):
        await world.again(3, "same")


@pytest.mark.parametrize(("seq", "error"), [(0, NotFound), (3, NotFound), (10**9, NotFound), (1, InvalidRequest)])
async def test_only_a_reply_is_made_again(seq: int, error: type[Exception]) -> None:
    world = World()
    await world.end(await world.send())
    with pytest.raises(error):
        await world.again(seq)


async def test_a_running_reply_is_not_made_again() -> None:
    world = World()
    started = await world.send()
    with pytest.raises(ConversationBusy) as caught:
        await world.again(2)
    assert caught.value.generation_id == started.generation_id


async def test_a_stopped_reply_can_be_made_again() -> None:
    world = World()
    await world.end(await world.send(), "", FinishReason.CANCELLED)
    assert world.stores.generations[(await world.again(2)).generation_id].status is GenerationStatus.QUEUED
