"""The life of a replica: join the pool, take assignments, answer to cancels, drain and leave."""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from chat import tracing
from chat.errors import Unavailable
from chat.ids import now_ms
from chat.keys import PoolKeys
from chat.model import Outcome
from chat.ports import (
    Assignment,
    Claim,
    Engine,
    Fenced,
    Lanes,
    ReplicaStatus,
    Subscription,
    TokenBuffer,
    UnknownGeneration,
)
from chat.settings import WorkerSettings
from containers.worker.metrics import Metrics
from containers.worker.reply import Reply

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

CANCEL_RECHECK_SECONDS = 5.0
"""Cancels that the control channel lost are found within this time."""

UNHEARD_SECONDS = 15.0
"""A replica whose heartbeats fail for this long says so on /ping; shorter gaps are the store's."""

ENGINE_CHECK_SECONDS = 0.25


class Finisher(Protocol):
    """The use case that ends a turn."""

    async def __call__(self, generation_id: str, pool: str, *, attempt: int | None, outcome: Outcome | None) -> Any: ...


class Listener(Protocol):
    """Follows a sharded channel."""

    async def listen(self, channel: str) -> Subscription: ...


async def until_available(action: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeat while a store is away; with growing, jittered pauses of at most a second."""
    pause = 0.05
    while True:
        try:
            return await action()
        except Unavailable:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 1.0)


class Replica:
    """One process with one engine. Its id is new with every start, so that a restart is another replica."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        buffer: TokenBuffer,
        lanes: Lanes,
        listener: Listener,
        finish: Finisher,
        metrics: Metrics,
    ) -> None:
        self.replica_id = f"{settings.replica_name}-{secrets.token_hex(4)}"
        self.settings, self.engine = settings, engine
        self.draining = False
        self._joined = asyncio.Event()
        self._beaten_at = time.monotonic()
        self._buffer, self._lanes, self._listener, self._finish = buffer, lanes, listener, finish
        self._metrics = metrics
        self.bookings: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._replies: dict[str, Reply] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._leaving = False

    @property
    def pool(self) -> str:
        """The pool that it belongs to."""
        return self.settings.pool

    def ready(self) -> bool:
        """Whether the engine is well and the pool hears of it."""
        heard = self._joined.is_set() and time.monotonic() - self._beaten_at < UNHEARD_SECONDS
        return heard and self.engine.status().healthy

    async def run(self, stopping: asyncio.Event) -> bool:
        """Serve until `stopping` is set (then drain) or the engine is broken. Answers whether it ended well."""
        loops = [asyncio.create_task(work()) for work in (self._beat_for_ever, self._listen, self._take)]
        broken = asyncio.create_task(self._wait_for_broken_engine())
        told = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([broken, told, *loops], return_when=asyncio.FIRST_COMPLETED)
            healthy = told.done() and not broken.done()
            for loop in loops:
                if loop.done():  # they end by a fault only
                    logger.error("a loop of the replica ended", exc_info=loop.exception())
                    healthy = False
            self.draining = True
            with contextlib.suppress(Unavailable):
                await self._beat()
            if healthy:
                await self._let_replies_end(broken)
            self._leaving = True
            for loop in loops:
                loop.cancel()
            await self._hand_over_all()
            return healthy
        finally:
            for task in (*loops, broken, told, *self._serving):
                task.cancel()

    async def _let_replies_end(self, broken: "asyncio.Task[None]") -> None:
        """Most of the deadline; the rest is for handing over what does not end by itself."""
        end = time.monotonic() + self.settings.drain_seconds * 0.75
        while self._serving and not broken.done() and (left := end - time.monotonic()) > 0:
            await asyncio.wait([*self._serving, broken], timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_for_broken_engine(self) -> None:
        while self.engine.status().healthy:
            await asyncio.sleep(ENGINE_CHECK_SECONDS)
        logger.error("the engine is broken, leaving the pool")

    async def _beat_for_ever(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._beat()
                self._joined.set()
                self._beaten_at = time.monotonic()
            await asyncio.sleep(self.settings.heartbeat_seconds)

    async def _beat(self) -> None:
        status = self.engine.status()
        said = ReplicaStatus(
            self.replica_id,
            status.kv_capacity_tokens,
            status.running,
            self.draining,
            dict(self.bookings),
            dict(self._attempts),
        )
        await self._lanes.heartbeat(self.pool, said, now_ms())

    async def _take(self) -> None:
        await self._joined.wait()
        while not self.draining and self.engine.status().healthy:
            try:
                assignment = await self._lanes.take(self.pool, self.replica_id, 1.0)
            except Unavailable:
                await asyncio.sleep(0.2)
                continue
            if assignment is None or assignment.generation_id in self.bookings:
                continue
            tracing.mark(assignment.generation_id, "taken")
            self.bookings[assignment.generation_id] = 0
            self._attempts[assignment.generation_id] = assignment.attempt
            task = asyncio.create_task(self._serve(assignment))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _listen(self) -> None:
        """Cancels arrive on the control channel; what it may have lost is looked up from time to time."""
        channel = PoolKeys(self.pool).control_channel(self.replica_id)
        subscription = await until_available(lambda: self._listener.listen(channel))
        while True:
            message = await subscription.next(CANCEL_RECHECK_SECONDS)
            if message is None:
                await self._recheck_cancels()
                continue
            word, _, generation_id = message.decode().partition(" ")
            reply = self._replies.get(generation_id)
            if word == "cancel" and reply is not None:
                await reply.stop()

    async def _recheck_cancels(self) -> None:
        for generation_id, reply in list(self._replies.items()):
            with contextlib.suppress(Unavailable):
                state = await self._buffer.live(generation_id)
                if state is not None and state.cancel_requested:
                    await reply.stop()

    async def _serve(self, assignment: Assignment) -> None:
        generation_id, attempt = assignment.generation_id, assignment.attempt
        try:
            claim = await until_available(lambda: self._buffer.claim(generation_id, attempt))
            tracing.mark(generation_id, "claimed")
            await self._answer(claim, attempt)
        except UnknownGeneration:
            # The buffer lost it before anything was generated, or it is long over.
            await until_available(lambda: self._finish(generation_id, self.pool, attempt=None, outcome=None))
        except Fenced:
            logger.info("generation %s attempt %d belongs to a later attempt", generation_id, attempt)
        except Exception:
            # Whatever it was, the job must not hang: its text so far is kept and the turn ends as failed.
            logger.exception("generation %s attempt %d broke", generation_id, attempt)
            await until_available(lambda: self._finish(generation_id, self.pool, attempt=None, outcome=None))
        finally:
            self.bookings.pop(generation_id, None)
            self._attempts.pop(generation_id, None)
            self._replies.pop(generation_id, None)

    async def _answer(self, claim: Claim, attempt: int) -> None:
        generation_id = claim.request.generation_id
        self.bookings[generation_id] = claim.request.prompt_tokens + claim.request.max_tokens
        outcome = claim.sealed_outcome
        if outcome is None:
            reply = Reply(self.engine, self._buffer, claim, attempt, self.settings.flush_seconds)
            if claim.state.cancel_requested:
                outcome = reply.cancelled()
            elif self._leaving:
                return
            else:
                outcome = await self._generate(reply)
            self._metrics.replied(reply, outcome)
            if reply.unfinished:
                return
        decided = outcome
        await until_available(lambda: self._finish(generation_id, self.pool, attempt=attempt, outcome=decided))

    async def _generate(self, reply: Reply) -> Outcome:
        generation_id = reply.request.generation_id
        self._replies[generation_id] = reply
        running = asyncio.create_task(reply.run())
        try:
            if await self._cancelled_meanwhile(generation_id):
                await reply.stop()
            return await running
        finally:
            running.cancel()

    async def _cancelled_meanwhile(self, generation_id: str) -> bool:
        """A cancel between the claim and the first look at the control channel has left its mark."""
        state = await until_available(lambda: self._buffer.live(generation_id))
        return state is not None and state.cancel_requested

    async def _hand_over_all(self) -> None:
        """Whatever still runs goes back to the head of its lane, with all its tokens in the buffer."""
        for reply in list(self._replies.values()):
            await reply.stop(handing_over=True)
        if self._serving:
            await asyncio.wait(self._serving, timeout=self.settings.drain_seconds * 0.15)
        try:
            await self._lanes.leave(self.pool, self.replica_id)
        except Unavailable:
            logger.warning("could not leave the pool; the sweep will notice")
