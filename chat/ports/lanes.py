"""Lanes and replicas: what Valkey keeps of a pool, in one slot."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from chat.model import Job


class QueuePlace(msgspec.Struct, frozen=True):
    """Place in the lane from 1, and the estimated wait; position 0 means already dispatched."""

    position: int
    estimated_wait_seconds: float


class JobState(StrEnum):
    """Where a cancel found the job."""

    QUEUED = "queued"
    """It was taken out of its lane: the caller must finish the turn."""
    DISPATCHED = "dispatched"
    """Its replica was told, and finishes the turn."""
    UNKNOWN = "unknown"


class Assignment(msgspec.Struct, frozen=True):
    """A generation dispatched to a replica."""

    generation_id: str
    attempt: int


class ReplicaStatus(msgspec.Struct, frozen=True):
    """What a replica says of itself. `replica_id` is unique to a process, so a restart is a new replica."""

    replica_id: str
    kv_capacity_tokens: int
    running: int
    draining: bool
    bookings: dict[str, int] = {}
    """generation id -> KV tokens that it has in hand; restores the books after Valkey lost them"""
    attempts: dict[str, int] = {}
    """generation id -> its attempt, for the same purpose; 1 where it is not told"""


class PoolStatus(msgspec.Struct, frozen=True):
    """A pool at one moment."""

    queued: dict[str, int]
    replicas: int
    kv_capacity_tokens: int
    kv_booked_tokens: int
    running: int


class Swept(msgspec.Struct, frozen=True):
    """What a sweep found: put back at the head of their lanes, out of attempts, without followers."""

    requeued: list[str]
    exhausted: list[str]
    abandoned: list[str]


class Lanes(Protocol):
    """Queues by plan, replicas and bookings of a pool. Time is always an argument, in epoch milliseconds."""

    async def enqueue(self, pool: str, job: Job) -> QueuePlace:
        """Idempotent by generation id; wakes the dispatchers."""
        ...

    async def place(self, pool: str, generation_id: str) -> QueuePlace | None:
        """None when the pool does not know the job (finished, or lost)."""
        ...

    async def cancel(self, pool: str, generation_id: str) -> JobState: ...

    async def dispatch(self, pool: str, now_ms: int, limit: int) -> list[Assignment]:
        """Pop, pick a replica, book and hand over, all in one script; up to `limit` jobs."""
        ...

    async def heartbeat(self, pool: str, status: ReplicaStatus, now_ms: int) -> None: ...

    async def take(self, pool: str, replica_id: str, timeout_seconds: float) -> Assignment | None:
        """Wait for the next assignment of this replica."""
        ...

    async def release(self, pool: str, generation_id: str) -> None:
        """The turn is finished: forget the job, free its booking, wake the dispatchers; idempotent."""
        ...

    async def hand_over(self, pool: str, replica_id: str, generation_id: str) -> None:
        """Put a running job back at the head of its lane (a draining replica); no-op if it is not this replica's."""
        ...

    async def leave(self, pool: str, replica_id: str) -> None:
        """The replica is gone for good; whatever it still had goes back to its lanes."""
        ...

    async def sweep(self, pool: str, now_ms: int, silent_ms: int, abandoned_ms: int, max_attempts: int) -> Swept: ...

    async def touch_followed(self, pool: str, generation_ids: Sequence[str], now_ms: int) -> None:
        """Somebody is following these: they are not abandoned."""
        ...

    async def status(self, pool: str) -> PoolStatus: ...
