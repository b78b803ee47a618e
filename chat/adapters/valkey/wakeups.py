"""Live events: one sharded-subscribe connection a shard a process, shared by all followers.

Written on asyncio's protocol level with hiredis: this is the hot path of fan-out, a frame passes through
`_ShardConnection.data_received` straight into its followers' queues (docs/adr/0004).
"""

import asyncio
import logging
import random
import ssl
from collections import deque
from typing import Any, cast

import hiredis

from chat import keys
from chat.adapters.valkey.client import Valkey
from chat.errors import Unavailable

logger = logging.getLogger(__name__)

QUEUE_FRAMES = 64
"""Frames kept for a follower that does not keep up; then they are dropped and it reads the stream again."""

CONFIRM_SECONDS = 2.0


class ValkeySubscription:
    """One follower of one channel. Implements `chat.ports.Subscription`."""

    __slots__ = ("_channel", "_frames", "_gap", "_owner", "_waiter")

    def __init__(self, owner: "ValkeyWakeups", channel: bytes) -> None:
        self._owner = owner
        self._channel = channel
        self._frames: deque[bytes] = deque()
        self._gap = False
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, frame: bytes) -> None:
        """Queue a frame, or note a gap when the queue is full."""
        if len(self._frames) >= QUEUE_FRAMES:
            self.lose()
            return
        self._frames.append(frame)
        self._wake()

    def lose(self) -> None:
        """Frames may be missing from here on: whoever follows must read the stream."""
        self._frames.clear()
        self._gap = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self, timeout_seconds: float) -> bytes | None:
        """See Subscription.next."""
        if not self._frames and not self._gap:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_seconds, self._wake)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._gap:
            self._gap = False
            return None
        return self._frames.popleft() if self._frames else None

    def ready(self) -> list[bytes]:
        """Everything that has arrived, without waiting."""
        found = list(self._frames)
        self._frames.clear()
        return found

    async def close(self) -> None:
        """Stop listening."""
        self._owner.drop(self._channel, self)


class _ShardConnection(asyncio.Protocol):
    """A connection to one primary, for subscriptions only."""

    def __init__(self, owner: "ValkeyWakeups", address: tuple[str, int]) -> None:
        self.owner, self.address = owner, address
        self.transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio.Transport, so this cannot be an isinstance check.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        receive = self.owner.receive
        while (message := reader.gets()) is not False:
            receive(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.lost(self)

    def command(self, *words: bytes) -> None:
        """Send a command without waiting for its answer."""
        if self.transport is not None:
            self.transport.write(_packed(words))


def _packed(words: tuple[bytes, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
    return b"".join(parts)


class ValkeyWakeups:
    """Implements `chat.ports.Wakeups`, and listens on any other sharded channel."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey
        self._followers: dict[bytes, list[ValkeySubscription]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._home: dict[bytes, _ShardConnection] = {}
        self._connections: dict[tuple[str, int], _ShardConnection] = {}
        self._connecting = asyncio.Lock()
        self._repairs: set[asyncio.Task[None]] = set()
        self._closed = False

    async def subscribe(self, generation_id: str) -> ValkeySubscription:
        """See Wakeups.subscribe."""
        return await self.listen(keys.GenerationKeys(generation_id).channel)

    async def listen(self, channel: str) -> ValkeySubscription:
        """Follow any sharded channel. Raises Unavailable when it is not confirmed in time."""
        name = channel.encode()
        subscription = ValkeySubscription(self, name)
        self._followers.setdefault(name, []).append(subscription)
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                if name not in self._confirmed:
                    self._confirmed[name] = asyncio.Event()
                    await self._place(name)
                await self._confirmed[name].wait()
        except BaseException as error:
            self.drop(name, subscription)
            if isinstance(error, TimeoutError | OSError):
                raise Unavailable("The live store does not answer; try again.") from error
            raise
        return subscription

    async def _place(self, channel: bytes) -> None:
        """Send the subscription to the shard that has the channel's slot."""
        address = await self._valkey.node_of(channel.decode())
        connection = await self._connection(address)
        if channel in self._followers:
            self._home[channel] = connection
            connection.command(b"SSUBSCRIBE", channel)

    async def _connection(self, address: tuple[str, int]) -> _ShardConnection:
        async with self._connecting:
            known = self._connections.get(address)
            if known is not None:
                return known
            context = ssl.create_default_context() if self._valkey.tls else None
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(lambda: _ShardConnection(self, address), *address, ssl=context)
            if self._valkey.password:
                made.command(b"AUTH", self._valkey.password.encode())
            self._connections[address] = made
            return made

    def receive(self, connection: _ShardConnection, message: Any) -> None:
        """A message of a shard; called once for every published event."""
        if not isinstance(message, list):
            self._refused(connection, message)
            return
        kind, channel, payload = message
        if kind == b"smessage":
            for follower in self._followers.get(channel, ()):
                follower.deliver(payload)
        elif kind == b"ssubscribe":
            confirmed = self._confirmed.get(channel)
            if confirmed is not None:
                confirmed.set()
        elif kind == b"sunsubscribe" and channel in self._followers and self._home.get(channel) is connection:
            self._repair([channel])  # the slot moved to another shard

    def _refused(self, connection: _ShardConnection, message: Any) -> None:
        """An error answer (MOVED, NOAUTH …): start the connection afresh, from a fresh slot map."""
        if isinstance(message, Exception):
            logger.warning("subscription refused by %s:%d: %s", *connection.address, message)
            if connection.transport is not None:
                connection.transport.abort()

    def drop(self, channel: bytes, subscription: ValkeySubscription) -> None:
        """Forget a follower; the channel is left with its last one."""
        followers = self._followers.get(channel)
        if followers is None or subscription not in followers:
            return
        followers.remove(subscription)
        if not followers:
            del self._followers[channel]
            self._confirmed.pop(channel, None)
            home = self._home.pop(channel, None)
            if home is not None:
                home.command(b"SUNSUBSCRIBE", channel)

    def lost(self, connection: _ShardConnection) -> None:
        """A shard is gone: its followers read the stream while the subscription is made again."""
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
        channels = [channel for channel, home in self._home.items() if home is connection]
        if channels and not self._closed:
            logger.warning("live connection to %s:%d lost, %d channels", *connection.address, len(channels))
            self._repair(channels)

    def _repair(self, channels: list[bytes]) -> None:
        for channel in channels:
            for follower in self._followers.get(channel, ()):
                follower.lose()
        task = asyncio.get_running_loop().create_task(self._resubscribe(channels))
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def _resubscribe(self, channels: list[bytes]) -> None:
        pause = 0.05
        waiting = list(channels)
        while not self._closed and (waiting := [one for one in waiting if one in self._followers]):
            try:
                for channel in waiting:
                    self._confirmed[channel].clear()
                    await self._place(channel)
                async with asyncio.timeout(CONFIRM_SECONDS):
                    for channel in waiting:
                        if channel in self._confirmed:
                            await self._confirmed[channel].wait()
            except (Unavailable, OSError, TimeoutError, KeyError):
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, 1.0)
                continue
            for channel in waiting:  # whatever was published in between is only in the stream
                for follower in self._followers.get(channel, ()):
                    follower.lose()
            return

    async def close(self) -> None:
        """Close every connection; followers see a gap and nothing more."""
        self._closed = True
        for task in self._repairs:
            task.cancel()
        for connection in self._connections.values():
            if connection.transport is not None:
                connection.transport.close()
