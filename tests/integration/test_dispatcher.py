"""Dispatcher processes against real Valkey and the AWS emulator, and their loops against stores that misbehave."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio

from chat import frames
from chat.adapters import dynamo
from chat.adapters.dynamo import Stores
from chat.adapters.valkey import Valkey, ValkeyLanes, ValkeyTokenBuffer, connect
from chat.errors import Unavailable
from chat.ids import new_id, now_ms, rfc3339
from chat.model import (
    Conversation,
    EventKind,
    Generation,
    GenerationStatus,
    Job,
    Message,
    MessageStatus,
    Role,
    StoredMessage,
)
from chat.ports import BeginStatus, BufferEntry, NewTurn, PoolStatus, ReplicaStatus, Send, Swept
from chat.settings import PlanSpec, StoreSettings
from containers.dispatcher.app import DispatcherHttp
from containers.dispatcher.loops import PoolLoops
from containers.dispatcher.metrics import Metrics
from stacks.local import backends
from tests.integration import tables
from tests.integration.test_token_buffer import a_request

PLANS = [PlanSpec("free", 1, 2000), PlanSpec("plus", 0, 8000)]


@pytest.fixture(scope="module")
def stores_settings(ministack_port: int) -> Iterator[StoreSettings]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (backends.CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ministack_port}"}).items():
            patch.setenv(name, value)
        yield tables.create(f"http://127.0.0.1:{ministack_port}")


class Dispatcher:
    """A process. `pool` is its own, so that tests do not meet."""

    def __init__(self, settings: StoreSettings, valkey_port: int, pool: str, log: Path, **more: object) -> None:
        self.port = backends.free_port()
        values = msgspec.structs.asdict(settings) | {
            "valkey_url": f"redis://127.0.0.1:{valkey_port}",
            "models": "[]",
            "plans": msgspec.json.encode(PLANS).decode(),
            "pools": json.dumps([pool]),
            "host": "127.0.0.1",
            "port": self.port,
            **more,
        }
        environment = {name.upper(): str(value) for name, value in values.items() if name != "trace_stages"}
        command = backends.Command(
            [sys.executable, "-m", "containers.dispatcher.app"],
            {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "PATH"))} | environment,
            backends.ROOT,
        )
        self.log = log
        self.process = backends.start(command, log)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    async def until_healthy(self) -> None:
        async with asyncio.timeout(20):
            while (await asyncio.to_thread(self.get, "/healthz"))[0] != 200:
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture
def dispatcher(stores_settings: StoreSettings, valkey_port: int, tmp_path: Path) -> Iterator[Callable[..., Dispatcher]]:
    made: list[Dispatcher] = []

    def build(pool: str, port: int = valkey_port, **more: object) -> Dispatcher:
        made.append(Dispatcher(stores_settings, port, pool, tmp_path / f"dispatcher-{len(made)}.log", **more))
        return made[-1]

    yield build
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest_asyncio.fixture
async def stores(stores_settings: StoreSettings) -> AsyncIterator[Stores]:
    async with dynamo.connect(stores_settings) as made:
        yield made


async def a_turn(stores: Stores, buffer: ValkeyTokenBuffer, lanes: ValkeyLanes, pool: str, *texts: str) -> str:
    """A turn that is saved, open in the buffer (with some text) and queued, as a send leaves it. Its generation."""
    created, ident, user = rfc3339(now_ms()), new_id("gen"), "ada"
    conversation = Conversation(new_id("conv"), None, None, created, created, 0)
    await stores.conversations.create(user, conversation)
    asked = Message(
        new_id("msg"), conversation.conversation_id, 1, Role.USER, "hello", MessageStatus.COMPLETED, None, None, None,
        created,
    )  # fmt: skip
    reply = Message(
        new_id("msg"), conversation.conversation_id, 2, Role.ASSISTANT, "", MessageStatus.STREAMING, "m",
        asked.message_id, ident, created,
    )  # fmt: skip
    generation = Generation(
        ident, user, conversation.conversation_id, reply.message_id, 2, asked.message_id, "plus", "m", pool,
        GenerationStatus.QUEUED, created, 100, 5, 105, now_ms() + 300_000, "c1",
    )  # fmt: skip
    turn = NewTurn(Send("c1", "f", ident, 1, 2), StoredMessage(asked, 5), reply, generation, 0, "hello")
    assert await stores.conversations.begin_turn(user, turn) is BeginStatus.CREATED
    await buffer.open(a_request(generation_id=ident, conversation_id=conversation.conversation_id, pool=pool))
    if texts:
        await buffer.claim(ident, 1)
        entries = [
            BufferEntry(seq, EventKind.DELTA, frames.durable(seq, EventKind.DELTA, {"text": text}), [seq])
            for seq, text in enumerate(texts, 1)
        ]
        await buffer.append(ident, 1, entries)
    await lanes.enqueue(pool, Job(ident, user, conversation.conversation_id, "plus", 100, now_ms()))
    return ident


async def until_final(stores: Stores, generation_id: str) -> Generation:
    async with asyncio.timeout(15):
        while True:
            found = await stores.generations.get(generation_id)
            if found is not None and found.status.final:
                return found
            await asyncio.sleep(0.05)


async def test_two_processes_give_a_thousand_jobs_exactly_once(
    dispatcher: Callable[..., Dispatcher], valkey: Valkey
) -> None:
    pool, lanes = new_id("pool"), ValkeyLanes(valkey, PLANS)
    both = [dispatcher(pool), dispatcher(pool)]
    for one in both:
        await one.until_healthy()
    names = ("r1", "r2", "r3")
    given: list[str] = []

    async def replica(name: str) -> None:
        """Room for ten at a time; each is done at once."""
        while len(given) < 1000:
            await lanes.heartbeat(pool, ReplicaStatus(name, 1000, 0, False), now_ms())
            for _ in range(50):
                assignment = await lanes.take(pool, name, 0.2)
                if assignment is None:
                    break
                assert assignment.attempt == 1
                given.append(assignment.generation_id)
                await lanes.release(pool, assignment.generation_id)

    jobs = [Job(new_id("gen"), "ada", "c", "plus" if one % 3 else "free", 100, now_ms()) for one in range(1000)]

    async def arrivals() -> None:
        for job in jobs:
            await lanes.enqueue(pool, job)

    async with asyncio.timeout(30):
        await asyncio.gather(arrivals(), *(replica(name) for name in names))
    assert sorted(given) == sorted(job.generation_id for job in jobs)
    async with asyncio.timeout(5):  # counters are read when a dispatcher sweeps
        while True:
            texts = [(await asyncio.to_thread(one.get, "/metrics"))[1] for one in both]
            counts = [float(text.split("dispatcher_dispatched_total{")[1].split("} ")[1].split()[0]) for text in texts]
            if sum(counts) == 1000:
                break
            await asyncio.sleep(0.05)
    assert "pool_queued" in texts[0] and "pool_kv_capacity_tokens" in texts[0]
    began = time.monotonic()
    assert [one.stop() for one in both] == [0, 0]
    assert time.monotonic() - began < 5


async def test_a_job_is_given_out_within_milliseconds(dispatcher: Callable[..., Dispatcher], valkey: Valkey) -> None:
    pool, lanes = new_id("pool"), ValkeyLanes(valkey, PLANS)
    await dispatcher(pool).until_healthy()
    took = []
    for _ in range(20):
        await lanes.heartbeat(pool, ReplicaStatus("r1", 1000, 0, False), now_ms())
        waiting = asyncio.create_task(lanes.take(pool, "r1", 2))
        await asyncio.sleep(0.02)  # so that the replica waits already
        job = Job(new_id("gen"), "ada", "c", "plus", 100, now_ms())
        began = time.perf_counter()
        await lanes.enqueue(pool, job)
        assignment = await waiting
        took.append(time.perf_counter() - began)
        assert assignment is not None and assignment.generation_id == job.generation_id
        await lanes.release(pool, job.generation_id)
    assert sorted(took)[10] < 0.1, took  # far below the tick: it was woken


async def test_a_generation_out_of_attempts_fails_and_keeps_its_text(
    dispatcher: Callable[..., Dispatcher], valkey: Valkey, stores: Stores
) -> None:
    pool, lanes, buffer = new_id("pool"), ValkeyLanes(valkey, PLANS), ValkeyTokenBuffer(valkey)
    ident = await a_turn(stores, buffer, lanes, pool, "The answer ", "is")
    await dispatcher(pool, max_attempts=1, silent_seconds=0.3).until_healthy()
    await lanes.heartbeat(pool, ReplicaStatus("r1", 1000, 0, False), now_ms())
    assert await lanes.take(pool, "r1", 5)
    found = await until_final(stores, ident)
    assert found.status is GenerationStatus.FAILED and found.error is not None
    assert found.error["code"] == "engine_failed" and found.usage.output_tokens == 2
    opened = await stores.conversations.open("ada", found.conversation_id, 5)
    assert opened.newest[0].message.content == "The answer is" and opened.active_generation_id is None
    async with asyncio.timeout(5):
        while await lanes.place(pool, ident) is not None:
            await asyncio.sleep(0.02)
    last = (await buffer.frames(ident, 0))[-1]
    assert frames.kind_of(last) is EventKind.ERROR and frames.seq_of(last) == 3


async def test_a_queued_generation_without_followers_is_cancelled(
    dispatcher: Callable[..., Dispatcher], valkey: Valkey, stores: Stores
) -> None:
    pool, lanes, buffer = new_id("pool"), ValkeyLanes(valkey, PLANS), ValkeyTokenBuffer(valkey)
    left = await a_turn(stores, buffer, lanes, pool)
    followed = await a_turn(stores, buffer, lanes, pool)
    await lanes.touch_followed(pool, [followed], now_ms() + 600_000)
    await dispatcher(pool, abandoned_seconds=0.5).until_healthy()
    assert (await until_final(stores, left)).status is GenerationStatus.CANCELLED
    assert frames.kind_of((await buffer.frames(left, 0))[-1]) is EventKind.DONE
    assert (await lanes.place(pool, followed)).position == 1  # type: ignore[union-attr]


async def test_it_starts_without_valkey_and_works_once_there_is_one(
    dispatcher: Callable[..., Dispatcher], tmp_path: Path
) -> None:
    port, pool = backends.free_port(), new_id("pool")
    process = dispatcher(pool, port=port)
    await process.until_healthy()
    await until(lambda: "dispatch: a store is away" in process.log.read_text())
    server = backends.start(backends.valkey_command(tmp_path / "valkey", port), tmp_path / "valkey.log")
    try:
        await asyncio.to_thread(backends.assign_slots, port)
        valkey = connect(f"redis://127.0.0.1:{port}")
        lanes = ValkeyLanes(valkey, PLANS)
        await lanes.heartbeat(pool, ReplicaStatus("r1", 1000, 0, False), now_ms() + 60_000)
        await lanes.enqueue(pool, Job(new_id("gen"), "ada", "c", "plus", 100, now_ms()))
        assert await lanes.take(pool, "r1", 10)
        assert process.stop() == 0
        assert process.log.read_text().count("dispatch: a store is away") == 1
        await valkey.close()
    finally:
        server.kill()
        server.wait()


class MisbehavingLanes:
    """Answers what a test tells it to."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.swept = Swept([], [], [])
        self.sweeps = self.dispatches = 0

    async def dispatch(self, pool: str, now_ms: int, limit: int) -> list[object]:
        self.dispatches += 1
        if self.fault:
            raise self.fault
        return []

    async def sweep(self, *_: object) -> Swept:
        self.sweeps += 1
        if self.fault:
            raise self.fault
        return self.swept

    async def status(self, pool: str) -> PoolStatus:
        return PoolStatus({}, 0, 0, 0, 0)


