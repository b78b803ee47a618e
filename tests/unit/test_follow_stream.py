"""Following a stream: whatever is dropped, late or lost, every event arrives once and in order."""

import asyncio
import random
import time

import pytest

from chat import frames
from chat.model import EventKind, GenerationStatus
from chat.ports import QueuePlace
from chat.usecases import follow_stream
from chat.usecases.follow_stream import Follower, FollowStream
from tests.unit.streams import GEN, Client, FakeStore, reply, saved_generation, until


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_stream, "AWAY_SECONDS", 0.4)
    monkeypatch.setattr(follow_stream, "PLACE_SECONDS", 0.02)


def use_case(store: FakeStore, heartbeat: float = 0.1) -> FollowStream:
    return FollowStream(store, store, store, store, store, store, heartbeat)  # type: ignore[arg-type]


async def started(
    store: FakeStore, client: Client, last: str | None = None, heartbeat: float = 0.1
) -> tuple[Follower, "asyncio.Task[None]"]:
    """A follower that is past the check; its task runs."""
    follow = use_case(store, heartbeat)
    follower = Follower(await follow.permit("ada", GEN, last), client.emit, heartbeat, client.emit_now)
    return follower, asyncio.create_task(follow.follow(follower))


async def test_live_events_arrive_once_and_the_stream_ends_with_the_last(store: FakeStore) -> None:
    client, events = Client(), reply(20)
    _, task = await started(store, client)
    for frame in events:
        store.append(frame)
        await asyncio.sleep(0)
    await asyncio.wait_for(task, 5)
    assert client.frames == events
    assert store.subscriptions == []


@pytest.mark.parametrize("seed", range(12))
async def test_random_drops_lost_publishes_and_resumes_lose_and_repeat_nothing(store: FakeStore, seed: int) -> None:
    chance = random.Random(seed)
    events = reply(120)
    store.lossy = lambda frame: chance.random() < 0.2

    async def produce() -> None:
        for frame in events:
            store.append(frame)
            if chance.random() < 0.05:
                for one in store.subscriptions:
                    one.lose()
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))

    producer = asyncio.create_task(produce())
    got: list[bytes] = []
    while not got or not frames.is_last(got[-1]):
        client = Client()
        client.refuses = lambda: chance.random() < 0.3
        last = str(frames.seq_of(got[-1])) if got else None
        _, task = await started(store, client, last, heartbeat=0.06)
        await asyncio.wait({task}, timeout=chance.uniform(0.005, 0.05))
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        got += client.durable
    await producer
    assert got == events
    assert store.subscriptions == []


async def test_deltas_are_sent_where_they_arrive_and_count_as_signs_of_life(store: FakeStore) -> None:
    client, events = Client(), reply(60)
    _, task = await started(store, client, heartbeat=0.1)
    await until(lambda: store.subscriptions)
    for frame in events[:-1]:
        store.append(frame)
        await asyncio.sleep(0.01)
    reads = store.reads
    assert client.at_once > 40
    store.append(events[-1])
    await asyncio.wait_for(task, 5)
    assert client.frames == events
    assert frames.KEEP_ALIVE not in client.got
    assert reads < 15


async def test_a_hole_is_filled_from_the_buffer_without_waiting(store: FakeStore) -> None:
    client, events = Client(), reply(6)
    store.lossy = lambda frame: frames.seq_of(frame) in (3, 4)
    _, task = await started(store, client, heartbeat=60)
    await until(lambda: store.subscriptions)
    for frame in events:
        store.append(frame)
        await asyncio.sleep(0.002)
    await asyncio.wait_for(task, 2)
    assert client.frames == events


async def test_a_gap_is_read_again_at_once(store: FakeStore) -> None:
    client, events = Client(), reply(3)
    store.append(events[0])
    store.lossy = lambda frame: True
    _, task = await started(store, client, heartbeat=60)
    await until(lambda: client.durable)
    for frame in events[1:]:
        store.append(frame)
    store.subscriptions[0].lose()
    await asyncio.wait_for(task, 2)
    assert client.frames == events


async def test_a_gap_before_the_first_event_is_read_again_at_once(store: FakeStore) -> None:
    client, events = Client(), reply(3)
    store.lossy = lambda frame: True
    store.places = [QueuePlace(1, 2.0)]
    _, task = await started(store, client, heartbeat=60)
    await until(lambda: client.frames)
    store.places = [QueuePlace(0, 0.0)]
    for frame in events:
        store.append(frame)
    store.subscriptions[0].lose()
    await asyncio.wait_for(task, 2)
    assert client.durable == events


