"""Lanes, booking and recovery against real Valkey in cluster mode; time is an argument."""

import asyncio
import random

import pytest_asyncio

from chat.adapters.valkey import Valkey, ValkeyLanes
from chat.adapters.valkey.lanes import LOST_ATTEMPTS
from chat.ids import new_id
from chat.keys import PoolKeys
from chat.model import Job
from chat.ports import Assignment, JobState, PoolStatus, ReplicaStatus
from chat.settings import PlanSpec

PLANS = [PlanSpec("free", 1, 2000), PlanSpec("plus", 0, 8000)]


@pytest_asyncio.fixture
async def lanes(valkey: Valkey) -> ValkeyLanes:
    return ValkeyLanes(valkey, PLANS)


def new_pool() -> str:
    return new_id("pool")


def a_job(plan: str = "plus", kv_tokens: int = 100, at: int = 0) -> Job:
    return Job(new_id("gen"), "ada", new_id("conv"), plan, kv_tokens, at)


def replica(name: str, capacity: int = 1000, **more: object) -> ReplicaStatus:
    return ReplicaStatus(
        name, capacity, 0, draining=bool(more.get("draining", False)), bookings=more.get("bookings", {})
    )  # type: ignore[arg-type]


async def keys_of(valkey: Valkey, pool: str) -> set[str]:
    names = await valkey.command("KEYS", f"*{pool}*")
    return {name.decode().partition("}:")[2] for name in names}


async def test_paid_first_then_first_in_first_out(lanes: ValkeyLanes) -> None:
    pool, jobs = new_pool(), [a_job(plan) for plan in ("free", "plus", "free", "plus")]
    await lanes.heartbeat(pool, replica("r1"), 0)
    places = [await lanes.enqueue(pool, job) for job in jobs]
    assert [place.position for place in places] == [1, 1, 3, 2]
    given = await lanes.dispatch(pool, 0, 10)
    assert [one.generation_id for one in given] == [jobs[index].generation_id for index in (1, 3, 0, 2)]
    for expected in given:
        assert await lanes.take(pool, "r1", 1) == expected
    assert await lanes.take(pool, "r1", 0.05) is None


async def test_enqueue_is_idempotent(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    for _ in range(3):
        assert (await lanes.enqueue(pool, job)).position == 1
    await lanes.heartbeat(pool, replica("r1"), 0)
    assert len(await lanes.dispatch(pool, 0, 10)) == 1
    assert (await lanes.enqueue(pool, job)).position == 0
    assert await lanes.dispatch(pool, 0, 10) == []


async def test_a_burst_on_a_frozen_heartbeat_never_overbooks(lanes: ValkeyLanes) -> None:
    pool, rng = new_pool(), random.Random(11)
    for name in ("r1", "r2"):
        await lanes.heartbeat(pool, replica(name, 1000), 0)
    jobs = {job.generation_id: job for job in (a_job(kv_tokens=rng.randint(10, 300)) for _ in range(200))}
    for job in jobs.values():
        await lanes.enqueue(pool, job)
    given = [one for _ in range(10) for one in await lanes.dispatch(pool, 1000, 5)]
    held = {"r1": 0, "r2": 0}
    for name in held:
        while assignment := await lanes.take(pool, name, 0.05):
            held[name] += jobs[assignment.generation_id].kv_tokens
    assert len(given) >= 4
    assert all(0 < tokens <= 1000 for tokens in held.values()), held


async def test_two_dispatchers_give_every_job_exactly_once(lanes: ValkeyLanes) -> None:
    pool = new_pool()
    for name in ("r1", "r2", "r3"):
        await lanes.heartbeat(pool, replica(name, 10**6), 0)
    jobs = [a_job(random.choice(["free", "plus"])) for _ in range(1000)]
    await asyncio.gather(*(lanes.enqueue(pool, job) for job in jobs[:500]))

    async def dispatcher() -> list[str]:
        found: list[str] = []
        for _ in range(200):
            found += [one.generation_id for one in await lanes.dispatch(pool, 0, 7)]
        return found

    async def arrivals() -> list[str]:
        for job in jobs[500:]:
            await lanes.enqueue(pool, job)
        return []

    groups = await asyncio.gather(dispatcher(), dispatcher(), arrivals())
    rest = [one.generation_id for one in await lanes.dispatch(pool, 0, 1000)]
    given = [generation for group in (*groups, rest) for generation in group]
    assert sorted(given) == sorted(job.generation_id for job in jobs)


async def test_nothing_is_left_of_finished_jobs(lanes: ValkeyLanes, valkey: Valkey) -> None:
    pool, jobs = new_pool(), [a_job() for _ in range(5)]
    await lanes.heartbeat(pool, replica("r1", 300), 0)
    for job in jobs:
        await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 10)
    for job in jobs:
        await lanes.release(pool, job.generation_id)
        await lanes.release(pool, job.generation_id)
    status = await valkey.command("HGET", PoolKeys(pool).booked, "r1")
    assert status == b"0"
    assert await keys_of(valkey, pool) == {"booked", "order", "rate", "replicas"}
    await lanes.leave(pool, "r1")
    assert await keys_of(valkey, pool) == {"order", "rate"}


