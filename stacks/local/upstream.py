"""HTTP/1.1 to the servers behind the edge, with kept connections, and answers handed on as they arrive.

A general client costs as much as everything else that the edge does; this one parses and forwards, no more.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

import httptools

Headers = list[tuple[bytes, bytes]]

CONNECT_SECONDS = 2.0
KEPT_SECONDS = 60.0
"""Less than the servers keep an idle connection."""

MOST_KEPT = 256
HIGH_WATER, LOW_WATER = 256 * 1024, 64 * 1024
"""Bytes of an answer that may wait for a slow client; then the server is read no further."""


class UpstreamError(Exception):
    """The server ended the connection inside an answer, or sent no HTTP."""


class NotConnected(UpstreamError):
    """No connection could be made: the request was not sent."""


class Connection(asyncio.Protocol):
    """One connection, and the answer that is being read from it."""

    def __init__(self, origin: tuple[str, int]) -> None:
        self.origin, self.kept_since, self.lost = origin, 0.0, False
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._parts: deque[bytes] = deque()
        self._waiting = 0
        self._paused = self._head_whole = self.whole = self._keep_alive = False
        self._news: asyncio.Future[None] | None = None

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] - uvloop's TCP transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._tell()

    # The parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._head_whole = True
        else:  # 1xx goes before the answer
            self._headers = []

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._waiting += len(body)
        if self._waiting > HIGH_WATER and not self._paused and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True

    def on_message_complete(self) -> None:
        self.whole = self._head_whole
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this call

    # The edge's calls

    def send(self, request: bytes) -> None:
        """Begin another exchange."""
        self._begin()
        assert self._transport is not None  # noqa: S101 - made by Pool.connect
        self._transport.write(request)

    async def head(self) -> tuple[int, Headers]:
        """Status and headers (lower-case names). Raises UpstreamError."""
        while not self._head_whole:
            await self._more()
        return self._parser.get_status_code(), self._headers

    async def body(self) -> AsyncIterator[bytes]:
        """What has arrived, as soon as it has. Raises UpstreamError when the server breaks off."""
        while True:
            if self._parts:
                part = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._waiting = 0
                if self._paused and self._transport is not None:
                    self._paused = False
                    self._transport.resume_reading()
                yield part
            elif self.whole:
                return
            else:
                await self._more()

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow."""
        return self.whole and not self.lost and not self._paused and self._keep_alive

    def close(self) -> None:
        """Break off, at once."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._tell()

    async def _more(self) -> None:
        if self.lost:
            raise UpstreamError("the server broke off")
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class Pool:
    """Connections that are kept between requests."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], list[Connection]] = {}

    async def connect(self, origin: tuple[str, int]) -> Connection:
        """A kept connection, or a new one. Raises NotConnected."""
        kept, oldest = self._kept.get(origin, []), time.monotonic() - KEPT_SECONDS
        while kept:
            connection = kept.pop()
            if not connection.lost and connection.kept_since > oldest:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, made = await loop.create_connection(lambda: Connection(origin), *origin)
        except (OSError, TimeoutError) as error:
            raise NotConnected(f"{origin[0]}:{origin[1]}: {error}") from error
        return made

    def give_back(self, connection: Connection) -> None:
        """Keep it if it can be used again, else close it."""
        kept = self._kept.setdefault(connection.origin, [])
        if connection.reusable and len(kept) < MOST_KEPT:
            connection.kept_since = time.monotonic()
            kept.append(connection)
        else:
            connection.close()
