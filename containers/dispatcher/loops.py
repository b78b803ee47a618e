"""What a dispatcher does, for each pool: give out work as soon as there is some, and sweep."""

import asyncio
import contextlib
import logging
import time
from typing import Any, Protocol

from chat import tracing
from chat.errors import Unavailable
from chat.ids import now_ms
from chat.keys import PoolKeys
from chat.model import FinishReason
from chat.ports import Fenced, Lanes, Subscription
from chat.settings import DispatcherSettings
from containers.dispatcher.metrics import Metrics

logger = logging.getLogger(__name__)

BATCH = 32
"""Jobs given out by one script call: a bound on how long it keeps the shard busy."""

TICK_SECONDS = 0.5
"""Work is looked for at least this often, should a wake-up be lost."""

ENDED_BY_US = 16
"""Turns that a sweep ends at once; the next sweep goes on."""


class Listener(Protocol):
    """Follows a sharded channel."""

    async def listen(self, channel: str) -> Subscription: ...


class Finisher(Protocol):
    """The use case that ends a turn."""

    async def __call__(
        self,
        generation_id: str,
        pool: str,
        *,
        attempt: int | None,
        outcome: None,
        reason: FinishReason,
        error: dict[str, str] | None,
    ) -> Any: ...


class Canceller(Protocol):
    """The use case that stops a generation nobody follows any more."""

    async def by_system(self, generation_id: str) -> Any: ...


OUT_OF_ATTEMPTS = {
    "type": "api_error",
    "code": "engine_failed",
    "message": "The reply could not be finished after several attempts; what was written is kept. Ask again.",
}


class PoolLoops:
    """Dispatch and sweep of one pool. Any number of equal dispatchers may run them: every step is one script."""

    def __init__(
        self,
        pool: str,
        settings: DispatcherSettings,
        lanes: Lanes,
        listener: Listener,
        finish: Finisher,
        cancel: Canceller,
        metrics: Metrics,
    ) -> None:
        self.pool, self.settings = pool, settings
        self.progressed_at = time.monotonic()
        self._lanes, self._listener, self._finish, self._cancel = lanes, listener, finish, cancel
        self._metrics = metrics
        self._away = False

    async def run(self) -> None:
        """Both loops, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatch_for_ever())
            group.create_task(self._sweep_for_ever())

    async def _dispatch_for_ever(self) -> None:
        subscription: Subscription | None = None
        while True:
            try:
                if subscription is None:
                    subscription = await self._listener.listen(PoolKeys(self.pool).work_channel)
                while await self._dispatch():
                    pass
                self._note(away=False)
            except Unavailable:
                self._note(away=True)
                await asyncio.sleep(0.2)
                continue
            await subscription.next(TICK_SECONDS)

    async def _dispatch(self) -> bool:
        """Answers whether there may be more."""
        given = await self._lanes.dispatch(self.pool, now_ms(), BATCH)
        for assignment in given:
            tracing.mark(assignment.generation_id, "dispatched")
        self._metrics.dispatched(self.pool, len(given))
        return len(given) == BATCH

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self._sweep()
                self._metrics.observe(self.pool, await self._lanes.status(self.pool))
                self.progressed_at = time.monotonic()
            except Unavailable:
                self._note(away=True)
                self.progressed_at = time.monotonic()

    async def _sweep(self) -> None:
        settings = self.settings
        swept = await self._lanes.sweep(
            self.pool,
            now_ms(),
            int(settings.silent_seconds * 1000),
            int(settings.abandoned_seconds * 1000),
            settings.max_attempts,
        )
        self._metrics.swept(self.pool, swept)
        if swept.requeued:
            logger.warning(
                "pool %s: %d generations of silent replicas are queued again", self.pool, len(swept.requeued)
            )
        for generation_id in swept.exhausted[:ENDED_BY_US]:
            logger.error("pool %s: generation %s cannot be run", self.pool, generation_id)
            with contextlib.suppress(Fenced):
                await self._finish(
                    generation_id,
                    self.pool,
                    attempt=None,
                    outcome=None,
                    reason=FinishReason.ERROR,
                    error=OUT_OF_ATTEMPTS,
                )
        for generation_id in swept.abandoned[:ENDED_BY_US]:
            logger.info("pool %s: nobody follows generation %s, it is cancelled", self.pool, generation_id)
            with contextlib.suppress(Fenced):
                await self._cancel.by_system(generation_id)

    def _note(self, *, away: bool) -> None:
        """Say once that a store went away, and once that it is back."""
        if away != self._away:
            logger.warning("pool %s: the stores are %s", self.pool, "away" if away else "back")
            self._away = away
