"""Ending a turn: whatever was done before, running it again completes it, once."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from chat import frames
from chat.catalogue import Catalogue
from chat.errors import Unavailable
from chat.model import Cost, EventKind, FinishReason, Generation, GenerationStatus, MessageStatus, Outcome, Usage
from chat.ports import BufferEntry, Fenced
from chat.usecases.cancel import CancelGeneration
from chat.usecases.finish_turn import FinishTurn
from chat.usecases.get_generation import GetGeneration
from tests.unit.fakes import delta
from tests.unit.test_turns import MODELS, PLANS, World

SAID = Outcome(FinishReason.STOP, "hi", Usage(10, 2), Cost())


@dataclass
class Ending:
    """One generation that was sent and queued."""

    world: World = field(default_factory=World)

    async def begin(self) -> "Ending":
        self.ident = (await self.world.send()).generation_id
        self.stores, self.buffer, self.lanes = self.world.stores, self.world.buffer, self.world.lanes
        stores: Any = self.stores
        lanes: Any = self.lanes
        buffer: Any = self.buffer
        self.finish = FinishTurn(buffer, stores, lanes, Catalogue(MODELS, PLANS), lambda: 0)
        self.cancel = CancelGeneration(buffer, stores, lanes, self.finish)
        self.view = GetGeneration(stores, buffer, lanes)
        return self

    async def run(self, attempt: int = 1) -> None:
        """A replica has taken it and written two tokens."""
        self.lanes.dispatched.add(self.ident)
        await self.buffer.claim(self.ident, attempt)
        started = frames.durable(1, EventKind.STARTED, {})
        self.buffer.write(self.ident, BufferEntry(1, EventKind.STARTED, started), delta(2, "hi", [7, 8]))

    async def end(self, **how: Any) -> Generation | None:
        return await self.finish(self.ident, "large", **({"attempt": None, "outcome": None} | how))

    def last(self) -> tuple[EventKind, Any]:
        frame = self.buffer.log[self.ident][-1].frame
        return frames.kind_of(frame), frames.data_of(frame)


async def test_a_reply_is_saved_published_and_released() -> None:
    ending = await Ending().begin()
    await ending.run()
    saved = await ending.end(attempt=1, outcome=SAID)
    assert saved is not None
    assert (saved.status, saved.last_event_id) == (GenerationStatus.COMPLETED, 3)
    assert saved.cost.usd == pytest.approx((10 * 1.0 + 2 * 2.0) / 1e6)
    kind, data = ending.last()
    assert kind is EventKind.DONE
    assert data == {
        "status": "COMPLETED",
        "finishReason": "stop",
        "usage": {"inputTokens": 10, "outputTokens": 2, "cachedTokens": 0},
        "cost": {"usd": saved.cost.usd},
    }
    assert ending.lanes.jobs == {}
    reply = ending.stores.history("conv_1")[1]
    assert (reply.content, reply.status) == ("hi", MessageStatus.COMPLETED)


@pytest.mark.parametrize("store", ["stores", "buffer", "lanes"])
@pytest.mark.parametrize("step", ["seal", "live", "finish", "publish_last", "release"])
async def test_after_a_fault_in_any_step_running_it_again_completes_it_once(store: str, step: str) -> None:
    ending = await Ending().begin()
    await ending.run()
    getattr(ending, store).failing.add(step)
    try:
        await ending.end(attempt=1, outcome=SAID)
    except Unavailable:
        getattr(ending, store).failing.clear()
        # Before the seal nothing is decided; after it nobody decides otherwise.
        other = SAID if step == "seal" else Outcome(FinishReason.ERROR, "something else", Usage(10, 9), Cost(9))
        await ending.end(outcome=other)
    await ending.end()
    assert ending.stores.ledger == [ending.ident]
    assert ending.stores.history("conv_1")[1].content == "hi"
    assert [entry.seq for entry in ending.buffer.log[ending.ident]] == [1, 2, 3]
    assert ending.last()[0] is EventKind.DONE
    assert ending.stores.generations[ending.ident].last_event_id == 3
    assert ending.lanes.jobs == {}


async def test_what_the_buffer_holds_is_kept_and_charged() -> None:
    ending = await Ending().begin()
    await ending.run()
    error = {"type": "api_error", "code": "engine_failed", "message": "Out of attempts."}
    saved = await ending.end(error=error)
    assert saved is not None
    assert saved.usage == Usage(saved.prompt_tokens, 2)
    assert saved.cost.usd > 0
    assert ending.last() == (EventKind.ERROR, {"error": error})
    assert ending.stores.history("conv_1")[1].content == "hi"


async def test_nothing_is_charged_before_the_first_token() -> None:
    ending = await Ending().begin()
    saved = await ending.end()
    assert saved is not None
    assert (saved.usage, saved.cost, saved.status) == (Usage(), Cost(), GenerationStatus.FAILED)


async def test_a_take_over_fences_whoever_writes() -> None:
    ending = await Ending().begin()
    await ending.run(attempt=1)
    await ending.end()
    assert ending.buffer.fence[ending.ident] == 2


async def test_an_earlier_attempt_cannot_end_it() -> None:
    ending = await Ending().begin()
    await ending.run(attempt=2)
    with pytest.raises(Fenced):
        await ending.end(attempt=1, outcome=SAID)
    assert ending.stores.ledger == []


@pytest.mark.parametrize("outcome", [SAID, None])
async def test_a_lost_buffer_leaves_what_is_known(outcome: Outcome | None) -> None:
    ending = await Ending().begin()
    ending.buffer.forget()
    saved = await ending.end(outcome=outcome)
    assert saved is not None
    assert saved.status is (GenerationStatus.COMPLETED if outcome else GenerationStatus.FAILED)
    assert ending.stores.history("conv_1")[1].content == ("hi" if outcome else "")
    assert ending.lanes.jobs == {}


async def test_a_generation_that_is_nowhere_is_released() -> None:
    ending = await Ending().begin()
    ending.stores.generations.clear()
    assert await ending.end(outcome=SAID) is None
    assert ending.last()[0] is EventKind.DONE
    assert ending.lanes.jobs == {}


async def test_a_refused_generation_that_ran_all_the_same_ends_as_an_error() -> None:
    ending = await Ending().begin()
    await ending.stores.refuse(ending.ident, 0)
    await ending.end(outcome=SAID)
    assert ending.last()[0] is EventKind.ERROR
    assert ending.stores.ledger == []


async def test_stopping_in_the_queue_keeps_what_an_earlier_attempt_wrote() -> None:
    ending = await Ending().begin()
    await ending.run()
    ending.lanes.dispatched.clear()  # its replica died: it is back in its lane
    cancelled = await ending.cancel("ada", ending.ident)
    assert (cancelled.status, cancelled.ended) == (GenerationStatus.CANCELLED, False)
    assert ending.last()[1]["status"] == "CANCELLED"
    assert ending.stores.history("conv_1")[1].content == "hi"
    again = await ending.cancel("ada", ending.ident)
    assert (again.status, again.ended) == (GenerationStatus.CANCELLED, True)


async def test_stopping_one_that_valkey_lost_ends_it() -> None:
    ending = await Ending().begin()
    ending.buffer.forget()
    ending.lanes.forget()
    assert (await ending.cancel("ada", ending.ident)).status is GenerationStatus.CANCELLED
    assert ending.stores.active == {}


async def test_stopping_one_that_a_replica_takes_meanwhile_is_left_to_it() -> None:
    ending = await Ending().begin()

    async def fenced(*args: Any) -> Any:
        raise Fenced

    ending.buffer.claim = fenced  # type: ignore[method-assign]
    assert (await ending.cancel("ada", ending.ident)).status is GenerationStatus.RUNNING
    assert ending.ident in ending.buffer.cancelled


async def test_the_view_shows_the_place_then_running_then_the_end() -> None:
    ending = await Ending().begin()
    view = msgspec.to_builtins(await ending.view("ada", ending.ident))
    assert (view["status"], view["position"], view["estimatedWaitSeconds"]) == ("QUEUED", 1, 1.5)
    assert view["usage"] == {"inputTokens": 0, "outputTokens": 0, "cachedTokens": 0}
    await ending.run()
    view = msgspec.to_builtins(await ending.view("ada", ending.ident))
    assert view["status"] == "RUNNING"
    assert "position" not in view
    await ending.end(attempt=1, outcome=SAID)
    ending.buffer.failing.add("live")  # an ended one needs no Valkey
    assert (await ending.view("ada", ending.ident)).status is GenerationStatus.COMPLETED
