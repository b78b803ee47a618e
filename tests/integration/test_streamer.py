"""Streamer processes against real Valkey and the AWS emulator: the test is the client and the worker."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio

from chat import frames
from chat.adapters import dynamo
from chat.adapters.dynamo import Stores
from chat.adapters.valkey import Valkey, ValkeyLanes, ValkeyTokenBuffer
from chat.catalogue import Catalogue
from chat.ids import new_id, now_ms, rfc3339
from chat.keys import GenerationKeys
from chat.model import Conversation, Cost, EventKind, FinishReason, GenerationStatus, MessageStatus, Outcome, Usage
from chat.ports import BufferEntry
from chat.requests import MAX_BODY_BYTES
from chat.settings import StoreSettings
from chat.usecases.finish_turn import FinishTurn
from stacks.local import backends
from stacks.local.issuer import Issuer
from tests.integration import tables
from tests.integration.streamers import AUDIENCE, ISSUER, MODELS, PLANS, Streamer
from tests.integration.test_token_buffer import a_request

Build = Callable[..., Awaitable[Streamer]]


@pytest.fixture(scope="module")
def stores_settings(ministack_port: int) -> Iterator[StoreSettings]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (backends.CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ministack_port}"}).items():
            patch.setenv(name, value)
        yield tables.create(f"http://127.0.0.1:{ministack_port}")


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    made = Issuer(ISSUER, AUDIENCE)
    yield made
    made.server.shutdown()


@pytest.fixture
def streamer(stores_settings: StoreSettings, issuer: Issuer, valkey_port: int, tmp_path: Path) -> Iterator[Build]:
    made: list[Streamer] = []

    async def build(port: int = valkey_port, **more: object) -> Streamer:
        made.append(Streamer(stores_settings, issuer, port, tmp_path / f"streamer-{len(made)}.log", **more))
        return await made[-1].until_healthy()

    yield build
    for one in made:
        one.kill()


@pytest_asyncio.fixture
async def stores(stores_settings: StoreSettings) -> AsyncIterator[Stores]:
    async with dynamo.connect(stores_settings) as made:
        yield made


class Work:
    """What a worker does: appends events, and ends turns."""

    def __init__(self, valkey: Valkey, stores: Stores) -> None:
        self.buffer, self.stores = ValkeyTokenBuffer(valkey), stores
        self.lanes = ValkeyLanes(valkey, PLANS)

    async def open(self, user: str = "ada") -> str:
        request = a_request(user_id=user)
        await self.buffer.open(request)
        return request.generation_id

    async def append(self, generation_id: str, first: int, *texts: str) -> list[bytes]:
        made = [frames.durable(seq, EventKind.DELTA, {"text": text}) for seq, text in enumerate(texts, first)]
        entries = [BufferEntry(frames.seq_of(one), EventKind.DELTA, one, [1]) for one in made]
        assert await self.buffer.append(generation_id, 0, entries) == first + len(texts) - 1
        return made

    async def end(self, generation_id: str, text: str = "") -> None:
        finish = FinishTurn(self.buffer, self.stores.generations, self.lanes, Catalogue(MODELS, PLANS))
        outcome = Outcome(FinishReason.STOP, text, Usage(5, 3), Cost(0.1))
        await finish(generation_id, "large", attempt=None, outcome=outcome)

    async def conversation(self, user: str = "ada") -> str:
        made = rfc3339(now_ms())
        conversation = Conversation(new_id("conv"), None, None, made, made, 0)
        await self.stores.conversations.create(user, conversation)
        return conversation.conversation_id


@pytest.fixture
def work(valkey: Valkey, stores: Stores) -> Work:
    return Work(valkey, stores)


async def test_a_send_streams_and_the_same_send_again_replays_it(streamer: Build, work: Work) -> None:
    one = await streamer()
    conversation = await work.conversation()
    answer = await one.send(conversation, "hello", "c1")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    generation_id = answer.headers["x-generation-id"]
    await answer.until(b"event: queued")
    assert answer.body.startswith(b"retry: 1000\n\n")
    await work.append(generation_id, 1, "Hel", "lo 😀")
    await answer.until("😀".encode())
    await work.end(generation_id, "Hello 😀")
    await answer.rest()
    assert answer.whole
    assert [frames.seq_of(frame) for frame in answer.durable] == [1, 2, 3]
    assert frames.data_of(answer.durable[-1])["finishReason"] == "stop"
    newest, _ = await work.stores.conversations.messages("ada", conversation, None, 2)
    assert (newest[0].message.status, newest[0].message.content) == (MessageStatus.COMPLETED, "Hello 😀")
    again = await (await one.send(conversation, "hello", "c1")).rest()
    assert again.headers["x-generation-id"] == generation_id
    assert again.durable == answer.durable
    other = await (await one.send(conversation, "something else", "c1")).rest()
    assert (other.status, other.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_a_regeneration_streams(streamer: Build, work: Work) -> None:
    one = await streamer()
    conversation = await work.conversation()
    first = await one.send(conversation, "hello", "c1")
    busy = await (await one.send(conversation, "again", "c2")).rest()
    assert (busy.status, busy.json()["error"]["code"]) == (409, "conversation_busy")
    assert busy.json()["error"]["generationId"] == first.headers["x-generation-id"]
    await work.end(first.headers["x-generation-id"], "one")
    await first.rest()
    path = f"/v1/conversations/{conversation}/messages/2/regenerate"
    again = await one.ask("POST", path, {"clientMessageId": "c3"})
    assert again.status == 200
    await work.end(again.headers["x-generation-id"], "two")
    await again.rest()
    newest, _ = await work.stores.conversations.messages("ada", conversation, None, 3)
    assert [found.message.content for found in newest] == ["two", "one", "hello"]
    assert newest[0].message.parent_id == newest[1].message.parent_id


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("GET", "/", None, {}, 404, "not_found"),
        ("GET", "/v1/generations/gen_9/stream", None, {}, 404, "not_found"),
        ("GET", "/v1/generations/gen_9/stream/", None, {}, 404, "not_found"),
        ("POST", "/v1/generations/gen_9/stream", {}, {}, 405, "method_not_allowed"),
        ("GET", "/v1/conversations/c/messages", None, {}, 405, "method_not_allowed"),
        ("POST", "/v1/conversations/c/messages", {"content": "x", "clientMessageId": "a"}, {}, 404, "not_found"),
        ("POST", "/v1/conversations/c/messages", {"content": "x"}, {}, 400, "invalid_request"),
        ("POST", "/v1/conversations/c/messages", b"{", {}, 400, "invalid_request"),
        ("POST", "/v1/conversations/c/messages", b"\xff\xfe", {}, 400, "invalid_request"),
        ("POST", "/v1/conversations/c/messages", b"x", {"Content_Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/conversations/c/messages", b"", {"Content_Length": str(10**12)}, 413, "too_large"),
        ("POST", "/v1/conversations/c/messages/x/regenerate", {"clientMessageId": "a"}, {}, 404, "not_found"),
        ("GET", "/v1/generations/gen_9/stream", None, {"Last_Event_ID": "x"}, 400, "invalid_request"),
        ("GET", "/v1/generations/gen_9/stream?lastEventId=-1", None, {}, 400, "invalid_request"),
        ("GET", "/v1/generations/gen_9/stream", None, {"Authorization": "Bearer x"}, 401, "unauthenticated"),
        ("GET", "/v1/generations/gen_9/stream", None, {"Authorization": "Basic eDp5"}, 401, "unauthenticated"),
    ],
)
async def test_refusals(
    shared: Streamer, method: str, path: str, body: object, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await (await shared.ask(method, path, body, X_Request_Id="req-1", **headers)).rest()
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"] == "req-1"


@pytest.fixture(scope="module")
def shared(
    stores_settings: StoreSettings, issuer: Issuer, valkey_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Streamer]:
    """One process for all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("streamer") / "log"
    made = Streamer(stores_settings, issuer, valkey_port, log)
    asyncio.run(made.until_healthy())
    yield made
    made.kill()


