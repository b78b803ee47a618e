"""The open streams of a process: their number, their marks against abandonment, and how they end in a drain."""

import asyncio
import contextlib
import logging
import random
from collections import Counter

from chat.errors import Unavailable
from chat.ids import now_ms
from chat.ports import Lanes
from chat.usecases.follow_stream import Follower

logger = logging.getLogger(__name__)

MARK_SECONDS = 5.0
"""How often followed generations are marked; a generation without a mark for 30 s is cancelled."""


class OpenStreams:
    """Registers followers; one background task marks all that they follow."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._followers: set[Follower] = set()
        self._generations: Counter[tuple[str, str]] = Counter()
        self.draining = False

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, follower: Follower) -> None:
        """A client has begun to follow."""
        self._followers.add(follower)
        self._generations[follower.followed.pool, follower.followed.generation_id] += 1

    def remove(self, follower: Follower) -> None:
        """A client is gone, or has its last event."""
        self._followers.discard(follower)
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
        """Close every stream without its last event; the clients resume at another streamer."""
        self.draining = True
        end = asyncio.get_running_loop().time() + seconds
        while self._followers and asyncio.get_running_loop().time() < end:
            for follower in list(self._followers):
                await follower.close()
            await asyncio.sleep(0.05)
        logger.info("drained, %d streams left", len(self._followers))