async def test_a_silent_replicas_jobs_go_back_to_the_head_of_their_lanes(lanes: ValkeyLanes) -> None:
    pool, first, second = new_pool(), a_job(), a_job()
    await lanes.heartbeat(pool, replica("r1", 100), 0)
    await lanes.enqueue(pool, first)
    await lanes.enqueue(pool, second)
    assert [one.attempt for one in await lanes.dispatch(pool, 0, 10)] == [1]
    assert (await lanes.sweep(pool, 2000, 3000, 30_000, 3)).requeued == []
    assert (await lanes.sweep(pool, 4000, 3000, 90_000, 3)).requeued == [first.generation_id]
    await lanes.heartbeat(pool, replica("r2", 100), 4000)
    [again] = await lanes.dispatch(pool, 4000, 10)
    assert (again.generation_id, again.attempt) == (first.generation_id, 2)


async def test_a_job_out_of_attempts_is_set_aside(lanes: ValkeyLanes) -> None:
    pool, job, now = new_pool(), a_job(), 0
    await lanes.enqueue(pool, job)
    for attempt in (1, 2):
        await lanes.heartbeat(pool, replica(f"r{attempt}", 100), now)
        assert [one.attempt for one in await lanes.dispatch(pool, now, 1)] == [attempt]
        now += 5000
        swept = await lanes.sweep(pool, now, 3000, 900_000, 2)
    assert (swept.requeued, swept.exhausted) == ([], [job.generation_id])
    assert (await lanes.sweep(pool, now, 3000, 900_000, 2)).exhausted == [job.generation_id]
    await lanes.release(pool, job.generation_id)
    assert (await lanes.sweep(pool, now, 3000, 900_000, 2)).exhausted == []


async def test_bad_entries_and_giants_never_block_a_lane(lanes: ValkeyLanes, valkey: Valkey) -> None:
    pool, giant, orphan, broken, good = new_pool(), a_job(kv_tokens=5000), a_job(), a_job(), a_job()
    at = PoolKeys(pool)
    await lanes.heartbeat(pool, replica("r1", 1000), 0)
    for job in (giant, orphan, broken, good):
        await lanes.enqueue(pool, job)
    await valkey.command("HDEL", at.jobs, orphan.generation_id)
    await valkey.command("HSET", at.jobs, broken.generation_id, "{")
    assert [one.generation_id for one in await lanes.dispatch(pool, 0, 10)] == [good.generation_id]
    swept = await lanes.sweep(pool, 0, 3000, 900_000, 3)
    assert set(swept.exhausted) == {job.generation_id for job in (giant, orphan, broken)}


async def test_cancel_finds_the_job_in_every_state(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    assert await lanes.cancel(pool, job.generation_id) is JobState.UNKNOWN
    await lanes.enqueue(pool, job)
    assert await lanes.cancel(pool, job.generation_id) is JobState.QUEUED
    assert await lanes.cancel(pool, job.generation_id) is JobState.UNKNOWN
    await lanes.heartbeat(pool, replica("r1"), 0)
    assert await lanes.dispatch(pool, 0, 10) == []
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 10)
    assert await lanes.cancel(pool, job.generation_id) is JobState.DISPATCHED


