"""Live events: one sharded-subscribe connection a shard a process, shared by all followers.

Written on asyncio's protocol level with hiredis: this is the hot path of fan-out, a frame passes through
`_ShardConnection.data_received` straight into its followers' queues (docs/adr/0004).
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import hiredis

from chat import keys
from chat.adapters.valkey.client import Valkey, unavailable
from chat.adapters.valkey.node import Address, open_socket
from chat.errors import Unavailable

logger = logging.getLogger(__name__)

QUEUE_FRAMES = 64
"""Frames kept for a follower that does not keep up; then they are dropped and it reads the stream again."""

CONFIRM_SECONDS = 2.0
PING_SECONDS = 2.0
SILENT_SECONDS = 6.0
"""A shard that answers no ping for so long is given up."""


class ValkeySubscription:
    """One follower of one channel. Implements `chat.ports.Subscription`."""

    __slots__ = (
        "_channel",
        "_deadline",
        "_frames",
        "_gap",
        "_loop",
        "_owner",
        "_patience",
        "_room",
        "_take",
        "_timer",
        "_waiter",
    )

    def __init__(self, owner: "ValkeyWakeups", channel: bytes, room: int) -> None:
        self._owner, self._channel, self._room = owner, channel, room
        self._frames: deque[bytes] = deque()
        self._gap = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = self._patience = 0.0
        self._take: Callable[[bytes], bool] | None = None

    def pipe(self, take: Callable[[bytes], bool]) -> None:
        """See Subscription.pipe."""
        self._take = take

    def deliver(self, frame: bytes) -> None:
        """Hand a frame to the pipe, else queue it, or note a gap when the queue is full."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # then nothing is queued before this frame
            if self._take is not None and self._taken(self._take, frame):
                self._deadline = self._loop.time() + self._patience
                return
            self._frames.append(frame)
            waiter.set_result(None)
        elif len(self._frames) >= self._room:
            self.lose()
        else:
            self._frames.append(frame)

    def _taken(self, take: Callable[[bytes], bool], frame: bytes) -> bool:
        try:
            return take(frame)
        except Exception:
            # One follower's fault must not cost the others their connection; its own stream ends when it is read.
            logger.exception("a follower failed to take a frame")
            self._take = None
            return False

    def lose(self) -> None:
        """Frames may be missing from here on: whoever follows must read the stream."""
        self._frames.clear()
        self._gap = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _expire(self) -> None:
        """The timer went off. It outlives single waits, since a new timer for every frame costs more than the frame."""
        self._timer = None
        if self._waiter is not None:
            if self._loop.time() >= self._deadline:
                self._wake()
            else:
                self._timer = self._loop.call_at(self._deadline, self._expire)

    async def next(self, timeout_seconds: float) -> bytes | None:
        """See Subscription.next."""
        if not self._frames and not self._gap:
            deadline = self._deadline = self._loop.time() + timeout_seconds
            self._patience = timeout_seconds
            timer = self._timer
            if timer is not None and timer.when() > deadline:
                timer.cancel()
                timer = None
            if timer is None:
                self._timer = self._loop.call_at(deadline, self._expire)
            waiter = self._waiter = self._loop.create_future()
            try:
                await waiter
            finally:
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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.drop(self._channel, self)


