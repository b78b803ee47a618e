"""The provider engine against a small server on the loopback interface that says what each test scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from chat.adapters.engines.openai import OpenAIEngine
from chat.errors import EngineFailed
from chat.model import ChatMessage, FinishReason, GenerationRequest, Role
from chat.ports import EngineOutput

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Provider:
    """Answers one scripted reply after another; notes the bodies and whether the client left early."""

    def __init__(self) -> None:
        self.script: Script = chunks("hello")
        self.bodies: list[dict[str, Any]] = []
        self.headers = ""
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers = head.lower()
        length = int(self.headers.split("content-length: ")[1].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        watching = asyncio.create_task(self._watch(reader))
        try:
            await self.script(writer)
            await writer.drain()
        except ConnectionError:
            self.left.set()
        finally:
            watching.cancel()
            writer.close()

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        await reader.read()
        self.left.set()


def head(status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" % status


def event(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}, ensure_ascii=False).encode() + b"\n\n"


USAGE = {"prompt_tokens": 11, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"


def raw(*parts: bytes, status: int = 200) -> Script:
    async def run(writer: asyncio.StreamWriter) -> None:
        writer.write(head(status))
        for part in parts:
            writer.write(part)
            await writer.drain()

    return run


def chunks(*texts: str, finish: str = "stop") -> Script:
    return raw(b": comment\n\n", *(event(text) for text in texts), event(finish=finish), LAST)


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    server = await asyncio.start_server(made, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    yield made
    server.close()


@pytest_asyncio.fixture
async def engine(provider: Provider) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine(f"http://127.0.0.1:{provider.port}/v1/", "key", "some-model", 4, 1000)  # type: ignore[attr-defined]
    await made.start()
    yield made
    await made.stop()


def request(max_tokens: int = 100) -> GenerationRequest:
    messages = [ChatMessage(Role.SYSTEM, "Be kind."), ChatMessage(Role.USER, "Hi")]
    return GenerationRequest("gen", "ada", "conv", "msg", 2, "plus", "small", "m", messages, max_tokens, 9, 0.5, 0)


async def collect(engine: OpenAIEngine, saved: Sequence[int] = (), max_tokens: int = 100) -> list[EngineOutput]:
    return [output async for output in engine.generate(request(max_tokens), 1, saved)]


def text_of(engine: OpenAIEngine, outputs: list[EngineOutput]) -> str:
    detokenizer = engine.detokenizer()
    return "".join(detokenizer.feed(output.token_ids) for output in outputs) + detokenizer.flush()


async def test_text_usage_and_what_was_asked(engine: OpenAIEngine, provider: Provider) -> None:
    provider.script = chunks("Xin ", "chào 👋🏽", "\u2028 line\x85", " end")
    outputs = await collect(engine)
    assert text_of(engine, outputs) == "Xin chào 👋🏽\u2028 line\x85 end"
    last = outputs[-1]
    assert (last.finish_reason, last.prompt_tokens, last.output_tokens, last.cached_tokens) == ("stop", 11, 4, 6)
    assert provider.bodies[0] == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "authorization: bearer key" in provider.headers
    assert provider.headers.startswith("post /v1/chat/completions ")
    assert engine.status().running == 0


async def test_length(engine: OpenAIEngine, provider: Provider) -> None:
    provider.script = chunks("cut", finish="length")
    assert (await collect(engine))[-1].finish_reason is FinishReason.LENGTH


async def test_events_cut_anywhere(engine: OpenAIEngine, provider: Provider) -> None:
    whole = event("Việt 👩‍👩‍👧") + event("x", finish="stop") + LAST
    provider.script = raw(*(whole[at : at + 1] for at in range(len(whole))))
    outputs = await collect(engine)
    assert text_of(engine, outputs) == "Việt 👩‍👩‍👧x"
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "script",
    [
        raw(event("half")),
        raw(event("half"), b"data: [DONE]\n\n"),
        raw(event("half"), b'data: {"error": {"message": "boom"}}\n\n'),
        raw(event("half"), b"data: {not json\n\n"),
        raw(event("half"), b"data: 7\n\n"),
        raw(b"{}", status=500),
        raw(b"{}", status=429),
    ],
    ids=["closed", "done without a finish", "error event", "no json", "no object", "500", "429"],
)
async def test_a_broken_upstream_is_a_failure_not_an_end(
    engine: OpenAIEngine, provider: Provider, script: Script
) -> None:
    provider.script = script
    seen = []
    with pytest.raises(EngineFailed):
        async for output in engine.generate(request(), 1, []):
            seen.append(output)
    assert not any(output.finish_reason for output in seen)
    assert engine.status().running == 0


async def test_nobody_there(engine: OpenAIEngine) -> None:
    other = OpenAIEngine("http://127.0.0.1:1", "", "m", 1, 1)
    await other.start()
    with pytest.raises(EngineFailed):
        await collect(other)
    await other.stop()


@pytest.mark.parametrize("when", ["before the head", "before the text", "in the text"])
async def test_a_stop_closes_the_connection(engine: OpenAIEngine, provider: Provider, when: str) -> None:
    async def stalling(writer: asyncio.StreamWriter) -> None:
        if when != "before the head":
            writer.write(head())
        if when == "in the text":
            writer.write(event("some"))
        await writer.drain()
        await provider.left.wait()

    provider.script = stalling
    reading = asyncio.create_task(collect(engine))
    while not provider.bodies:
        await asyncio.sleep(0.001)
    if when == "in the text":
        await asyncio.sleep(0.05)
    await engine.abort("gen", 1)
    outputs = await asyncio.wait_for(reading, 2)
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    await asyncio.wait_for(provider.left.wait(), 2)
    await engine.abort("gen", 1)


async def test_a_continuation_sends_the_saved_text_and_less_room(engine: OpenAIEngine, provider: Provider) -> None:
    provider.script = chunks("one two three four ")
    first = await collect(engine)
    saved = [token for output in first for token in output.token_ids]
    provider.script = chunks("five")
    await collect(engine, saved)
    body = provider.bodies[-1]
    assert body["messages"][-1] == {"role": "assistant", "content": "one two three four "}
    assert body["max_tokens"] == 100 - len("one two three four ") // 4
    assert (await collect(engine, saved, max_tokens=4))[-1].finish_reason is FinishReason.LENGTH
    assert len(provider.bodies) == 2


async def test_room_is_concurrency_times_context(engine: OpenAIEngine) -> None:
    assert engine.status().kv_capacity_tokens == 4000 and engine.status().healthy
