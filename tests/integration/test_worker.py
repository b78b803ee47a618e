"""A replica with the scripted engine against real Valkey: what the buffer and the lanes hold when things go wrong."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from chat import frames
from chat.adapters.engines.simulated import SimulatedEngine
from chat.adapters.valkey import Valkey, ValkeyLanes, ValkeyTokenBuffer, ValkeyWakeups
from chat.catalogue import Catalogue
from chat.errors import NotFound
from chat.ids import new_id, now_ms
from chat.keys import GenerationKeys
from chat.model import ChatMessage, EventKind, FinishReason, Generation, GenerationRequest, Job, Outcome, Role
from chat.ports import JobState
from chat.settings import ModelSpec, PlanSpec, WorkerSettings
from chat.usecases.finish_turn import FinishTurn
from containers.worker.metrics import Metrics
from containers.worker.replica import Replica

PLANS = [PlanSpec("plus", 0, 8000)]
MODELS = [ModelSpec("sim-large", "large", 8000, ["plus"], 1, 2)]
TEXT = "Xin chào 👋🏽 tiếng Việt. "


class NoGenerations:
    """A store that knows no generation: what is saved is another test's matter; outcomes are noted."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    async def get(self, generation_id: str) -> None:
        return None

    async def finish(self, generation_id: str, outcome: Outcome, last_event_id: int, at_ms: int) -> Generation:
        self.outcomes[generation_id] = outcome
        raise NotFound("unknown")


@dataclass
class Pool:
    """A pool of its own for each test, with what all replicas share."""

    name: str
    valkey: Valkey
    lanes: ValkeyLanes
    buffer: ValkeyTokenBuffer
    wakeups: ValkeyWakeups
    store: NoGenerations

    @asynccontextmanager
    async def replica(self, drain_seconds: float = 4.0, step_seconds: float = 0.002) -> AsyncIterator["Running"]:
        engine = SimulatedEngine(100_000, step_seconds, 0.0, 0.0)
        await engine.start()
        settings = worker_settings(self.name, drain_seconds)
        finish = FinishTurn(self.buffer, self.store, self.lanes, Catalogue(MODELS, PLANS))  # type: ignore[arg-type]
        made = Replica(settings, engine, self.buffer, self.lanes, self.wakeups, finish, Metrics(engine))
        stopping = asyncio.Event()
        task = asyncio.create_task(made.run(stopping))
        running = Running(made, engine, stopping, task)
        try:
            await eventually(made.ready)
            yield running
        finally:
            stopping.set()
            await asyncio.wait([task], timeout=10)
            await engine.stop()

    async def send(self, **directive: object) -> str:
        max_tokens = int(str(directive.pop("max_tokens", 1000)))
        content = "/sim " + json.dumps(directive, ensure_ascii=False)
        request = GenerationRequest(
            new_id("gen"), "ada", "conv", "msg", 2, "plus", self.name, "sim-large",
            [ChatMessage(Role.USER, content)], max_tokens, 20, 0.7, now_ms(),
        )  # fmt: skip
        await self.buffer.open(request)
        job = Job(request.generation_id, "ada", "conv", "plus", 20 + max_tokens, now_ms())
        await self.lanes.enqueue(self.name, job)
        return request.generation_id

    async def dispatch(self) -> int:
        return len(await self.lanes.dispatch(self.name, now_ms(), 10))

    async def cancel(self, generation_id: str) -> JobState:
        await self.buffer.request_cancel(generation_id)
        return await self.lanes.cancel(self.name, generation_id)

    async def events(self, generation_id: str) -> list[tuple[EventKind, dict]]:
        found = await self.buffer.frames(generation_id, 0, 10_000)
        assert [frames.seq_of(frame) for frame in found] == list(range(1, len(found) + 1))
        return [(frames.kind_of(frame), frames.data_of(frame)) for frame in found]

    async def ended(self, generation_id: str) -> list[tuple[EventKind, dict]]:
        async def whether() -> bool:
            live = await self.buffer.live(generation_id)
            return live is not None and live.ended

        await eventually(whether)
        return await self.events(generation_id)

    async def some_text(self, generation_id: str, deltas: int = 1) -> None:
        async def whether() -> bool:
            return sum(kind is EventKind.DELTA for kind, _ in await self.events(generation_id)) >= deltas

        await eventually(whether)