class _ShardConnection(asyncio.Protocol):
    """A connection to one primary, for subscriptions only."""

    def __init__(self, owner: "ValkeyWakeups", address: Address) -> None:
        self.owner, self.address = owner, address
        self.transport: asyncio.Transport | None = None
        self.joining: dict[bytes, int] = {}
        self._sent: deque[tuple[bytes, bytes]] = deque()
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio.Transport, so this cannot be an isinstance check.
        self.transport = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        reader, followers = self._reader, self.owner.followers
        reader.feed(data)
        while (message := reader.gets()) is not False:
            if type(message) is list and message[0] == b"smessage":
                for follower in followers.get(message[1], ()):
                    follower.deliver(message[2])
            else:
                self._answered(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._timer is not None:
            self._timer.cancel()
        self.owner.lost(self)

    def _ping(self) -> None:
        if self._loop.time() - self._heard_at > SILENT_SECONDS:
            self.abort()
            return
        self.command(b"PING")
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def abort(self) -> None:
        """Close at once; the followers are told by `lost`."""
        if self.transport is not None:
            self.transport.abort()

    def command(self, name: bytes, channel: bytes = b"") -> None:
        """Send a command without waiting for its answer."""
        if self.transport is None:
            return
        if name == b"SSUBSCRIBE":
            self.joining[channel] = self.joining.get(channel, 0) + 1
        self._sent.append((name, channel))
        self.transport.write(hiredis.pack_command((name, channel) if channel else (name,)))

    def _answered(self, message: Any) -> None:
        """An answer to the oldest command, or the news that a slot moved away."""
        channel = message[1] if isinstance(message, list) else b""
        name = b"SSUBSCRIBE" if channel and message[0] == b"ssubscribe" else b"SUNSUBSCRIBE"
        head = self._sent[0] if self._sent else (b"", b"")
        if channel and head != (name, channel):
            self.owner.moved(self, channel)
            return
        self._sent.popleft()
        if head[0] == b"SSUBSCRIBE":
            left = self.joining[head[1]] = self.joining[head[1]] - 1
            if left == 0:
                del self.joining[head[1]]
        if isinstance(message, Exception):
            logger.warning("%s:%d refused %s: %s", *self.address, head[0].decode(), message)
            if head[0] == b"SSUBSCRIBE":
                self.owner.moved(self, head[1])
            else:
                self.abort()
        elif head[0] == b"SSUBSCRIBE" and left == 0:
            self.owner.confirmed(self, head[1])


class ValkeyWakeups:
    """Implements `chat.ports.Wakeups`, and listens on any other sharded channel.

    `queue_frames` is how many frames are kept for a follower that does not keep up.
    """

    def __init__(self, valkey: Valkey, queue_frames: int = QUEUE_FRAMES) -> None:
        self._valkey, self._room = valkey, queue_frames
        self.followers: dict[bytes, tuple[ValkeySubscription, ...]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._home: dict[bytes, _ShardConnection] = {}
        self._connections: dict[Address, _ShardConnection] = {}
        self._locks: dict[Address, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def subscribe(self, generation_id: str) -> ValkeySubscription:
        """See Wakeups.subscribe."""
        return await self.listen(keys.GenerationKeys(generation_id).channel)

    async def listen(self, channel: str) -> ValkeySubscription:
        """Follow any sharded channel. Raises Unavailable when it is not confirmed in time."""
        name = channel.encode()
        subscription = ValkeySubscription(self, name, self._room)
        self.followers[name] = (*self.followers.get(name, ()), subscription)
        confirmed = self._confirmed.get(name)
        if confirmed is None:
            # Not the caller's own work: others may wait for the same channel, and the caller may be cancelled.
            confirmed = self._confirmed[name] = asyncio.Event()
            self._begin([name], again=False)
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await confirmed.wait()
        except BaseException as error:
            self.drop(name, subscription)
            if isinstance(error, TimeoutError):
                raise unavailable() from error
            raise
        return subscription

    def _begin(self, channels: list[bytes], *, again: bool) -> None:
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._join(channels, again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, channels: list[bytes], again: bool) -> None:
        """Subscribe until confirmed, for as long as somebody follows; `again` after a loss."""
        pause, waiting, refresh = 0.05, channels, again
        if again:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        while waiting := [one for one in waiting if one in self.followers]:
            try:
                for channel in waiting:
                    await self._place(channel, refresh)
                    refresh = False
                async with asyncio.timeout(CONFIRM_SECONDS):
                    for channel in waiting:
                        if channel in self._confirmed:
                            await self._confirmed[channel].wait()
                break
            except (Unavailable, OSError, TimeoutError):
                refresh = True
                waiting = [one for one in waiting if one in self._confirmed and not self._confirmed[one].is_set()]
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, 1.0)
        if again:  # whatever was published in between is only in the stream
            self._tell_gap(channels)

    async def _place(self, channel: bytes, refresh: bool) -> None:
        """Send the subscription to the shard that has the channel's slot."""
        address = await self._valkey.node_of(channel.decode(), refresh)
        connection = self._connections.get(address) or await self._connect(address)
        if channel in self.followers:
            self._home[channel] = connection
            connection.command(b"SSUBSCRIBE", channel)

    async def _connect(self, address: Address) -> _ShardConnection:
        async with self._locks.setdefault(address, asyncio.Lock()):
            made = self._connections.get(address)
            if made is None:
                made = _ShardConnection(self, address)
                await open_socket(made, address, self._valkey.tls)
                if made.transport is None:
                    raise ConnectionError(f"{address[0]}:{address[1]} closed the connection")
                if self._valkey.password:
                    made.command(b"AUTH", self._valkey.password.encode())
                self._connections[address] = made
            return made

    def confirmed(self, connection: _ShardConnection, channel: bytes) -> None:
        """A shard has noted the subscription."""
        if self._home.get(channel) is connection and channel in self._confirmed:
            self._confirmed[channel].set()

    def moved(self, connection: _ShardConnection, channel: bytes) -> None:
        """A shard does not have the channel's slot, or no longer."""
        if self._home.get(channel) is connection:
            self._repair([channel])

    def drop(self, channel: bytes, subscription: ValkeySubscription) -> None:
        """Forget a follower; the channel is left with its last one."""
        known = self.followers.get(channel, ())
        left = tuple(one for one in known if one is not subscription)
        if left:
            self.followers[channel] = left
        elif known:
            del self.followers[channel]
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
            self._home.pop(channel, None)
            self._confirmed[channel].clear()
        self._tell_gap(channels)
        self._begin(channels, again=True)

    def _tell_gap(self, channels: Iterable[bytes]) -> None:
        for channel in channels:
            for follower in self.followers.get(channel, ()):
                follower.lose()

    async def close(self) -> None:
        """Close every connection; followers see a gap and nothing more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._tell_gap(list(self.followers))
        for connection in self._connections.values():
            connection.abort()
