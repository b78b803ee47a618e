"""A connection to one Valkey node, written on asyncio's protocol level with hiredis.

Commands of all callers share it, one behind the other: a call costs one write, one future and no connection of
its own (docs/adr/0004).
"""

import asyncio
import socket
import ssl
from collections import deque
from typing import Any, cast

import hiredis

Address = tuple[str, int]
ReplyError = hiredis.ReplyError

WATCH_SECONDS = 0.25
CONNECT_SECONDS = 1.0


class NodeConnection(asyncio.Protocol):
    """Answers come in the order of the commands. A node that stays silent for `patience` seconds is given up."""

    def __init__(self, address: Address, patience: float) -> None:
        self.address, self.patience = address, patience
        self.alive = False
        self.used_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio.Transport, so this cannot be an isinstance check.
        self._transport = cast(asyncio.Transport, transport)
        self.alive, self.used_at = True, self._loop.time()
        self._watch = self._loop.call_later(WATCH_SECONDS, self._check)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        while (answer := reader.gets()) is not False:
            future = waiting.popleft()[0]
            if not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._watch is not None:
            self._watch.cancel()
        while self._waiting:
            future = self._waiting.popleft()[0]
            if not future.done():
                future.set_exception(ConnectionError(f"connection to {self.address[0]}:{self.address[1]} lost"))

    def _check(self) -> None:
        """The oldest unanswered command tells whether the node still answers; no timer for each call."""
        if self._waiting and self._loop.time() - self._waiting[0][1] > self.patience:
            self.abort()
        else:
            self._watch = self._loop.call_later(WATCH_SECONDS, self._check)

    def send(self, words: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Write a command; its answer (a ReplyError is an answer too). Raises ConnectionError."""
        if not self.alive or self._transport is None:
            raise ConnectionError(f"no connection to {self.address[0]}:{self.address[1]}")
        future: asyncio.Future[Any] = self._loop.create_future()
        now = self.used_at = self._loop.time()
        self._waiting.append((future, now))
        self._transport.write(hiredis.pack_command(words))
        return future

    def abort(self) -> None:
        """Close at once; whoever waits gets ConnectionError."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


async def open_socket(protocol: Any, address: Address, tls: bool) -> None:
    """Connect a protocol. Raises OSError, TimeoutError."""
    context = ssl.create_default_context() if tls else None
    async with asyncio.timeout(CONNECT_SECONDS):
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, *address, ssl=context)
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def open_node(address: Address, password: str, tls: bool, patience: float) -> NodeConnection:
    """A connection that is ready for commands. Raises OSError, TimeoutError; ConnectionError when refused."""
    connection = NodeConnection(address, patience)
    await open_socket(connection, address, tls)
    if password:
        answer = await connection.send(("AUTH", password))
        if isinstance(answer, ReplyError):
            connection.abort()
            raise ConnectionError(f"{address[0]}:{address[1]} refused the password: {answer}")
    return connection