@dataclass
class Running:
    replica: Replica
    engine: SimulatedEngine
    stopping: asyncio.Event
    task: asyncio.Task[bool]


def worker_settings(pool: str, drain_seconds: float) -> WorkerSettings:
    return WorkerSettings(
        environment="test", conversations_table="", generations_table="", accounts_table="", ledger_table="",
        content_bucket="", valkey_url="redis://127.0.0.1:1", models=MODELS, plans=PLANS, pool=pool,
        engine="simulated", model="sim-large", flush_seconds=0.05, heartbeat_seconds=0.1, drain_seconds=drain_seconds,
    )  # fmt: skip


async def eventually(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, "did not happen"
        await asyncio.sleep(0.01)


def text_of(events: list[tuple[EventKind, dict]]) -> str:
    return "".join(data["text"] for kind, data in events if kind is EventKind.DELTA)


def said(tokens: int) -> str:
    return (TEXT * tokens).encode()[: tokens * 3].decode(errors="ignore")


@pytest_asyncio.fixture
async def pool(valkey: Valkey) -> AsyncIterator[Pool]:
    wakeups = ValkeyWakeups(valkey)
    buffer, lanes = ValkeyTokenBuffer(valkey), ValkeyLanes(valkey, PLANS)
    yield Pool(new_id("pool"), valkey, lanes, buffer, wakeups, NoGenerations())
    await wakeups.close()


async def booked(pool: Pool) -> int:
    return (await pool.lanes.status(pool.name)).kv_booked_tokens


async def test_a_reply_from_start_to_end(pool: Pool) -> None:
    async with pool.replica() as running:
        generation = await pool.send(text=TEXT, tokens=100, rate=400)
        assert await pool.dispatch() == 1
        events = await pool.ended(generation)
        await eventually(lambda: not running.replica.bookings)
    kinds = [kind for kind, _ in events]
    assert kinds[0] is EventKind.STARTED and kinds[-1] is EventKind.DONE
    assert set(kinds[1:-1]) == {EventKind.DELTA} and len(kinds) > 4
    assert all(data["text"] for kind, data in events if kind is EventKind.DELTA)
    assert text_of(events) == said(100)
    assert events[0][1] == {
        "generationId": generation, "messageId": "msg", "seq": 2, "model": "sim-large",
        "servedBy": pool.name, "degraded": False,
    }  # fmt: skip
    done = events[-1][1]
    assert (done["status"], done["finishReason"]) == ("COMPLETED", "stop")
    assert (done["usage"]["inputTokens"], done["usage"]["outputTokens"]) == (20, 100)
    assert await booked(pool) == 0


async def test_the_first_token_does_not_wait_for_its_batch(pool: Pool) -> None:
    async with pool.replica():
        generation = await pool.send(text="abc", tokens=30, rate=3)
        start = time.monotonic()
        await pool.dispatch()
        await pool.some_text(generation)
        assert time.monotonic() - start < 0.3
        assert text_of(await pool.events(generation)) == "abc"
        await pool.cancel(generation)
        await pool.ended(generation)


async def test_a_failure_keeps_the_text_and_says_error(pool: Pool) -> None:
    async with pool.replica() as running:
        generation = await pool.send(text=TEXT, tokens=100, fail_at=40, rate=1000)
        at_once = await pool.send(text=TEXT, tokens=100, fail_at=0)
        await pool.dispatch()
        events, nothing = await pool.ended(generation), await pool.ended(at_once)
        assert running.replica.ready()
    assert events[-1][0] is EventKind.ERROR and events[-1][1]["error"]["code"] == "engine_failed"
    assert text_of(events) == said(40)
    assert pool.store.outcomes[generation].usage.output_tokens == 40
    assert [kind for kind, _ in nothing] == [EventKind.STARTED, EventKind.ERROR]
    assert pool.store.outcomes[at_once].usage.input_tokens == pool.store.outcomes[at_once].usage.output_tokens == 0


async def test_a_stop_in_the_middle_frees_the_engine_at_once(pool: Pool) -> None:
    async with pool.replica() as running:
        generation = await pool.send(text=TEXT, tokens=900, rate=100)
        await pool.dispatch()
        await pool.some_text(generation, 3)
        assert await pool.cancel(generation) is JobState.DISPATCHED
        start = time.monotonic()
        await eventually(lambda: running.engine.status().running == 0)
        assert time.monotonic() - start < 0.2
        events = await pool.ended(generation)
        await eventually(lambda: not running.replica.bookings)
    assert (events[-1][1]["status"], events[-1][1]["finishReason"]) == ("CANCELLED", "cancelled")
    outcome = pool.store.outcomes[generation]
    assert outcome.text == text_of(events) == said(outcome.usage.output_tokens)
    assert await booked(pool) == 0


async def test_a_stop_before_the_first_token_costs_nothing(pool: Pool) -> None:
    async with pool.replica():
        generation = await pool.send(tokens=50, stall_before=30)
        await pool.dispatch()
        await eventually(lambda: started(pool, generation))
        await pool.cancel(generation)
        events = await pool.ended(generation)
    assert [kind for kind, _ in events] == [EventKind.STARTED, EventKind.DONE]
    assert pool.store.outcomes[generation].usage.output_tokens == 0


async def started(pool: Pool, generation: str) -> bool:
    return bool(await pool.buffer.frames(generation, 0))


async def test_a_stop_between_dispatch_and_claim_never_reaches_the_engine(pool: Pool) -> None:
    """The mark is there when the replica claims; the message on the control channel met nobody."""
    generation = await pool.send(tokens=50, stall_before=30)
    async with pool.replica() as running:
        real_claim, may_claim = pool.buffer.claim, asyncio.Event()

        async def late_claim(generation_id: str, attempt: int):  # type: ignore[no-untyped-def]
            await may_claim.wait()
            return await real_claim(generation_id, attempt)

        pool.buffer.claim = late_claim  # type: ignore[method-assign]
        await pool.dispatch()
        await eventually(lambda: generation in running.replica.bookings)
        assert await pool.cancel(generation) is JobState.DISPATCHED
        may_claim.set()
        events = await pool.ended(generation)
    assert [kind for kind, _ in events] == [EventKind.DONE]
    assert pool.store.outcomes[generation].finish_reason is FinishReason.CANCELLED


async def test_stops_at_every_moment_all_end(pool: Pool) -> None:
    """Also those that overtake the request on its way into the engine."""
    async with pool.replica() as running:
        generations = [await pool.send(tokens=900, rate=100) for _ in range(40)]
        for start in range(0, 40, 10):
            await pool.dispatch()
            for number, generation in enumerate(generations[start : start + 10]):
                await asyncio.sleep(number * 0.001)
                await pool.cancel(generation)
        for generation in generations:
            assert (await pool.ended(generation))[-1][1]["finishReason"] == "cancelled"
        await eventually(lambda: running.engine.status().running == 0)
        await eventually(lambda: not running.replica.bookings)
    assert await booked(pool) == 0


@pytest.mark.parametrize("lost", ["everything", "the tail"])
async def test_lost_events_are_written_again(pool: Pool, lost: str) -> None:
    async with pool.replica():
        generation = await pool.send(text=TEXT, tokens=300, rate=300)
        await pool.dispatch()
        await pool.some_text(generation, 4)
        await lose(pool.valkey, generation, everything=lost == "everything")
        events = await pool.ended(generation)
    assert text_of(events) == said(300)
    assert events[-1][1]["usage"]["outputTokens"] == 300


async def lose(valkey: Valkey, generation: str, *, everything: bool) -> None:
    """What a failover does: acknowledged writes are gone, all of them or those after the second event."""
    at = GenerationKeys(generation)
    if everything:
        await valkey.command("DEL", at.events, at.state, at.request)
        return
    # An adapter command begins with its key, and the script is in its place: one node has all slots here.
    script = """
        local kept = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 2)
        redis.call('DEL', KEYS[2])
        for _, entry in ipairs(kept) do redis.call('XADD', KEYS[2], entry[1], unpack(entry[2])) end
        redis.call('HSET', KEYS[1], 'last', 2)
    """
    await valkey.command("EVAL", script, 2, at.state, at.events)


async def test_a_dead_replicas_reply_is_continued_from_its_tokens(pool: Pool) -> None:
    generation = await pool.send(text=TEXT, tokens=200, rate=200)
    async with pool.replica() as first, pool.replica() as second:
        await pool.dispatch()
        await pool.some_text(generation, 3)
        victim = first if first.replica.bookings else second
        victim.task.cancel()
        await victim.engine.stop()
        await asyncio.wait([victim.task])
        seen = text_of(await pool.events(generation))
        await eventually(lambda: swept(pool, generation))
        await eventually(lambda: dispatched(pool))
        events = await pool.ended(generation)
    assert text_of(events).startswith(seen)
    assert text_of(events) == said(200)
    assert events[-1][1]["usage"]["outputTokens"] == 200
    assert [kind for kind, _ in events].count(EventKind.STARTED) == 1


async def swept(pool: Pool, generation: str) -> bool:
    """The other replica beats every 100 ms, so a second of silence is death."""
    return generation in (await pool.lanes.sweep(pool.name, now_ms(), 1000, 10**9, 3)).requeued


async def dispatched(pool: Pool) -> bool:
    return await pool.dispatch() == 1


async def test_a_zombie_cannot_write(pool: Pool) -> None:
    """A replica that was thought dead goes on after another took over: it drops the reply, the engine is freed."""
    async with pool.replica() as running:
        generation = await pool.send(text=TEXT, tokens=900, rate=100)
        await pool.dispatch()
        await pool.some_text(generation, 2)
        await pool.buffer.claim(generation, 7)
        await eventually(lambda: running.engine.status().running == 0)
        await eventually(lambda: not running.replica.bookings)
    assert generation not in pool.store.outcomes


async def test_a_drain_lets_short_replies_end_and_hands_long_ones_over(pool: Pool) -> None:
    async with pool.replica(drain_seconds=2.0) as leaving:
        short = await pool.send(text=TEXT, tokens=60, rate=100)
        long = await pool.send(text=TEXT, tokens=300, rate=60)
        assert await pool.dispatch() == 2
        await pool.some_text(long, 2)
        leaving.stopping.set()
        late = await pool.send(text=TEXT, tokens=5)
        assert await leaving.task is True
        assert text_of(await pool.ended(short)) == said(60)
        seen = await pool.events(long)
        assert seen[-1][0] is EventKind.DELTA
        assert (await pool.lanes.status(pool.name)).replicas == 0
        async with pool.replica():
            assert await pool.dispatch() == 2
            events = await pool.ended(long)
            await pool.ended(late)
    assert events[: len(seen)] == seen
    assert text_of(events) == said(300)
    assert events[-1][1]["usage"]["outputTokens"] == 300


async def test_a_broken_engine_hands_its_replies_over(pool: Pool) -> None:
    async with pool.replica() as broken:
        generation = await pool.send(text=TEXT, tokens=300, rate=100)
        await pool.dispatch()
        await pool.some_text(generation, 2)
        broken.engine._loop.cancel()  # type: ignore[union-attr]
        assert await broken.task is False
        assert not broken.replica.ready()
        async with pool.replica():
            assert await pool.dispatch() == 1
            events = await pool.ended(generation)
    assert text_of(events) == said(300)
    assert events[-1][0] is EventKind.DONE
