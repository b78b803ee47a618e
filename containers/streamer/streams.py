"""The open streams of a process: their number, their marks against abandonment, and how they end in a drain."""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable

from chat.errors import Unavailable
from chat.ids import now_ms
from chat.ports import Lanes
from chat.usecases.follow_stream import Follower

logger = logging.getLogger(__name__)

MARK_SECONDS = 5.0
"""How often followed generations are marked; a generation without a mark for 30 s is cancelled."""

CLOSING_SECONDS = 2.0
"""How long a drain waits for clients to take what was sent to them; whoever does not read is cut off then."""


class OpenStreams:
    """Registers followers; one background task marks all that they follow."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._followers: dict[Follower, asyncio.Task[None] | None] = {}
        self._generations: Counter[tuple[str, str]] = Counter()
        self.draining = False
        self.requests = 0
        """Requests that are being answered, streams among them."""

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, follower: Follower) -> None:
        """A client has begun to follow, in the current task. In a drain its stream is closed at once."""
        self._followers[follower] = asyncio.current_task()
        follower.closing = follower.closing or self.draining
        self._generations[follower.followed.pool, follower.followed.generation_id] += 1

    def remove(self, follower: Follower) -> None:
        """A client is gone, or has its last event."""
        self._followers.pop(follower, None)
        key = (follower.followed.pool, follower.followed.generation_id)
        self._generations[key] -= 1
        if self._generations[key] <= 0:
            del self._generations[key]

    async def mark_for_ever(self) -> None:
        """Say that somebody is following, for all generations of a pool in one call."""
        while True:
            await asyncio.sleep(MARK_SECONDS * random.uniform(0.8, 1.0))
            by_pool: dict[str, list[str]] = {}
            for pool, generation_id in self._generations:
                by_pool.setdefault(pool, []).append(generation_id)
            for pool, generation_ids in by_pool.items():
                with contextlib.suppress(Unavailable):
                    await self._lanes.touch_followed(pool, generation_ids, now_ms())

    async def drain(self, seconds: float) -> None:
        """Close every stream without its last event, so that the clients resume at another streamer.

        Sends that are being saved are waited for, up to `seconds`; their streams are then closed as well.
        """
        self.draining = True
        for follower in list(self._followers):
            await follower.close()
        await self._until(lambda: not self._followers, min(seconds, CLOSING_SECONDS))
        cut = [task for task in self._followers.values() if task is not None]
        for task in cut:
            task.cancel()
        await self._until(lambda: self.requests == 0, seconds)
        logger.info("drained, %d clients cut off, %d requests left", len(cut), self.requests)

    @staticmethod
    async def _until(done: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    await asyncio.sleep(0.02)