async def test_a_draining_replica_gets_nothing_and_hands_over(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    await lanes.heartbeat(pool, replica("r1"), 0)
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 1)
    await lanes.heartbeat(pool, replica("r1", draining=True, bookings={job.generation_id: 100}), 0)
    await lanes.hand_over(pool, "r1", job.generation_id)
    assert await lanes.dispatch(pool, 0, 1) == []
    await lanes.heartbeat(pool, replica("r2"), 0)
    assert [(one.generation_id, one.attempt) for one in await lanes.dispatch(pool, 0, 1)] == [(job.generation_id, 2)]
    await lanes.hand_over(pool, "r1", job.generation_id)
    assert (await lanes.place(pool, job.generation_id)).position == 0  # type: ignore[union-attr]


async def test_jobs_without_followers_are_named_until_released(lanes: ValkeyLanes) -> None:
    pool, followed, left = new_pool(), a_job(), a_job()
    for job in (followed, left):
        await lanes.enqueue(pool, job)
    await lanes.touch_followed(pool, [followed.generation_id, "gen_unknown"], 25_000)
    assert (await lanes.sweep(pool, 31_000, 3000, 30_000, 3)).abandoned == [left.generation_id]
    assert (await lanes.sweep(pool, 32_000, 3000, 30_000, 3)).abandoned == []
    assert (await lanes.sweep(pool, 36_500, 3000, 30_000, 3)).abandoned == [left.generation_id]


async def test_an_assignment_lost_between_inbox_and_worker_is_queued_again(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    await lanes.heartbeat(pool, replica("r1"), 0)
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 1)
    assert await lanes.take(pool, "r1", 1)
    await lanes.heartbeat(pool, replica("r1"), 1000)
    assert await lanes.dispatch(pool, 1000, 1) == []
    await lanes.heartbeat(pool, replica("r1"), 4000)
    assert [one.attempt for one in await lanes.dispatch(pool, 4000, 1)] == [2]
    await lanes.heartbeat(pool, replica("r1", bookings={job.generation_id: 100}), 9000)
    assert (await lanes.place(pool, job.generation_id)).position == 0  # type: ignore[union-attr]


async def test_an_assignment_that_is_always_lost_does_not_go_round_for_ever(lanes: ValkeyLanes) -> None:
    pool, job, now = new_pool(), a_job(), 0
    await lanes.enqueue(pool, job)
    await lanes.heartbeat(pool, replica("r1"), now)
    for _ in range(LOST_ATTEMPTS):
        assert len(await lanes.dispatch(pool, now, 1)) == 1
        await lanes.take(pool, "r1", 1)
        now += 4000
        await lanes.heartbeat(pool, replica("r1"), now)
    assert await lanes.dispatch(pool, now, 1) == []
    assert (await lanes.sweep(pool, now, 3000, 900_000, 99)).exhausted == [job.generation_id]


async def test_a_cancelled_take_loses_nothing(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    await lanes.heartbeat(pool, replica("r1"), 0)
    waiting = asyncio.create_task(lanes.take(pool, "r1", 10))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 1)
    assert await lanes.take(pool, "r1", 1) == Assignment(job.generation_id, 1)


async def test_a_replica_that_was_taken_for_dead_comes_back(lanes: ValkeyLanes, valkey: Valkey) -> None:
    pool, job, at = new_pool(), a_job(), 0
    await lanes.heartbeat(pool, replica("r1"), at)
    await lanes.heartbeat(pool, replica("r2", 100, draining=True), at)
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, at, 1)
    at = 4000
    await lanes.heartbeat(pool, replica("r2", 100), at)
    assert (await lanes.sweep(pool, at, 3000, 900_000, 3)).requeued == [job.generation_id]
    await lanes.heartbeat(pool, replica("r1", 100, bookings={job.generation_id: 100}), at)
    [again] = await lanes.dispatch(pool, at, 5)
    assert await lanes.take(pool, "r2", 1) == again == Assignment(job.generation_id, 2)
    # The zombie still fills its cache, so it gets nothing until it is fenced off and lets go.
    other = a_job()
    await lanes.enqueue(pool, other)
    for at in (5000, 9000):
        await lanes.heartbeat(pool, replica("r1", 100, bookings={job.generation_id: 100}), at)
        await lanes.heartbeat(pool, replica("r2", 100, bookings={job.generation_id: 100}), at)
        assert await lanes.dispatch(pool, at, 5) == []
    await lanes.heartbeat(pool, replica("r1", 100), at)
    assert [one.generation_id for one in await lanes.dispatch(pool, at, 5)] == [other.generation_id]
    for one in (job, other):
        await lanes.release(pool, one.generation_id)
    assert await valkey.command("HVALS", PoolKeys(pool).booked) == [b"0", b"0"]


