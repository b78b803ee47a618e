"""Follow a generation's events from any place: subscribe, read the buffer, then go on live."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from chat import frames
from chat.errors import ChatError, InternalError, InvalidRequest, NotFound, Unavailable
from chat.model import EventKind, Generation
from chat.ports import ConversationStore, GenerationStore, Lanes, LiveState, Subscription, TokenBuffer, Wakeups
from chat.usecases.finish_turn import last_frame

PLACE_SECONDS = 1.0
"""How often the place in the queue is looked up; `queued` is sent when it changed."""

AWAY_SECONDS = 20.0
"""How long a stream waits for a store, or for a generation that vanished, before it closes for a reconnection."""

PAGE = 256

Emit = Callable[[bytes], Awaitable[None]]
EmitNow = Callable[[bytes], bool]


class Recover(Protocol):
    """The use case that queues again a generation which the buffer does not know."""

    async def __call__(self, generation: Generation) -> object: ...


class Followed(msgspec.Struct, frozen=True):
    """What a permitted follower is going to follow. `state` is None once the buffer has expired."""

    generation_id: str
    pool: str
    after: int
    state: LiveState | None
    saved: Generation | None = None


class Follower:
    """One client of one generation. `close` ends it from outside, for a drain.

    `emit_now`, where there is one, sends without waiting, or answers False having sent nothing.
    """

    def __init__(
        self, followed: Followed, emit: Emit, heartbeat_seconds: float, emit_now: EmitNow | None = None
    ) -> None:
        self.followed = followed
        self.closing = False
        self.next_seq = followed.after + 1
        self._emit, self._heartbeat_seconds, self._emit_now = emit, heartbeat_seconds, emit_now
        self._emitted_at = self.heard_at = time.monotonic()
        self._subscription: Subscription | None = None

    async def emit(self, data: bytes) -> None:
        """Send to the client; waits while the client does not read."""
        await self._emit(data)
        self._emitted_at = time.monotonic()

    def take(self, frame: bytes) -> bool:
        """Send the next delta from where it was received, without a turn of this follower's task, which costs
        more than all the rest. Everything else, and whatever would wait, is left to the task."""
        if self._emit_now is None or self.closing or not frame.startswith(b"id: %d\nevent: delta\n" % self.next_seq):
            return False
        if not self._emit_now(frame):
            return False
        self.next_seq += 1
        self._emitted_at = self.heard_at = time.monotonic()
        return True

    def until_heartbeat(self) -> float:
        """Seconds until something must be sent."""
        return self._emitted_at + self._heartbeat_seconds - time.monotonic()

    def attach(self, subscription: Subscription) -> None:
        """Remember what `close` has to wake."""
        self._subscription = subscription

    async def close(self) -> None:
        """End the stream soon, without its last event; says once how soon to reconnect."""
        if not self.closing:
            self.closing = True
            if self._subscription is not None:
                self._subscription.lose()

    async def heartbeat_if_due(self) -> None:
        """A comment, if nothing was sent for long."""
        if self.until_heartbeat() <= 0.02:
            await self.emit(frames.KEEP_ALIVE)


class FollowStream:
    """The events of a generation, each exactly once and in order, until its last one."""

    def __init__(
        self,
        buffer: TokenBuffer,
        wakeups: Wakeups,
        lanes: Lanes,
        generations: GenerationStore,
        conversations: ConversationStore,
        recover: Recover,
        heartbeat_seconds: float = 8.0,
    ) -> None:
        self._buffer, self._wakeups, self._lanes = buffer, wakeups, lanes
        self._generations, self._conversations, self._recover = generations, conversations, recover
        self._heartbeat_seconds = heartbeat_seconds

    async def permit(self, user_id: str, generation_id: str, last_event_id: str | None) -> Followed:
        """Check before the answer begins. Raises NotFound, InvalidRequest(param=lastEventId), Unavailable."""
        after = parse_last_event_id(last_event_id)
        state = await self._buffer.live(generation_id)
        if state is not None:
            if state.user_id != user_id:
                raise NotFound("There is no such generation.")
            _check_place(after, state.last_seq)
            return Followed(generation_id, state.pool, after, state)
        saved = await self._generations.get(generation_id)
        if saved is None or saved.user_id != user_id:
            raise NotFound("There is no such generation.")
        if saved.status.final:
            _check_place(after, saved.last_event_id)
        else:
            await self._recover(saved)
        return Followed(generation_id, saved.pool, after, None, saved if saved.status.final else None)

    async def follow(self, follower: Follower) -> None:
        """Send everything after the follower's place. Returns after the last event, or without it when the
        follower is closed or the stores stay away: the client then reconnects with its last id."""
        if follower.followed.saved is not None:
            await self._send_saved(follower, follower.followed.saved)
            return
        subscription = await self._subscribe(follower)
        if subscription is None:
            return
        follower.attach(subscription)
        try:
            if await self._catch_up(follower) or await self._wait_in_queue(follower, subscription):
                return
            await self._go_on(follower, subscription)
        finally:
            await subscription.close()

    async def _subscribe(self, follower: Follower) -> Subscription | None:
        end = time.monotonic() + AWAY_SECONDS
        while time.monotonic() < end and not follower.closing:
            try:
                return await self._wakeups.subscribe(follower.followed.generation_id)
            except Unavailable:
                await follower.heartbeat_if_due()
                await asyncio.sleep(random.uniform(0.1, 0.3))
        return None

    async def _wait_in_queue(self, follower: Follower, subscription: Subscription) -> bool:
        """Until the first event: tell the place in the queue when it changes. Answers whether that was the last."""
        told = None
        generation_id, pool = follower.followed.generation_id, follower.followed.pool
        while follower.next_seq == 1 and not follower.closing:
            try:
                place = await self._lanes.place(pool, generation_id)
            except Unavailable:
                place = None
            if place is not None and place.position > 0 and place != told:
                told = place
                data = {
                    "generationId": generation_id,
                    "position": place.position,
                    "estimatedWaitSeconds": place.estimated_wait_seconds,
                }
                await follower.emit(frames.transient(EventKind.QUEUED, data))
            frame = await subscription.next(min(PLACE_SECONDS, max(0.05, follower.until_heartbeat())))
            if frame is not None:
                return await self._deliver(follower, [frame])
            await follower.heartbeat_if_due()
            if place is None or place.position == 0:
                break
        try:
            return await self._catch_up(follower)  # what came back without a frame may have been a gap
        except Unavailable:
            return False

    async def _go_on(self, follower: Follower, subscription: Subscription) -> None:
        """Live until the last event."""
        subscription.pipe(follower.take)
        follower.heard_at = time.monotonic()
        while not follower.closing:
            frame = await subscription.next(max(0.05, follower.until_heartbeat()))
            if frame is not None:
                follower.heard_at = time.monotonic()
                if await self._deliver(follower, [frame, *subscription.ready()]):
                    return
                continue
            # A timeout or a gap: the buffer is the truth.
            try:
                before = follower.next_seq
                if await self._catch_up(follower):
                    return
                alive = follower.next_seq > before or await self._buffer.live(follower.followed.generation_id)
                if alive:
                    follower.heard_at = time.monotonic()
                elif await self._ended_without_us(follower):
                    return
            except Unavailable:
                pass
            await follower.heartbeat_if_due()
            if time.monotonic() - follower.heard_at > AWAY_SECONDS:
                return

    async def _deliver(self, follower: Follower, received: list[bytes]) -> bool:
        """Send what follows; a hole is filled from the buffer. Answers whether the last event was sent."""
        out = []
        for frame in received:
            seq = frames.seq_of(frame)
            if seq == follower.next_seq:
                out.append(frame)
                follower.next_seq += 1
            elif seq > follower.next_seq:
                if out:
                    await follower.emit(b"".join(out))
                return await self._catch_up(follower)
        if not out:
            return False
        await follower.emit(out[0] if len(out) == 1 else b"".join(out))
        return frames.is_last(out[-1])

    async def _catch_up(self, follower: Follower) -> bool:
        """Send everything that the buffer has. Answers whether the last event was among it, or before it."""
        generation_id = follower.followed.generation_id
        while not follower.closing:
            page = await self._buffer.frames(generation_id, follower.next_seq - 1, PAGE)
            if not page:
                state = follower.followed.state
                return state is not None and state.ended and follower.next_seq > state.last_seq
            if frames.seq_of(page[0]) != follower.next_seq:
                return False  # trimmed or half restored: wait for it
            follower.next_seq = frames.seq_of(page[-1]) + 1
            await follower.emit(b"".join(page))
            if frames.is_last(page[-1]):
                return True
        return False

    async def _ended_without_us(self, follower: Follower) -> bool:
        """The buffer lost the generation: if it is saved as final, send the rest from there."""
        saved = await self._generations.get(follower.followed.generation_id)
        if saved is None:
            error: ChatError = InternalError("The reply is lost; send the message again.")
            await follower.emit(frames.durable(follower.next_seq, EventKind.ERROR, error.body()))
            return True
        if not saved.status.final:
            return False
        if follower.next_seq == 1:
            await self._send_saved(follower, saved)
        return True  # a client in the middle reconnects, and is then told from the saved reply

    async def _send_saved(self, follower: Follower, saved: Generation) -> None:
        """The buffer has expired: the saved reply as one `delta`, and the last event."""
        last = max(saved.last_event_id, 2)
        if follower.followed.after >= last:
            return
        page, _ = await self._conversations.messages(saved.user_id, saved.conversation_id, saved.reply_seq + 1, 1)
        text = page[0].message.content if page and page[0].message.generation_id == saved.generation_id else ""
        if text and follower.followed.after == 0:
            await follower.emit(frames.durable(last - 1, EventKind.DELTA, {"text": text}))
        await follower.emit(last_frame(last, saved))


def parse_last_event_id(given: str | None) -> int:
    """The place after which to go on. Raises InvalidRequest."""
    if given is None or given == "":
        return 0
    if not (given.isascii() and given.isdigit()) or len(given) > 12:
        raise InvalidRequest("Last-Event-ID must be the id of an event, a whole number.", param="lastEventId")
    return int(given)


def _check_place(after: int, last_seq: int) -> None:
    if after > last_seq:
        raise InvalidRequest(f"Last-Event-ID {after} is past the last event, {last_seq}.", param="lastEventId")
