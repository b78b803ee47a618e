"""Lanes, replicas and bookings of a pool, in one slot; every change is one script."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio.cluster import RedisCluster

from chat.adapters.valkey.client import Script, Valkey
from chat.ids import now_ms as wall_clock_ms
from chat.keys import PoolKeys
from chat.model import Job
from chat.ports import Assignment, JobState, PoolStatus, QueuePlace, ReplicaStatus, Swept
from chat.settings import PlanSpec

_ENQUEUE, _PLACE, _DISPATCH = Script("enqueue"), Script("place"), Script("dispatch")
_HEARTBEAT, _CANCEL, _RELEASE = Script("heartbeat"), Script("cancel"), Script("release")
_HAND_OVER, _SWEEP = Script("hand_over"), Script("sweep")

RATE_WINDOW_MS = 30_000
"""Time constant of the drain rate: dispatches older than this hardly count."""


class _Replica(msgspec.Struct, frozen=True):
    k: int
    h: float
    d: bool


class ValkeyLanes:
    """Implements `chat.ports.Lanes`. Lanes are served in the order of the plans' priority."""

    def __init__(self, valkey: Valkey, plans: Sequence[PlanSpec], silent_ms: int = 3000) -> None:
        self._valkey = valkey
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
        found = await self._valkey.run(_PLACE, [at.jobs, at.rate, *self._lanes(at)], [generation_id, *self._plans])
        if not found:
            return None
        position, per_second = int(found[0]), float(found[1]) / (RATE_WINDOW_MS / 1000)
        wait = position / max(per_second, 0.1) if position else 0.0
        return QueuePlace(position, round(wait, 1))

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
            at.work_channel,
            self._plans[0],
        ]
        for generation_id, tokens in status.bookings.items():
            arguments += [generation_id, tokens]
        keys = [at.replicas, at.booked, at.jobs, at.running(status.replica_id), at.inbox(status.replica_id)]
        await self._valkey.run(_HEARTBEAT, keys, arguments)

    async def take(self, pool: str, replica_id: str, timeout_seconds: float) -> Assignment | None:
        """See Lanes.take. An assignment that a cancelled call took is given again by the heartbeat."""
        inbox = PoolKeys(pool).inbox(replica_id)

        async def pop(cluster: RedisCluster) -> Any:
            return await cluster.blpop([inbox], timeout=max(0.05, min(timeout_seconds, 1.0)))

        end = time.monotonic() + timeout_seconds
        while True:
            answer = await self._valkey.call(pop)
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
        marks = dict.fromkeys(generation_ids, now_ms)
        if marks:
            await self._valkey.call(lambda cluster: cluster.zadd(PoolKeys(pool).followed, marks, xx=True))

    async def status(self, pool: str) -> PoolStatus:
        """See Lanes.status. Replicas that fell silent are not counted."""
        at = PoolKeys(pool)

        async def read(cluster: RedisCluster) -> tuple[Any, Any, list[int], int]:
            replicas, booked = await cluster.hgetall(at.replicas), await cluster.hgetall(at.booked)
            queued = [int(await cluster.zcard(lane)) for lane in self._lanes(at)]
            return replicas, booked, queued, int(await cluster.hlen(at.jobs))

        replicas, booked, queued, jobs = await self._valkey.call(read)
        now = wall_clock_ms()
        live = {
            name: replica
            for name, raw in replicas.items()
            if now - (replica := msgspec.json.decode(raw, type=_Replica)).h <= self._silent_ms
        }
        return PoolStatus(
            queued=dict(zip(self._plans, queued, strict=True)),
            replicas=len(live),
            kv_capacity_tokens=sum(replica.k for replica in live.values()),
            kv_booked_tokens=sum(int(tokens) for name, tokens in booked.items() if name in live),
            running=max(0, jobs - sum(queued)),
        )
