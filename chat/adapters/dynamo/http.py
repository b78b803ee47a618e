"""DynamoDB over plain HTTP/1.1, signed here: what a send costs the streamer before the first token.

aiobotocore takes milliseconds of CPU a call, most of the path's whole allowance (docs/adr/0009). DynamoDB's API is
`POST /` with JSON both ways, so a pool of kept-alive connections and a signature are all that is needed.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from chat.adapters.dynamo.client import CallFailed, Reason, with_retries
from chat.adapters.dynamo.signing import Credentials, Signer

CONNECT_SECONDS = 1.0
MAX_CONNECTIONS = 200
_LARGEST_RESPONSE = 20_000_000  # the API's own limit is 16 MB


class _Error(msgspec.Struct):
    """The body of a refusal."""

    kind: str = msgspec.field(name="__type", default="")
    message: str = ""
    reasons: list[dict[str, Any]] = msgspec.field(name="CancellationReasons", default_factory=list)


class Connection(asyncio.Protocol):
    """One kept-alive connection; one exchange at a time."""

    def __init__(self) -> None:
        self.alive = False
        self.used = False
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio.Transport, so this cannot be an isinstance check.
        self._transport = cast(asyncio.Transport, transport)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"no HTTP answer: {error}"))

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _LARGEST_RESPONSE:
            self._fail(ConnectionError("the answer is too large"))

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        status, keep = self._parser.get_status_code(), self._parser.should_keep_alive()
        if not keep:
            self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError("the connection was closed"))

    def exchange(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Status and body of the answer. Raises ConnectionError."""
        self._waiting = asyncio.get_running_loop().create_future()
        if self.alive and self._transport is not None:
            self._transport.write(request)
        else:
            self._waiting.set_exception(ConnectionError("the connection was closed"))
        return self._waiting

    def close(self) -> None:
        """No further exchange."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


class HttpCalls:
    """DynamoCalls over a pool of connections. `credentials` is asked before each try, since they expire."""

    def __init__(self, endpoint: str, region: str, credentials: Callable[[], Awaitable[Credentials]]) -> None:
        address = urlsplit(endpoint)
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._address = (address.hostname or "", address.port or (443 if self._tls else 80))
        self._signer = Signer(address.netloc, region, "dynamodb")
        self._credentials = credentials
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """See DynamoCalls."""
        target = "DynamoDB_20120810." + operation.title().replace("_", "")
        body = msgspec.json.encode(arguments)
        answer: Mapping[str, Any] = await with_retries(lambda: self._once(target, body))
        return answer

    def close(self) -> None:
        """Close what is kept alive."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _once(self, target: str, body: bytes) -> Any:
        headers = self._signer.headers(target, body, await self._credentials())
        request = f"POST / HTTP/1.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
        async with self._free:
            status, answer = await self._exchange(request)
        if status == 200:
            return msgspec.json.decode(answer)
        raise _failure(status, answer)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        """A kept-alive connection may have been closed by the other side just now; then another is tried at once,
        which is safe because every write is conditional or carries a token."""
        while True:
            connection = self._kept() or await self._open()
            try:
                answer = await connection.exchange(request)
            except ConnectionError:
                if connection.used:
                    continue
                raise
            except BaseException:
                connection.close()  # an answer may still come; nobody must take it for his
                raise
            connection.used = True
            if connection.alive:
                self._idle.append(connection)
            return answer

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(Connection, *self._address, ssl=self._tls)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection


def _failure(status: int, answer: bytes) -> CallFailed:
    try:
        error = msgspec.json.decode(answer, type=_Error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _Error()
    reasons = [Reason(one.get("Code") or "None", one.get("Item")) for one in error.reasons]
    return CallFailed(error.kind.rpartition("#")[2], status, error.message, reasons)
