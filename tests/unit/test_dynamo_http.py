"""The pool of connections to DynamoDB, against a server that misbehaves on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from botocore.credentials import ReadOnlyCredentials

from chat.adapters.dynamo import client, http
from chat.adapters.dynamo.client import CallFailed, ConditionFailed, TransactionCancelled
from chat.errors import Unavailable

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Server:
    """Answers with what `script` gives for each request in turn; None closes without an answer."""

    def __init__(self, *script: bytes | Callable[[Writer], Any] | None) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.writers: list[Writer] = []

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.requests.append(msgspec.json.decode(await reader.readexactly(length)))
                step = self.script.pop(0) if self.script else answer({})
                if step is None:
                    return
                if isinstance(step, bytes):
                    writer.write(step)
                else:
                    await step(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def answer(body: Any, status: int = 200, head: str = "") -> bytes:
    data = msgspec.json.encode(body)
    return f"HTTP/1.1 {status} x\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def refusal(kind: str, status: int = 400, **more: Any) -> bytes:
    return answer({"__type": f"com.amazonaws.dynamodb.v20120810#{kind}", "message": "no", **more}, status)


@asynccontextmanager
async def calls_to(server: Server) -> AsyncIterator[http.HttpCalls]:
    async def credentials() -> ReadOnlyCredentials:
        return ReadOnlyCredentials("key", "secret", None)

    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    calls = http.HttpCalls(f"http://127.0.0.1:{port}", "eu-central-1", credentials)
    try:
        yield calls
    finally:
        calls.close()
        listening.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TRY_SECONDS", 0.3)
    monkeypatch.setattr(client.with_retries, "__defaults__", (1.0,))


async def test_calls_share_a_kept_alive_connection() -> None:
    server = Server(answer({"n": 1}), answer({"n": 2}))
    async with calls_to(server) as calls:
        assert await calls.call("get_item", Key={"a": {"S": "ế"}}) == {"n": 1}
        assert await calls.call("get_item") == {"n": 2}
    assert server.connections == 1
    assert server.requests[0] == {"Key": {"a": {"S": "ế"}}}


async def test_calls_at_once_do_not_mix() -> None:
    async def echo(writer: Writer) -> None:
        writer.write(answer(server.requests[-1]))

    server = Server(*[echo] * 50)
    async with calls_to(server) as calls:
        found = await asyncio.gather(*(calls.call("get_item", n=n) for n in range(50)))
    assert [one["n"] for one in found] == list(range(50))


async def test_a_chunked_answer_in_pieces_is_whole() -> None:
    async def pieces(writer: Writer) -> None:
        for part in (
            b"HTTP/1.1 200 OK\r\nTransfer-Enc",
            b"oding: chunked\r\n\r\n4\r\n",
            b'{"a"\r\n3\r\n:1}\r\n0\r\n\r\n',
        ):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    async with calls_to(Server(pieces)) as calls:
        assert await calls.call("get_item") == {"a": 1}


async def test_an_idle_connection_that_was_closed_is_replaced_at_once() -> None:
    server = Server(answer({}), None, answer({"second": True}))
    async with calls_to(server) as calls:
        await calls.call("get_item")
        assert await calls.call("get_item") == {"second": True}
    assert (server.connections, len(server.requests)) == (2, 3)


async def test_connection_close_is_respected() -> None:
    server = Server(answer({}, head="Connection: close\r\n"), answer({"second": True}))
    async with calls_to(server) as calls:
        await calls.call("get_item")
        assert await calls.call("get_item") == {"second": True}
    assert server.connections == 2


@pytest.mark.parametrize(
    "first",
    [
        refusal("ThrottlingException"),
        refusal("ProvisionedThroughputExceededException"),
        refusal("InternalServerError", 500),
        answer("nothing that is known", 503),
        b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\n<ht>",
        b"garbage\r\n\r\n",
        refusal(
            "TransactionCanceledException", CancellationReasons=[{"Code": "None"}, {"Code": "TransactionConflict"}]
        ),
        None,
    ],
)
async def test_what_passes_is_tried_again(first: bytes | None) -> None:
    async with calls_to(Server(first, answer({"ok": True}))) as calls:
        assert await calls.call("put_item") == {"ok": True}


async def test_conditions_are_told_apart() -> None:
    item = {"userId": {"S": "ada"}}
    cancelled = refusal(
        "TransactionCanceledException",
        CancellationReasons=[{"Code": "None"}, {"Code": "ConditionalCheckFailed", "Item": item}],
    )
    async with calls_to(Server(refusal("ConditionalCheckFailedException"), cancelled)) as calls:
        with pytest.raises(ConditionFailed):
            await calls.call("put_item")
        with pytest.raises(TransactionCancelled) as caught:
            await calls.call("transact_write_items")
    first, second = caught.value.reasons
    assert (first.failed, second.failed, second.item) == (False, True, item)


async def test_a_faulty_call_is_not_tried_again() -> None:
    server = Server(refusal("ValidationException"))
    async with calls_to(server) as calls:
        with pytest.raises(CallFailed, match="ValidationException"):
            await calls.call("put_item")
    assert len(server.requests) == 1


async def test_a_server_that_is_silent_or_away_is_unavailable_within_the_deadline() -> None:
    async def silent(writer: Writer) -> None:
        await asyncio.sleep(10)

    loop = asyncio.get_running_loop()
    async with calls_to(Server(*[silent] * 20)) as calls:
        began = loop.time()
        with pytest.raises(Unavailable) as caught:
            await calls.call("get_item")
        assert caught.value.retry_after == 2
        assert loop.time() - began < 3


async def test_the_answer_to_a_call_that_was_given_up_is_nobody_elses() -> None:
    async def late(writer: Writer) -> None:
        await asyncio.sleep(0.1)
        writer.write(answer({"late": True}))

    server = Server(late)
    async with calls_to(server) as calls:
        given_up = asyncio.create_task(calls.call("get_item"))
        while not server.requests:
            await asyncio.sleep(0.001)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await calls.call("get_item") == {}
    assert server.connections == 2