async def test_a_zombies_job_that_another_finished_is_not_revived_for_good(lanes: ValkeyLanes, valkey: Valkey) -> None:
    pool, job = new_pool(), a_job()
    await lanes.heartbeat(pool, replica("r1"), 0)
    await lanes.enqueue(pool, job)
    await lanes.dispatch(pool, 0, 1)
    await lanes.sweep(pool, 4000, 3000, 900_000, 3)
    await lanes.release(pool, job.generation_id)
    await lanes.heartbeat(pool, replica("r1", bookings={job.generation_id: 100}), 4000)
    await lanes.heartbeat(pool, replica("r1"), 8000)
    assert await lanes.place(pool, job.generation_id) is None
    assert await valkey.command("HGET", PoolKeys(pool).booked, "r1") == b"0"
    await lanes.leave(pool, "r1")
    assert await keys_of(valkey, pool) == {"order", "rate"}


async def test_a_replica_restores_its_bookings_after_valkey_lost_them(lanes: ValkeyLanes) -> None:
    pool = new_pool()
    said = ReplicaStatus("r1", 1000, 2, False, {"gen_a": 600, "gen_b": 300}, {"gen_a": 2})
    await lanes.heartbeat(pool, said, 0)
    await lanes.enqueue(pool, a_job(kv_tokens=200))
    assert await lanes.dispatch(pool, 0, 1) == []
    await lanes.release(pool, "gen_b")
    assert len(await lanes.dispatch(pool, 0, 1)) == 1
    assert "gen_a" in (await lanes.sweep(pool, 5000, 3000, 900_000, 3)).requeued
    await lanes.heartbeat(pool, replica("r2"), 5000)
    [again] = await lanes.dispatch(pool, 5000, 1)
    assert again == Assignment("gen_a", 3)


async def test_a_replica_without_room_yet_fails_nothing(lanes: ValkeyLanes) -> None:
    pool, job = new_pool(), a_job()
    await lanes.enqueue(pool, job)
    await lanes.heartbeat(pool, replica("r1", 0), 0)
    assert await lanes.dispatch(pool, 0, 1) == []
    assert (await lanes.sweep(pool, 0, 3000, 900_000, 3)).exhausted == []
    await lanes.heartbeat(pool, replica("r1", 1000), 0)
    assert len(await lanes.dispatch(pool, 0, 1)) == 1


async def test_the_wait_estimate_follows_the_drain_rate(valkey: Valkey) -> None:
    pool, now = new_pool(), 1_000_000
    lanes = ValkeyLanes(valkey, PLANS, clock=lambda: now)
    await lanes.heartbeat(pool, replica("r1", 100), now)
    assert (await lanes.enqueue(pool, a_job())).estimated_wait_seconds == 0
    [first] = await lanes.dispatch(pool, now, 1)
    jobs = [a_job() for _ in range(45)]
    for job in jobs:
        await lanes.enqueue(pool, job)
    running = first.generation_id
    for _ in range(40):  # two a second
        now += 500
        await lanes.heartbeat(pool, replica("r1", 100, bookings={running: 100}), now)
        await lanes.release(pool, running)
        [given] = await lanes.dispatch(pool, now, 1)
        running = given.generation_id
    place = await lanes.place(pool, jobs[-1].generation_id)
    assert place is not None and place.position == 5 and 2.0 < place.estimated_wait_seconds < 3.0
    now += 60_000  # nothing drained for a minute
    later = await lanes.place(pool, jobs[-1].generation_id)
    assert later is not None and later.estimated_wait_seconds > 10


async def test_status_counts_what_lives(valkey: Valkey) -> None:
    pool, lanes = new_pool(), ValkeyLanes(valkey, PLANS, clock=lambda: 5000)
    await lanes.heartbeat(pool, replica("dead"), 0)
    await lanes.heartbeat(pool, replica("r1", 150), 5000)
    for plan in ("plus", "plus", "free"):
        await lanes.enqueue(pool, a_job(plan))
    await lanes.dispatch(pool, 5000, 5)
    assert await lanes.status(pool) == PoolStatus({"plus": 1, "free": 1}, 1, 150, 100, 1)