async def test_repeated_frames_are_sent_once(store: FakeStore) -> None:
    client, events = Client(), reply(5)
    store.append(events[0])
    _, task = await started(store, client)
    await until(lambda: client.durable)
    for frame in events[1:]:
        for one in store.subscriptions:
            one.deliver(events[0])
        store.append(frame)
        for one in store.subscriptions:
            one.deliver(frame)
    await asyncio.wait_for(task, 5)
    assert client.frames == events


async def test_a_client_that_does_not_read_holds_up_nobody_and_gets_all_later(store: FakeStore) -> None:
    slow, quick_one, events = Client(), Client(), reply(400)
    slow.pause = asyncio.Event()
    _, slow_task = await started(store, slow)
    _, quick_task = await started(store, quick_one)
    for number, frame in enumerate(events):
        store.append(frame)
        if number == 200:
            store.subscriptions[0].lose()  # its queue ran over
        await asyncio.sleep(0)
    await asyncio.wait_for(quick_task, 5)
    assert quick_one.frames == events
    assert slow.got == b""
    slow.pause.set()
    await asyncio.wait_for(slow_task, 5)
    assert slow.frames == events


async def test_a_silent_stream_is_kept_alive(store: FakeStore) -> None:
    client, events = Client(), reply(3)
    store.append(events[0])
    _, task = await started(store, client, heartbeat=0.08)
    begin = time.monotonic()
    await until(lambda: client.got.count(frames.KEEP_ALIVE) >= 3)
    assert 0.15 < time.monotonic() - begin < 2
    for frame in events[1:]:
        store.append(frame)
    await asyncio.wait_for(task, 5)
    assert client.frames == events


async def test_a_stream_is_kept_alive_while_the_store_is_away_and_goes_on(store: FakeStore) -> None:
    client, events = Client(), reply(3)
    store.append(events[0])
    _, task = await started(store, client, heartbeat=0.08)
    await until(lambda: client.durable)
    store.down = True
    await until(lambda: client.got.count(frames.KEEP_ALIVE) >= 2)
    store.down = False
    for frame in events[1:]:
        store.append(frame)
    await asyncio.wait_for(task, 5)
    assert client.frames == events


async def test_an_ended_stream_ends_at_once_for_whoever_has_it_all(store: FakeStore) -> None:
    for frame in reply(4):
        store.append(frame)
    client = Client()
    _, task = await started(store, client, "4", heartbeat=60)
    await asyncio.wait_for(task, 2)
    assert client.got == b""


async def test_an_expired_buffer_is_told_from_the_saved_reply(store: FakeStore) -> None:
    store.log, store.generation, store.text = None, saved_generation(last=9), "the whole reply"
    client = Client()
    _, task = await started(store, client)
    await asyncio.wait_for(task, 2)
    delta, done = client.frames
    assert (frames.seq_of(delta), frames.kind_of(delta)) == (8, EventKind.DELTA)
    assert frames.data_of(delta) == {"text": "the whole reply"}
    assert (frames.seq_of(done), frames.kind_of(done)) == (9, EventKind.DONE)


async def test_an_expired_buffer_repeats_no_text_to_a_client_in_the_middle(store: FakeStore) -> None:
    store.log, store.generation, store.text = None, saved_generation(last=9), "the whole reply"
    client = Client()
    _, task = await started(store, client, "3")
    await asyncio.wait_for(task, 2)
    assert [frames.seq_of(one) for one in client.frames] == [9]
    client = Client()
    _, task = await started(store, client, "9")
    await asyncio.wait_for(task, 2)
    assert client.got == b""


async def test_a_saved_generation_that_the_buffer_lost_is_queued_again(store: FakeStore) -> None:
    store.log, store.generation = None, saved_generation(GenerationStatus.QUEUED)
    client, events = Client(), reply(3)
    _, task = await started(store, client)
    assert store.recovered == [GEN]
    for frame in events:
        store.append(frame)
    await asyncio.wait_for(task, 2)
    assert client.frames == events


async def test_the_place_in_the_queue_is_told_when_it_changes(store: FakeStore) -> None:
    store.places = [QueuePlace(2, 8.0), QueuePlace(2, 8.0), QueuePlace(1, 3.5)]
    client, events = Client(), reply(3)
    _, task = await started(store, client, heartbeat=60)
    await until(lambda: len(client.frames) == 2)
    store.places = [QueuePlace(0, 0)]
    for frame in events:
        store.append(frame)
    await asyncio.wait_for(task, 2)
    told = [frames.data_of(one) for one in client.frames[:2]]
    assert told == [
        {"generationId": GEN, "position": 2, "estimatedWaitSeconds": 8.0},
        {"generationId": GEN, "position": 1, "estimatedWaitSeconds": 3.5},
    ]
    assert all(one.startswith(b"event: queued\n") for one in client.frames[:2])
    assert client.frames[2:] == events


