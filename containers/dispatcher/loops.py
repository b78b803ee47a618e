"""What a dispatcher does, for each pool: give out work as soon as there is some, and sweep."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from chat import tracing
from chat.errors import Unavailable
from chat.ids import now_ms
from chat.keys import PoolKeys
from chat.model import FinishReason
from chat.ports import Fenced, Lanes
from chat.settings import DispatcherSettings
from containers.dispatcher.metrics import Metrics

logger = logging.getLogger(__name__)

BATCH = 32
"""Jobs given out by one script call: a bound on how long it keeps the shard busy."""

TICK_SECONDS = 0.5
"""Work is looked for at least this often, should a wake-up be lost."""

ENDED_AT_ONCE = 16
"""Turns that are being ended at the same time; a later sweep names the others again."""


PAUSE_SECONDS = 0.2
"""Between two tries while a store is away, with jitter; each try itself waits for the store's deadline."""


class WakeUps(Protocol):
    """What arrives on the work channel; its contents do not matter."""

    async def next(self, timeout_seconds: float) -> bytes | None: ...

    def ready(self) -> list[bytes]: ...


class Listener(Protocol):
    """Follows a sharded channel."""

    async def listen(self, channel: str) -> WakeUps: ...


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
        self._lanes, self._listener, self._finish, self._cancel = lanes, listener, finish, cancel
        self._metrics = metrics
        self._away = {"dispatch": False, "sweep": False, "ending turns": False}
        self._progressed_at = dict.fromkeys(("dispatch", "sweep"), time.monotonic())
        self._ending: dict[str, asyncio.Task[None]] = {}

    @property
    def progressed_at(self) -> float:
        """When the slower of the two loops last went round, in monotonic seconds. A store that is away does not
        stop them: it is no reason to start a dispatcher anew."""
        return min(self._progressed_at.values())

    async def run(self) -> None:
        """Both loops, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._for_ever("dispatch", self._dispatch_and_wait()))
                group.create_task(self._for_ever("sweep", self._sweep_and_wait))
        finally:
            for task in self._ending.values():
                task.cancel()  # every step of it may be repeated by anybody

    async def _for_ever(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Whatever goes wrong in one round, the next one is tried: a dispatcher has nothing to lose."""
        while True:
            self._progressed_at[name] = time.monotonic()
            try:
                await step()
                self._note(name, away=False)
                continue
            except Unavailable:
                self._note(name, away=True)
            except Exception:
                logger.exception("pool %s: %s went wrong", self.pool, name)
            await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))

    def _dispatch_and_wait(self) -> Callable[[], Awaitable[None]]:
        wakeups: WakeUps | None = None

        async def step() -> None:
            nonlocal wakeups
            if wakeups is None:
                wakeups = await self._listener.listen(PoolKeys(self.pool).work_channel)
            wakeups.ready()  # one round answers to all of them
            while await self._dispatch():
                self._progressed_at["dispatch"] = time.monotonic()
            await wakeups.next(TICK_SECONDS)

        return step

    async def _dispatch(self) -> bool:
        """Answers whether there may be more."""
        given = await self._lanes.dispatch(self.pool, now_ms(), BATCH)
        for assignment in given:
            tracing.mark(assignment.generation_id, "dispatched")
        self._metrics.dispatched(self.pool, len(given))
        return len(given) == BATCH

    async def _sweep_and_wait(self) -> None:
        await self._sweep()
        self._metrics.observe(self.pool, await self._lanes.status(self.pool))
        await asyncio.sleep(TICK_SECONDS)

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
        for generation_id in swept.exhausted:
            self._begin_to_end(generation_id, "it cannot be run", self._fail)
        for generation_id in swept.abandoned:
            self._begin_to_end(generation_id, "nobody follows it", self._cancel.by_system)

    async def _fail(self, generation_id: str) -> None:
        await self._finish(
            generation_id,
            self.pool,
            attempt=None,
            outcome=None,
            reason=FinishReason.ERROR,
            error=OUT_OF_ATTEMPTS,
        )

    def _begin_to_end(self, generation_id: str, why: str, end: Callable[[str], Awaitable[Any]]) -> None:
        """Not in the sweep itself, which must go on when DynamoDB is slow."""
        if generation_id not in self._ending and len(self._ending) < ENDED_AT_ONCE:
            logger.warning("pool %s: generation %s is ended, %s", self.pool, generation_id, why)
            task = asyncio.create_task(self._end(generation_id, end))
            self._ending[generation_id] = task
            task.add_done_callback(lambda _: self._ending.pop(generation_id, None))

    async def _end(self, generation_id: str, end: Callable[[str], Awaitable[Any]]) -> None:
        """What fails is tried again when a later sweep names it."""
        try:
            await end(generation_id)
            self._note("ending turns", away=False)
        except Fenced:
            logger.info("pool %s: generation %s was taken over", self.pool, generation_id)
        except Unavailable:
            self._note("ending turns", away=True)
        except Exception:
            logger.exception("pool %s: generation %s cannot be ended", self.pool, generation_id)

    def _note(self, name: str, *, away: bool) -> None:
        """Say once that a store went away, and once that it is back."""
        if away != self._away[name]:
            logger.warning("pool %s, %s: a store is %s", self.pool, name, "away" if away else "back")
            self._away[name] = away
