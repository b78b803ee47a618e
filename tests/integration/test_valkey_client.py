"""The cluster client: Valkey away, hung, restarted, and a cluster whose slots move. Starts servers of its own."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from chat import frames
from chat.adapters.valkey import Valkey, ValkeyTokenBuffer, ValkeyWakeups, connect
from chat.adapters.valkey.client import CommandError, slot_of
from chat.errors import Unavailable
from chat.keys import GenerationKeys
from stacks.local import backends
from tests.integration.test_token_buffer import a_request, deltas

Start = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Valkey on a port, any number of times; its slots are not assigned yet."""
    made = []

    def start(port: int) -> subprocess.Popen[bytes]:
        process = backends.start(backends.valkey_command(tmp_path / str(port), port), tmp_path / f"{port}.log")
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Callable[[int], Valkey]]:
    made = []

    def build(port: int) -> Valkey:
        made.append(connect(f"redis://127.0.0.1:{port}", deadline_seconds=0.6))
        return made[-1]

    yield build
    for one in made:
        await one.close()


async def until_it_works(valkey: Valkey, key: str = "{x}", limit_seconds: float = 10) -> None:
    async with asyncio.timeout(limit_seconds):
        while True:
            try:
                await valkey.command("GET", key)
                return
            except Unavailable:
                continue


async def test_away_at_start_then_there(start: Start, client: Callable[[int], Valkey]) -> None:
    port = backends.free_port()
    valkey = client(port)
    began = time.monotonic()
    results = await asyncio.gather(*(valkey.command("GET", "{x}") for _ in range(50)), return_exceptions=True)
    assert all(isinstance(one, Unavailable) and one.retry_after for one in results)
    assert time.monotonic() - began < 1.5
    start(port)
    await asyncio.to_thread(backends.assign_slots, port)
    await until_it_works(valkey)


async def test_a_restart_is_survived_by_calls_and_followers(start: Start, client: Callable[[int], Valkey]) -> None:
    port = backends.free_port()
    valkey, process = client(port), start(port)
    await asyncio.to_thread(backends.assign_slots, port)
    buffer, wakeups = ValkeyTokenBuffer(valkey), ValkeyWakeups(valkey)
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.append(request.generation_id, 1, deltas(1, "a"))
    follower = await wakeups.subscribe(request.generation_id)
    process.terminate()
    process.wait()
    assert await asyncio.wait_for(follower.next(5), 5) is None
    with pytest.raises(Unavailable):
        await buffer.live(request.generation_id)
    with pytest.raises(Unavailable):
        await wakeups.subscribe("gen_other")
    start(port)
    await until_it_works(valkey)
    assert len(await buffer.frames(request.generation_id, 0)) == 1
    await still_heard(buffer, follower, request.generation_id, 2)
    await wakeups.close()


async def still_heard(buffer: ValkeyTokenBuffer, follower: object, generation_id: str, seq: int) -> None:
    """Append until the follower hears something live again; gaps in between are in order."""
    async with asyncio.timeout(10):
        while True:
            await buffer.append(generation_id, 1, deltas(seq, "x"))
            if await follower.next(0.2) is not None:  # type: ignore[attr-defined]
                return
            seq += 1


async def test_a_hung_server_is_given_up_within_the_deadline(start: Start, client: Callable[[int], Valkey]) -> None:
    port = backends.free_port()
    valkey, process = client(port), start(port)
    await asyncio.to_thread(backends.assign_slots, port)
    await until_it_works(valkey)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    results = await asyncio.gather(*(valkey.command("GET", "{x}") for _ in range(20)), return_exceptions=True)
    process.send_signal(signal.SIGCONT)
    assert all(isinstance(one, Unavailable) for one in results)
    assert time.monotonic() - began < 3
    await until_it_works(valkey)