@pytest.mark.parametrize("queued", [False, True])
async def test_a_drain_ends_the_stream_without_its_last_event(store: FakeStore, queued: bool) -> None:
    client, events = Client(), reply(6)
    store.places = [QueuePlace(3, 9.0)] if queued else []
    if not queued:
        for frame in events[:3]:
            store.append(frame)
    follower, task = await started(store, client, heartbeat=60)
    await until(lambda: client.frames if queued else len(client.durable) == 3)
    await follower.close()
    await asyncio.wait_for(task, 2)
    assert not any(frames.is_last(one) for one in client.durable)
    for frame in events[len(store.log or []) :]:
        store.append(frame)
    rest = Client()
    _, task = await started(store, rest, str(len(client.durable)) if client.durable else None)
    await asyncio.wait_for(task, 2)
    assert client.durable + rest.durable == events


async def test_a_follower_closed_before_it_began_ends(store: FakeStore) -> None:
    follow = use_case(store)
    follower = Follower(await follow.permit("ada", GEN, None), Client().emit, 60)
    await follower.close()
    await asyncio.wait_for(follow.follow(follower), 2)


async def test_a_buffer_lost_in_the_middle_for_good_ends_the_stream_in_bounded_time(store: FakeStore) -> None:
    store.generation = saved_generation(GenerationStatus.RUNNING)
    client, events = Client(), reply(6)
    for frame in events[:3]:
        store.append(frame)
    _, task = await started(store, client)
    await until(lambda: len(client.durable) == 3)
    store.log = None
    await asyncio.wait_for(task, 3)
    assert client.durable == events[:3]


async def test_a_store_that_stays_away_ends_the_stream_in_bounded_time(store: FakeStore) -> None:
    client = Client()
    store.append(reply(3)[0])
    _, task = await started(store, client)
    await until(lambda: client.durable)
    store.down = True
    await asyncio.wait_for(task, 3)
    assert len(client.durable) == 1


async def test_no_subscription_is_to_be_had_ends_in_bounded_time(store: FakeStore) -> None:
    follow, client = use_case(store), Client()
    follower = Follower(await follow.permit("ada", GEN, None), client.emit, 0.1)
    store.down = True
    await asyncio.wait_for(follow.follow(follower), 3)
    assert client.got.count(frames.KEEP_ALIVE) >= 1


async def test_a_buffer_lost_in_the_middle_and_written_anew_goes_on_where_it_was(store: FakeStore) -> None:
    store.generation = saved_generation(GenerationStatus.RUNNING)
    client, events = Client(), reply(6)
    for frame in events[:3]:
        store.append(frame)
    _, task = await started(store, client)
    await until(lambda: len(client.durable) == 3)
    store.log = None
    store.subscriptions[0].lose()
    await asyncio.sleep(0.05)
    store.log = []
    for frame in events:
        store.append(frame)
    await asyncio.wait_for(task, 3)
    assert client.durable == events


async def test_a_buffer_lost_after_the_end_was_saved_ends_the_stream(store: FakeStore) -> None:
    client, events = Client(), reply(9)
    _, fresh = await started(store, client)
    await until(lambda: store.subscriptions)
    store.log, store.generation, store.text = None, saved_generation(last=9), "all of it"
    store.subscriptions[0].lose()
    await asyncio.wait_for(fresh, 3)
    assert frames.data_of(client.durable[0]) == {"text": "all of it"}
    assert frames.is_last(client.durable[-1])
    store.log = events[:3]
    middle = Client()
    _, task = await started(store, middle)
    await until(lambda: len(middle.durable) == 3)
    store.log = None
    await asyncio.wait_for(task, 3)
    assert middle.durable == events[:3]  # it comes back with id 3, and is told the end then


async def test_a_reply_that_is_lost_everywhere_ends_with_an_error(store: FakeStore) -> None:
    client = Client()
    _, task = await started(store, client)
    await until(lambda: store.subscriptions)
    store.log = None
    store.subscriptions[0].lose()
    await asyncio.wait_for(task, 3)
    assert frames.kind_of(client.durable[-1]) is EventKind.ERROR
    assert frames.data_of(client.durable[-1])["error"]["code"] == "internal_error"


async def test_a_page_of_history_longer_than_one_read_is_whole(store: FakeStore) -> None:
    events = reply(700)
    for frame in events:
        store.append(frame)
    client = Client()
    _, task = await started(store, client)
    await asyncio.wait_for(task, 5)
    assert client.frames == events
    assert store.reads == 3