async def test_a_body_without_length_is_read_only_up_to_the_limit(shared: Streamer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    token = shared.issuer.token("ada")
    head = f"POST /v1/conversations/c/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for _ in range(MAX_BODY_BYTES // 65536 + 1):
        writer.write(chunk)
    await writer.drain()
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()


async def test_tokens_of_others_expired_or_missing_are_refused(shared: Streamer, work: Work) -> None:
    generation_id = await work.open()
    path = f"/v1/generations/{generation_id}/stream"
    stranger = await (await shared.follow(generation_id, user="eve")).rest()
    assert (stranger.status, stranger.json()["error"]["code"]) == (404, "not_found")
    for claims in ({"exp": 1}, {"iss": "https://other"}, {"aud": "other"}):
        token = f"Bearer {shared.issuer.token('ada', **claims)}"
        assert (await shared.ask("GET", path, Authorization=token)).status == 401
    assert (await shared.ask("GET", path, user=None)).status == 401


async def test_following_from_every_place(shared: Streamer, work: Work) -> None:
    generation_id = await work.open()
    sent = await work.append(generation_id, 1, "a", "b", "c")
    tail = await shared.ask("GET", f"/v1/generations/{generation_id}/stream?lastEventId=2")
    both = [await shared.follow(generation_id), await shared.follow(generation_id, 3)]
    await work.append(generation_id, 4, "d")
    await work.end(generation_id)
    whole, live = [await one.rest() for one in both]
    assert whole.durable[:3] == sent
    assert [frames.seq_of(one) for one in whole.durable] == [1, 2, 3, 4, 5]
    assert (await tail.rest()).durable == whole.durable[2:]
    assert live.durable == whole.durable[3:]
    assert (await (await shared.follow(generation_id, 5)).rest()).durable == []
    past = await (await shared.follow(generation_id, 6)).rest()
    assert (past.status, past.json()["error"]["param"]) == (400, "lastEventId")


async def test_a_silent_stream_gets_comments_and_a_client_that_left_is_forgotten(
    streamer: Build, work: Work, valkey: Valkey
) -> None:
    one = await streamer(heartbeat_seconds=0.3)
    generation_id = await work.open()
    answer = await one.follow(generation_id)
    await answer.until(frames.KEEP_ALIVE * 2, 5)
    channel = GenerationKeys(generation_id).channel

    assert await followers(valkey, channel) == 1
    await answer.hang_up()
    async with asyncio.timeout(5):
        while await followers(valkey, channel):
            await asyncio.sleep(0.02)


async def followers(valkey: Valkey, channel: str) -> int:
    """Subscriptions of a sharded channel, from the node that has it."""
    host, port = await valkey.node_of(channel)
    async with redis.asyncio.Redis(host=host, port=port) as client:
        return sum(number for _, number in await client.pubsub_shardnumsub(channel, target_nodes=None))


async def test_a_drain_sends_clients_elsewhere_where_nothing_is_missing(streamer: Build, work: Work) -> None:
    first, second = await streamer(), await streamer()
    generation_id = await work.open()
    sent = await work.append(generation_id, 1, "a", "b")
    answer, queued = await first.follow(generation_id), await first.follow(await work.open())
    await answer.until(b'"b"')
    first.tell_to_stop()
    await asyncio.gather(answer.rest(3), queued.rest(3))
    assert await first.stopped(5) == 0
    for one in (answer, queued):
        assert one.whole
        assert not any(frames.is_last(frame) for frame in one.durable)
        assert 0 < int(one.body.rpartition(b"retry: ")[2]) <= 2000
    await work.append(generation_id, 3, "c")
    await work.end(generation_id)
    rest = await (await second.follow(generation_id, 2)).rest()
    assert answer.durable == sent
    assert [frames.seq_of(one) for one in rest.durable] == [3, 4]


async def test_a_client_that_does_not_read_costs_little_memory_and_gets_all_later(
    streamer: Build, work: Work, valkey: Valkey
) -> None:
    one = await streamer()
    generation_id = await work.open()
    slow, quick = await one.follow(generation_id), await one.follow(generation_id)
    reading = asyncio.create_task(quick.rest(60))
    await work.append(generation_id, 1, "x")
    await slow.until(b'"x"')
    before = one.resident_bytes()
    text = "y" * 20_000
    for first in range(2, 1002, 20):
        await work.append(generation_id, first, *[text] * 20)
    grown = one.resident_bytes() - before
    await work.end(generation_id)
    await reading
    assert grown < 12_000_000  # of 20,000,000 that were published
    await slow.rest(60)
    assert slow.durable == quick.durable
    assert [frames.seq_of(frame) for frame in slow.durable] == list(range(1, 1003))


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read(streamer: Build, work: Work) -> None:
    one = await streamer()
    generation_id = await work.open()
    slow = await one.follow(generation_id)
    await slow.until(b"retry")
    for first in range(1, 1001, 10):
        await work.append(generation_id, first, *["y" * 20_000] * 10)
    one.tell_to_stop()
    assert await one.stopped(10) == 0
    await slow.hang_up()


async def test_more_connections_than_allowed_are_refused(streamer: Build, work: Work) -> None:
    one = await streamer(max_connections=2)
    generation_id = await work.open()
    open_ones = [await one.follow(generation_id) for _ in range(2)]
    refused = await (await one.follow(generation_id)).rest()
    assert (refused.status, refused.json()["error"]["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    await open_ones[0].hang_up()
    async with asyncio.timeout(5):
        while (await one.follow(generation_id)).status != 200:
            await asyncio.sleep(0.02)


async def test_valkey_that_comes_later_and_goes_away_in_between(streamer: Build, work: Work, tmp_path: Path) -> None:
    port = backends.free_port()
    one = await streamer(port)
    away = await (await one.follow("gen_9")).rest()
    assert (away.status, away.json()["error"]["code"]) == (503, "unavailable")
    assert int(away.headers["retry-after"]) >= 1
    conversation = await work.conversation()
    unsent = await (await one.send(conversation, "hello", "c1")).rest()
    assert unsent.status == 503

    def start() -> "subprocess.Popen[bytes]":
        process = backends.start(backends.valkey_command(tmp_path / "valkey", port), tmp_path / "valkey.log")
        backends.assign_slots(port)
        return process

    process = await asyncio.to_thread(start)
    try:
        async with asyncio.timeout(10):
            while (again := await one.send(conversation, "hello", "c1")).status != 200:
                await asyncio.sleep(0.1)
        generation_id = again.headers["x-generation-id"]
        await again.until(b"event: queued")
        process.kill()
        process.wait()
        process = await asyncio.to_thread(start)
        async with asyncio.timeout(10):
            while (await one.follow("gen_9")).status != 404:
                await asyncio.sleep(0.1)
        saved = await work.stores.generations.get(generation_id)
        assert saved is not None
        assert saved.status is GenerationStatus.QUEUED
        await again.hang_up()
    finally:
        process.kill()
        process.wait()
