"""Lanes, replicas and bookings of a pool, in one slot; every change is one script."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from chat.adapters.valkey.client import Script, Valkey
from chat.ids import now_ms as wall_clock_ms
from chat.keys import PoolKeys
from chat.model import Job
from chat.ports import Assignment, JobState, PoolStatus, QueuePlace, ReplicaStatus, Swept
from chat.settings import PlanSpec

_ENQUEUE, _PLACE, _DISPATCH = Script("enqueue"), Script("place"), Script("dispatch")
_HEARTBEAT, _CANCEL, _RELEASE = Script("heartbeat"), Script("cancel"), Script("release")
_HAND_OVER, _SWEEP, _STATUS = Script("hand_over"), Script("sweep"), Script("status")

RATE_WINDOW_MS = 30_000
"""Time constant of the drain rate: dispatches older than this hardly count."""


LOST_AFTER_MS = 3_000
"""An assignment that its replica does not have in hand after this time was lost, and is queued again."""

LOST_ATTEMPTS = 5
"""A job that got lost at this attempt is set aside instead, so that it cannot go round for ever."""

SLOWEST_PER_SECOND = 0.1
"""The least drain rate that estimates assume, for pools that gave out nothing lately."""


class _Replica(msgspec.Struct, frozen=True):
    """Its row, see heartbeat.lua. Numbers are floats: Lua writes large ones as such."""

    k: float
    h: float
    d: bool
    x: float


class ValkeyLanes:
    """Implements `chat.ports.Lanes`. Lanes are served in the order of the plans' priority."""

    def __init__(
        self,
        valkey: Valkey,
        plans: Sequence[PlanSpec],
        silent_ms: int = 3000,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._valkey, self._clock = valkey, clock
        self._plans = [plan.name for plan in sorted(plans, key=lambda plan: plan.priority)]
        self._silent_ms = silent_ms

    def _lanes(self, at: PoolKeys) -> list[str]:
        return [at.lane(plan) for plan in self._plans]

    async def enqueue(self, pool: str, job: Job) -> QueuePlace:
        """See Lanes.enqueue."""
        at = PoolKeys(pool)
        if job.plan not in self._plans:
            raise ValueError(f"plan {job.plan!r} has no lane; lanes are {', '.join(self._plans)}")
        arguments = [
            at.work_channel,
            job.generation_id,
            job.user_id,
            job.conversation_id,
            job.plan,
            job.kv_tokens,
            job.enqueued_at_ms,
        ]
        await self._valkey.run(_ENQUEUE, [at.jobs, at.order, at.followed, at.lane(job.plan)], arguments)
        return await self.place(pool, job.generation_id) or QueuePlace(0, 0.0)

    async def place(self, pool: str, generation_id: str) -> QueuePlace | None:
        """See Lanes.place."""
        at = PoolKeys(pool)
        keys = [at.jobs, at.rate, at.replicas, at.booked, *self._lanes(at)]
        found = await self._valkey.run(_PLACE, keys, [generation_id, *self._plans])
        if not found:
            return None
        if found[0] == 0:
            return QueuePlace(0, 0.0)
        position, room, count, at_ms, since_ms = found[0], found[1], float(found[2]), int(found[3]), int(found[4])
        if room:
            return QueuePlace(position, 0.0)
        return QueuePlace(position, round(position / drain_rate(count, at_ms, since_ms, self._clock()), 1))

    async def cancel(self, pool: str, generation_id: str) -> JobState:
        """See Lanes.cancel."""
        at = PoolKeys(pool)
        return JobState((await self._valkey.run(_CANCEL, [at.jobs, at.followed], [generation_id, at.tag])).decode())

    async def dispatch(self, pool: str, now_ms: int, limit: int) -> list[Assignment]:
        """See Lanes.dispatch."""
        at = PoolKeys(pool)
        keys = [at.jobs, at.replicas, at.booked, at.rate, at.exhausted, *self._lanes(at)]
        answer = await self._valkey.run(_DISPATCH, keys, [now_ms, limit, self._silent_ms, at.tag, RATE_WINDOW_MS])
        return [
            Assignment(generation.decode(), int(attempt))
            for generation, attempt in zip(answer[::2], answer[1::2], strict=True)
        ]

    async def heartbeat(self, pool: str, status: ReplicaStatus, now_ms: int) -> None:
        """See Lanes.heartbeat."""
        at = PoolKeys(pool)
        arguments: list[Any] = [
            status.replica_id,
            status.kv_capacity_tokens,
            int(status.draining),
            now_ms,
            at.tag,
            at.work_channel,
            self._plans[0],
            LOST_AFTER_MS,
            LOST_ATTEMPTS,
        ]
        for generation_id, tokens in status.bookings.items():
            arguments += [generation_id, tokens, status.attempts.get(generation_id, 1)]
        running, inbox = at.running(status.replica_id), at.inbox(status.replica_id)
        keys = [at.replicas, at.booked, at.jobs, running, inbox, at.followed, at.exhausted]
        await self._valkey.run(_HEARTBEAT, keys, arguments)

    async def take(self, pool: str, replica_id: str, timeout_seconds: float) -> Assignment | None:
        """See Lanes.take. An assignment that a cancelled call took is queued again by the heartbeat."""
        inbox = PoolKeys(pool).inbox(replica_id)
        end = time.monotonic() + timeout_seconds
        while True:
            seconds = max(0.05, min(end - time.monotonic(), 1.0))
            answer = await self._valkey.blocking("BLPOP", inbox, seconds)
            if answer:
                generation_id, _, attempt = answer[1].decode().partition(" ")
                return Assignment(generation_id, int(attempt))
            if time.monotonic() >= end:
                return None

    async def release(self, pool: str, generation_id: str) -> None:
        """See Lanes.release."""
        at = PoolKeys(pool)
        keys = [at.jobs, at.booked, at.followed, at.exhausted]
        await self._valkey.run(_RELEASE, keys, [generation_id, at.tag, at.work_channel])

    async def hand_over(self, pool: str, replica_id: str, generation_id: str) -> None:
        """See Lanes.hand_over."""
        at = PoolKeys(pool)
        arguments = [replica_id, generation_id, at.tag, at.work_channel]
        await self._valkey.run(_HAND_OVER, [at.jobs, at.booked, at.replicas], arguments)

    async def leave(self, pool: str, replica_id: str) -> None:
        """See Lanes.leave."""
        await self.hand_over(pool, replica_id, "")

    async def sweep(self, pool: str, now_ms: int, silent_ms: int, abandoned_ms: int, max_attempts: int) -> Swept:
        """See Lanes.sweep."""
        at = PoolKeys(pool)
        keys = [at.jobs, at.booked, at.replicas, at.followed, at.exhausted]
        arguments = [now_ms, silent_ms, abandoned_ms, max_attempts, at.tag, at.work_channel]
        answer = await self._valkey.run(_SWEEP, keys, arguments)
        return Swept(*([generation.decode() for generation in group] for group in answer))

    async def touch_followed(self, pool: str, generation_ids: Sequence[str], now_ms: int) -> None:
        """See Lanes.touch_followed."""
        marks = dict.fromkeys(generation_ids)
        if marks:
            pairs = [word for generation_id in marks for word in (now_ms, generation_id)]
            await self._valkey.command("ZADD", PoolKeys(pool).followed, "XX", *pairs)

    async def status(self, pool: str) -> PoolStatus:
        """See Lanes.status. Replicas that fell silent are not counted."""
        at = PoolKeys(pool)
        answer = await self._valkey.run(_STATUS, [at.replicas, at.booked, at.jobs, *self._lanes(at)], [])
        replicas, booked = (dict(zip(rows[::2], rows[1::2], strict=True)) for rows in answer[:2])
        jobs, queued = answer[2], answer[3:]
        now = self._clock()
        live = {
            name: replica
            for name, raw in replicas.items()
            if now - (replica := msgspec.json.decode(raw, type=_Replica)).h <= self._silent_ms
        }
        return PoolStatus(
            queued=dict(zip(self._plans, queued, strict=True)),
            replicas=len(live),
            kv_capacity_tokens=int(sum(replica.k for replica in live.values())),
            kv_booked_tokens=int(sum(int(booked.get(name, 0)) + replica.x for name, replica in live.items())),
            running=max(0, jobs - sum(queued)),
        )


def drain_rate(count: float, at_ms: int, since_ms: int, now_ms: int) -> float:
    """Dispatches a second, from their decayed count at `at_ms`, which began at `since_ms`."""
    decayed = count * math.exp(-max(0, now_ms - at_ms) / RATE_WINDOW_MS)
    seen_ms = max(1000, now_ms - since_ms)
    seconds = RATE_WINDOW_MS / 1000 * (1 - math.exp(-seen_ms / RATE_WINDOW_MS))
    return max(decayed / seconds, SLOWEST_PER_SECOND)