async def test_a_password_is_given_on_every_connection(start: Start, client: Callable[[int], Valkey]) -> None:
    port = backends.free_port()
    plain, _ = client(port), start(port)
    await asyncio.to_thread(backends.assign_slots, port)
    await plain.command("CONFIG", "SET", "requirepass", "local-secret")
    right = connect(f"redis://127.0.0.1:{port}", "local-secret", deadline_seconds=0.6)
    wrong = connect(f"redis://127.0.0.1:{port}", "another", deadline_seconds=0.6)
    wakeups = ValkeyWakeups(right)
    follower = await wakeups.listen("{x}")
    await right.command("SPUBLISH", "{x}", "hello")
    assert await follower.next(2) == b"hello"
    assert await right.blocking("BLPOP", "{x}", 0.05) is None
    with pytest.raises(Unavailable):
        await wrong.command("GET", "{x}")
    await wakeups.close()
    for one in (right, wrong):
        await one.close()


async def test_slots_may_move_between_nodes(start: Start, client: Callable[[int], Valkey]) -> None:
    first, second = backends.free_port(), backends.free_port()
    for port in (first, second):
        start(port)
    one, two = client(first), client(second)
    await asyncio.to_thread(backends.assign_slots, first)
    request = a_request()
    slot = slot_of(GenerationKeys(request.generation_id).state)

    async def ask(node: Valkey, *words: object) -> object:
        async with asyncio.timeout(10):
            while True:
                try:
                    connection = await node._connection(("127.0.0.1", node._seed[1]))
                    return await connection.send(words)
                except OSError:
                    await asyncio.sleep(0.02)

    await ask(two, "CLUSTER", "MEET", "127.0.0.1", first)
    ident = (await ask(two, "CLUSTER", "MYID")).decode()  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while ident not in str(await ask(one, "CLUSTER", "NODES")):
            await asyncio.sleep(0.02)
    valkey = client(first)
    buffer, wakeups = ValkeyTokenBuffer(valkey), ValkeyWakeups(valkey)
    follower = await wakeups.subscribe(request.generation_id)
    for node in (two, one):
        await ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ident)
    async with asyncio.timeout(15):  # the other node has to hear of it by gossip
        while await ask(two, "CLUSTER", "COUNTKEYSINSLOT", slot) == 0:
            try:
                await buffer.open(request)
            except Unavailable:
                continue
    await buffer.claim(request.generation_id, 1)
    await still_heard(buffer, follower, request.generation_id, 1)
    await wakeups.close()


async def test_scripts_are_loaded_again_after_they_were_flushed(valkey: Valkey) -> None:
    buffer, request = ValkeyTokenBuffer(valkey), a_request()
    await buffer.open(request)
    await valkey.command("SCRIPT", "FLUSH")
    await buffer.claim(request.generation_id, 1)


async def test_a_fault_of_ours_is_no_outage(valkey: Valkey) -> None:
    await valkey.command("SET", "{x}", "text")
    with pytest.raises(CommandError):
        await valkey.command("INCR", "{x}")
    await valkey.command("DEL", "{x}")


async def test_all_callers_share_one_connection(valkey: Valkey) -> None:
    await asyncio.gather(*(valkey.command("GET", f"{{{one}}}") for one in range(500)))
    assert len(valkey._connections) == 1


def test_everything_works_on_the_event_loop_of_the_containers(valkey_port: int) -> None:
    async def main() -> None:
        valkey = connect(f"redis://127.0.0.1:{valkey_port}")
        buffer, wakeups = ValkeyTokenBuffer(valkey), ValkeyWakeups(valkey)
        request = a_request()
        await buffer.open(request)
        await buffer.claim(request.generation_id, 1)
        follower = await wakeups.subscribe(request.generation_id)
        await buffer.append(request.generation_id, 1, deltas(1, "a"))
        assert frames.seq_of(await follower.next(2) or b"") == 1
        assert await follower.next(0.02) is None
        await wakeups.close()
        await valkey.close()

    uvloop.run(main())


def test_a_client_may_outlive_its_event_loop(valkey_port: int) -> None:
    valkey = connect(f"redis://127.0.0.1:{valkey_port}")
    for _ in range(3):
        assert asyncio.run(valkey.command("EXISTS", "{nothing}")) == 0


@pytest.mark.parametrize(
    ("key", "slot"), [("123456789", 12739), ("{123456789}:a", 12739), ("a{}{123456789}", slot_of("a{}{123456789}"))]
)
def test_slots_are_those_of_the_cluster_specification(key: str, slot: int) -> None:
    assert slot_of(key) == slot
