"""The token buffer against real Valkey in cluster mode."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chat import frames
from chat.adapters.valkey import Valkey, ValkeyTokenBuffer, ValkeyWakeups
from chat.adapters.valkey.wakeups import QUEUE_FRAMES
from chat.ids import new_id
from chat.keys import BUFFER_TTL_SECONDS, GenerationKeys
from chat.model import ChatMessage, Cost, EventKind, FinishReason, GenerationRequest, Outcome, Role, Usage
from chat.ports import BufferEntry, Fenced, UnknownGeneration


def a_request(**changes: object) -> GenerationRequest:
    values: dict = {
        "generation_id": new_id("gen"),
        "user_id": "ada",
        "conversation_id": "conv_1",
        "message_id": "msg_2",
        "reply_seq": 2,
        "plan": "plus",
        "pool": "large",
        "model": "sim-large",
        "messages": [ChatMessage(Role.USER, "hello")],
        "max_tokens": 100,
        "prompt_tokens": 5,
        "temperature": 0.7,
        "created_at_ms": 0,
    }
    return GenerationRequest(**(values | changes))


def deltas(first: int, *texts: str) -> list[BufferEntry]:
    return [
        BufferEntry(seq, EventKind.DELTA, frames.durable(seq, EventKind.DELTA, {"text": text}), [seq * 10])
        for seq, text in enumerate(texts, first)
    ]


def outcome(text: str = "abc") -> Outcome:
    return Outcome(FinishReason.STOP, text, Usage(5, 3), Cost(0.1))


@pytest_asyncio.fixture
async def buffer(valkey: Valkey) -> ValkeyTokenBuffer:
    return ValkeyTokenBuffer(valkey)


@pytest_asyncio.fixture
async def wakeups(valkey: Valkey) -> AsyncIterator[ValkeyWakeups]:
    made = ValkeyWakeups(valkey)
    yield made
    await made.close()


async def test_what_is_appended_is_read_in_order(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    assert (await buffer.claim(request.generation_id, 1)).entries == []
    assert await buffer.append(request.generation_id, 1, deltas(1, "a", "b")) == 2
    assert await buffer.append(request.generation_id, 1, deltas(3, "ế")) == 3
    found = await buffer.entries(request.generation_id)
    assert [(entry.seq, entry.kind, entry.token_ids) for entry in found] == [
        (1, EventKind.DELTA, [10]),
        (2, EventKind.DELTA, [20]),
        (3, EventKind.DELTA, [30]),
    ]
    assert [frames.data_of(frame) for frame in await buffer.frames(request.generation_id, 1)] == [
        {"text": "b"},
        {"text": "ế"},
    ]


async def test_a_repeated_append_writes_nothing_twice_and_a_hole_nothing_at_all(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.append(request.generation_id, 1, deltas(1, "a", "b"))
    assert await buffer.append(request.generation_id, 1, deltas(1, "a", "b", "c")) == 3
    assert await buffer.append(request.generation_id, 1, deltas(6, "f")) == 3
    assert len(await buffer.entries(request.generation_id)) == 3


async def test_a_later_attempt_fences_the_earlier_one(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.append(request.generation_id, 1, deltas(1, "a"))
    claim = await buffer.claim(request.generation_id, 2)
    assert claim.request == request and [entry.token_ids for entry in claim.entries] == [[10]]
    with pytest.raises(Fenced):
        await buffer.append(request.generation_id, 1, deltas(2, "zombie"))
    with pytest.raises(Fenced):
        await buffer.claim(request.generation_id, 1)
    with pytest.raises(Fenced):
        await buffer.seal(request.generation_id, 1, outcome())
    assert await buffer.append(request.generation_id, 2, deltas(2, "b")) == 2


async def test_the_first_seal_stays_and_ends_appending(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.append(request.generation_id, 1, deltas(1, "a"))
    assert await buffer.seal(request.generation_id, 1, outcome("first")) == outcome("first")
    assert await buffer.seal(request.generation_id, None, outcome("second")) == outcome("first")
    with pytest.raises(Fenced):
        await buffer.append(request.generation_id, 1, deltas(2, "late"))
    assert (await buffer.claim(request.generation_id, 2)).sealed_outcome == outcome("first")


async def test_the_last_event_is_published_once_and_starts_the_resume_window(
    buffer: ValkeyTokenBuffer, valkey: Valkey
) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.seal(request.generation_id, None, outcome())
    frame = frames.durable(1, EventKind.DONE, {})
    for _ in range(3):
        await buffer.publish_last(request.generation_id, frame)
    assert await buffer.frames(request.generation_id, 0) == [frame]
    live = await buffer.live(request.generation_id)
    assert live is not None and live.ended and live.sealed and live.last_seq == 1
    for key in (GenerationKeys(request.generation_id).events, GenerationKeys(request.generation_id).state):
        left = await valkey.command("TTL", key)
        assert 0 < left <= BUFFER_TTL_SECONDS


async def test_a_takeover_fences_whoever_had_it(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.seal(request.generation_id, None, outcome())
    with pytest.raises(Fenced):
        await buffer.append(request.generation_id, 1, deltas(1, "a"))


async def test_a_sealed_generation_may_be_claimed_by_whoever_finds_it(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    await buffer.seal(request.generation_id, None, outcome())  # by a process that then died
    assert (await buffer.claim(request.generation_id, 1)).sealed_outcome == outcome()


async def test_nothing_is_published_as_last_before_the_seal(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    with pytest.raises(Fenced):
        await buffer.publish_last(request.generation_id, frames.durable(1, EventKind.DONE, {}))


async def test_a_claim_reads_the_longest_reply_whole(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    for first in range(1, 1201, 300):
        await buffer.append(request.generation_id, 1, deltas(first, *["x"] * 300))
    assert [entry.seq for entry in (await buffer.claim(request.generation_id, 2)).entries] == list(range(1, 1201))


async def test_a_cancel_is_seen_by_every_later_claim(buffer: ValkeyTokenBuffer) -> None:
    request = a_request()
    assert await buffer.request_cancel(request.generation_id) is None
    await buffer.open(request)
    state = await buffer.request_cancel(request.generation_id)
    assert state is not None and state.cancel_requested
    assert (await buffer.claim(request.generation_id, 1)).state.cancel_requested


async def test_a_lost_buffer_is_made_again_from_the_first_event(buffer: ValkeyTokenBuffer, valkey: Valkey) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    entries = deltas(1, "a", "b", "c")
    await buffer.append(request.generation_id, 1, entries[:2], request)
    at = GenerationKeys(request.generation_id)
    await valkey.command("DEL", at.events, at.state, at.request)
    assert await buffer.append(request.generation_id, 1, entries[2:], request) == 0
    assert await buffer.append(request.generation_id, 1, entries, request) == 3
    claim = await buffer.claim(request.generation_id, 2)
    assert len(claim.entries) == 3 and claim.request == request


async def test_an_unknown_generation_is_said_so(buffer: ValkeyTokenBuffer) -> None:
    with pytest.raises(UnknownGeneration):
        await buffer.claim("gen_nothing", 1)
    with pytest.raises(UnknownGeneration):
        await buffer.seal("gen_nothing", None, outcome())
    assert await buffer.live("gen_nothing") is None


async def test_followers_hear_every_event_as_it_is_appended(buffer: ValkeyTokenBuffer, wakeups: ValkeyWakeups) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    first, second = await wakeups.subscribe(request.generation_id), await wakeups.subscribe(request.generation_id)
    await buffer.append(request.generation_id, 1, deltas(1, "a", "b"))
    for follower in (first, second):
        assert [frames.seq_of(await follower.next(2) or b"") for _ in range(2)] == [1, 2]
    await first.close()
    await buffer.append(request.generation_id, 1, deltas(3, "c"))
    assert frames.seq_of(await second.next(2) or b"") == 3
    assert await second.next(0.01) is None
    await second.close()


async def test_a_follower_that_does_not_keep_up_is_told_to_read_the_stream(
    buffer: ValkeyTokenBuffer, wakeups: ValkeyWakeups
) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    slow, quick = await wakeups.subscribe(request.generation_id), await wakeups.subscribe(request.generation_id)
    for seq in range(1, QUEUE_FRAMES + 2):
        await buffer.append(request.generation_id, 1, deltas(seq, "x"))
        assert frames.seq_of(await quick.next(2) or b"") == seq
    assert await slow.next(2) is None
    assert len(await buffer.frames(request.generation_id, 0)) == QUEUE_FRAMES + 1


async def test_a_lost_subscription_connection_is_made_again(
    buffer: ValkeyTokenBuffer, wakeups: ValkeyWakeups, valkey: Valkey
) -> None:
    request = a_request()
    await buffer.open(request)
    await buffer.claim(request.generation_id, 1)
    follower = await wakeups.subscribe(request.generation_id)
    await valkey.command("CLIENT", "KILL", "TYPE", "pubsub")
    assert await asyncio.wait_for(follower.next(5), 5) is None
    seq = 0

    async def heard() -> bytes | None:
        nonlocal seq
        seq += 1
        await buffer.append(request.generation_id, 1, deltas(seq, "x"))
        return await follower.next(0.2)

    async with asyncio.timeout(10):
        while not await heard():
            pass