class Silence:
    async def listen(self, channel: str) -> "Silence":
        return self

    async def next(self, timeout_seconds: float) -> None:
        await asyncio.sleep(0.01)

    def ready(self) -> list[bytes]:
        return []


@pytest_asyncio.fixture
async def loops() -> AsyncIterator[SimpleNamespace]:
    """Loops over misbehaving lanes; `ended` are the generations that were ended, "gen_bad" cannot be."""
    lanes, ended, stuck = MisbehavingLanes(), [], asyncio.Event()

    async def finish(generation_id: str, pool: str, **_: object) -> None:
        if generation_id == "gen_slow":
            await stuck.wait()
        if generation_id == "gen_bad":
            raise ValueError("a row that nobody can read")
        ended.append(generation_id)

    settings = SimpleNamespace(silent_seconds=3.0, abandoned_seconds=30.0, max_attempts=3)
    cancel = SimpleNamespace(by_system=lambda generation_id: finish(generation_id, ""))
    made = PoolLoops("large", settings, lanes, Silence(), finish, cancel, Metrics())  # type: ignore[arg-type]
    task = asyncio.create_task(made.run())
    yield SimpleNamespace(lanes=lanes, ended=ended, pool=made, task=task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_bad_generation_does_not_keep_others_from_ending(loops: SimpleNamespace) -> None:
    loops.lanes.swept = Swept([], ["gen_bad", "gen_slow", "gen_a"], ["gen_b"])
    await until(lambda: {"gen_a", "gen_b"} <= set(loops.ended))
    sweeps = loops.lanes.sweeps
    await until(lambda: loops.lanes.sweeps > sweeps)
    assert not loops.task.done()


@pytest.mark.parametrize("fault", [Unavailable("away"), ValueError("a fault of ours")])
async def test_the_loops_outlive_every_fault(loops: SimpleNamespace, fault: Exception) -> None:
    loops.lanes.fault = fault
    sweeps, dispatches = loops.lanes.sweeps, loops.lanes.dispatches
    await until(lambda: loops.lanes.sweeps > sweeps + 2 and loops.lanes.dispatches > dispatches + 2)
    assert time.monotonic() - loops.pool.progressed_at < 1.0
    loops.lanes.fault, loops.lanes.swept = None, Swept([], ["gen_a"], [])
    await until(lambda: "gen_a" in loops.ended)


@pytest.mark.parametrize(("age", "status"), [(1.0, 200), (6.0, 503)])
async def test_a_loop_that_hangs_makes_it_unhealthy(age: float, status: int) -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    pool = SimpleNamespace(pool="large", progressed_at=time.monotonic() - age)
    app = DispatcherHttp([pool], Metrics())  # type: ignore[list-item]
    await app({"type": "http", "path": "/healthz"}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
