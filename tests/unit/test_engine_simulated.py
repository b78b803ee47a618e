"""The scripted engine: what the acceptance checks rely on, and the timing of the reference replica."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from chat.adapters.engines.simulated import FIXED_REPLY, FIXED_SENTENCE, SimulatedEngine, script_of
from chat.adapters.tokenizer import render_plain
from chat.errors import EngineFailed
from chat.model import ChatMessage, FinishReason, GenerationRequest, Role
from chat.ports import EngineOutput

VIETNAMESE = "Xin chào 👋🏽 — tiếng Việt có dấu: ẵ ự ễ. "


def request(content: str, max_tokens: int = 2000, name: str = "gen") -> GenerationRequest:
    messages = [ChatMessage(Role.SYSTEM, "Be kind."), ChatMessage(Role.USER, content)]
    tokens = -(-len(render_plain(messages).encode()) // 3)
    return GenerationRequest(
        name, "ada", "conv", "msg", 2, "plus", "large", "large", messages, max_tokens, tokens, 0.7, 0
    )


def sim(**directive: object) -> str:
    return "/sim " + json.dumps(directive, ensure_ascii=False)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """Steps of a millisecond."""
    made = SimulatedEngine(100_000, 0.001, 0.0, 0.0)
    await made.start()
    yield made
    await made.stop()


async def collect(
    engine: SimulatedEngine, asked: GenerationRequest, saved: Sequence[int] = (), attempt: int = 1
) -> list[EngineOutput]:
    return [output async for output in engine.generate(asked, attempt, saved)]


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(engine: SimulatedEngine, ids: Sequence[int]) -> str:
    detokenizer = engine.detokenizer()
    return detokenizer.feed(ids) + detokenizer.flush()


async def test_defaults(engine: SimulatedEngine) -> None:
    outputs = await collect(engine, request("/sim {}"))
    ids = ids_of(outputs)
    assert (len(ids), outputs[-1].finish_reason) == (40, FinishReason.STOP)
    assert text_of(engine, ids) == (FIXED_SENTENCE * 3)[:120]


async def test_a_given_text_is_said_once_or_repeated(engine: SimulatedEngine) -> None:
    once = ids_of(await collect(engine, request(sim(text=VIETNAMESE, rate=100000))))
    assert len(once) == -(-len(VIETNAMESE.encode()) // 3)
    assert text_of(engine, once) == VIETNAMESE
    many = ids_of(await collect(engine, request(sim(text=VIETNAMESE, tokens=120, rate=100000))))
    assert len(many) == 120
    repeated = (VIETNAMESE * 20).encode()[:360].decode(errors="ignore")
    assert text_of(engine, many) == repeated


async def test_other_messages_get_the_fixed_reply(engine: SimulatedEngine) -> None:
    for content in ("Hello!", "tell me about /sim {}", ""):
        assert text_of(engine, ids_of(await collect(engine, request(content)))) == FIXED_REPLY


@pytest.mark.parametrize("malformed", ["/sim ", "/sim {", "/sim []", "/sim null"])
async def test_a_malformed_directive_directs_nothing(engine: SimulatedEngine, malformed: str) -> None:
    assert len(ids_of(await collect(engine, request(malformed)))) == 40


async def test_echo_is_the_prompt_as_it_arrived(engine: SimulatedEngine) -> None:
    asked = request(sim(echo="prompt", rate=100000))
    assert text_of(engine, ids_of(await collect(engine, asked))) == render_plain(asked.messages)


async def test_a_continuation_at_every_token_is_the_same(engine: SimulatedEngine) -> None:
    content = sim(text=VIETNAMESE, tokens=40, rate=100000, stall_before=0)
    whole = ids_of(await collect(engine, request(content)))
    for split in range(len(whole) + 1):
        outputs = await collect(engine, request(content), whole[:split], 2)
        assert whole[:split] + ids_of(outputs) == whole
        assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("cap", "reason"), [(9, "length"), (10, "stop"), (11, "stop")])
async def test_the_cap_ends_with_length(engine: SimulatedEngine, cap: int, reason: str) -> None:
    outputs = await collect(engine, request(sim(tokens=10), max_tokens=cap))
    assert (len(ids_of(outputs)), outputs[-1].finish_reason) == (min(cap, 10), reason)


async def test_it_fails_at_the_token_it_is_told(engine: SimulatedEngine) -> None:
    for fail_at in (0, 1, 7):
        seen: list[int] = []
        with pytest.raises(EngineFailed):
            async for output in engine.generate(request(sim(tokens=20, fail_at=fail_at)), 1, []):
                seen += output.token_ids
        assert len(seen) == fail_at
    assert engine.status().running == 0 and engine.status().healthy


async def test_a_quick_rate_gives_many_tokens_a_step(engine: SimulatedEngine) -> None:
    start = time.monotonic()
    assert len(ids_of(await collect(engine, request(sim(tokens=1500, rate=100000))))) == 1500
    assert time.monotonic() - start < 1


async def test_a_slow_rate_is_kept(engine: SimulatedEngine) -> None:
    start = time.monotonic()
    await collect(engine, request(sim(tokens=21, rate=50)))
    assert 0.38 <= time.monotonic() - start < 2


async def test_stalls(engine: SimulatedEngine) -> None:
    start, times = time.monotonic(), []
    async for output in engine.generate(request(sim(tokens=6, rate=1000, stall_before=0.2, stall_at=[3, 0.3])), 1, []):
        times += [time.monotonic() - start] * len(output.token_ids)
    assert times[0] >= 0.2
    assert times[3] - times[2] >= 0.29


async def test_the_batch_sets_the_pace() -> None:
    """Without a rate each step gives a token, and a step takes longer the more sequences run."""
    engine = SimulatedEngine(100_000, 0.0, 0.005, 0.0)
    await engine.start()
    start = time.monotonic()
    await collect(engine, request(sim(tokens=20)))
    alone = time.monotonic() - start
    start = time.monotonic()
    await asyncio.gather(*(collect(engine, request(sim(tokens=20), name=f"g{n}")) for n in range(8)))
    together = time.monotonic() - start
    await engine.stop()
    assert alone >= 0.09
    assert together >= 4 * alone


async def test_prefill_takes_its_time() -> None:
    engine = SimulatedEngine(100_000, 0.001, 0.0, 0.001)
    await engine.start()
    asked, start = request("x" * 900), time.monotonic()
    await anext(engine.generate(asked, 1, []))
    assert time.monotonic() - start >= asked.prompt_tokens * 0.001
    await engine.stop()


async def test_an_abort_frees_the_room_at_once(engine: SimulatedEngine) -> None:
    asked = request(sim(tokens=500, rate=50))
    reading = asyncio.create_task(collect(engine, asked))
    while not engine.status().kv_used_fraction:
        await asyncio.sleep(0)
    assert engine.status().kv_used_fraction == pytest.approx((asked.prompt_tokens + 500) / 100_000)
    await engine.abort("gen", 1)
    assert engine.status().kv_used_fraction == 0 and engine.status().running == 0
    outputs = await reading
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    await engine.abort("gen", 1)
    await engine.abort("unknown", 1)


async def test_a_reader_that_leaves_frees_the_room(engine: SimulatedEngine) -> None:
    outputs = engine.generate(request(sim(tokens=500, rate=50)), 1, [])
    await anext(outputs)
    await outputs.aclose()  # type: ignore[attr-defined]
    assert engine.status().running == 0


def test_lone_surrogates_and_empty_texts_make_a_script() -> None:
    assert script_of(request('/sim {"text": "\\ud800"}')).tokens == 1
    assert script_of(request('/sim {"text": ""}')).tokens == 1
