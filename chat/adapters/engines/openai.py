"""Any OpenAI-compatible server as an engine: a provider's API, or `vllm serve` elsewhere.

Providers answer text. It is carried as byte tokens (3 bytes of UTF-8 each), so that the buffer holds what a
continuation needs; usage is the provider's own count where it gives one. A continuation after a crash sends the
saved text as the beginning of the assistant's message: servers that do not continue a last assistant message
may phrase the rest anew, but what the user has seen stays.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from chat.adapters.engines.detokenizer import ByteDetokenizer, bytes_of, token_of
from chat.adapters.tokenizer import TOKEN_BYTES
from chat.errors import EngineFailed
from chat.model import FinishReason, GenerationRequest
from chat.ports import EngineOutput, EngineStatus

logger = logging.getLogger(__name__)

TIMEOUT = httpx.Timeout(10.0, read=120.0)

_CANCELLED = EngineOutput([], FinishReason.CANCELLED)


class OpenAIEngine:
    """Implements `chat.ports.Engine`. Room is counted as if each of `concurrency` requests had a whole context."""

    def __init__(self, base_url: str, api_key: str, model: str, concurrency: int, context_tokens: int) -> None:
        self._base_url, self._api_key, self._model = base_url.rstrip("/"), api_key, model
        self._capacity = concurrency * context_tokens
        self._client: httpx.AsyncClient | None = None
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Open the connection pool."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._client = httpx.AsyncClient(timeout=TIMEOUT, headers=headers)

    async def stop(self) -> None:
        """Close the connection pool."""
        if self._client is not None:
            await self._client.aclose()

    def detokenizer(self) -> ByteDetokenizer:
        """See Engine.detokenizer."""
        return ByteDetokenizer()

    async def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """See Engine.generate."""
        name = f"{request.generation_id}/{attempt}"
        outputs: asyncio.Queue[EngineOutput | EngineFailed] = asyncio.Queue()
        if _most_new_tokens(request, saved_token_ids) <= 0:
            yield EngineOutput([], FinishReason.LENGTH)
            return
        call = asyncio.create_task(self._call(self._body(request, saved_token_ids), outputs))
        call.add_done_callback(lambda ended: outputs.put_nowait(_CANCELLED) if ended.cancelled() else None)
        self._calls[name] = call
        try:
            while True:
                output = await outputs.get()
                if isinstance(output, EngineFailed):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._calls.pop(name, None)
            call.cancel()

    async def _call(self, body: dict[str, Any], outputs: "asyncio.Queue[EngineOutput | EngineFailed]") -> None:
        """Run one request; what it answers goes to `outputs`, at the end a finish or a failure."""
        if self._client is None:
            outputs.put_nowait(EngineFailed("The engine is not started."))
            return
        try:
            async with self._client.stream("POST", f"{self._base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise EngineFailed(f"The model provider answered {response.status_code}.")
                async for output in _outputs(response):
                    outputs.put_nowait(output)
                    if output.finish_reason is not None:
                        return
            raise EngineFailed("The model provider ended the reply too early.")
        except EngineFailed as failure:
            outputs.put_nowait(failure)
        except httpx.HTTPError:
            logger.warning("the connection to the model provider broke", exc_info=True)
            outputs.put_nowait(EngineFailed("The model provider broke the connection."))
        except Exception:
            logger.exception("the model provider's answer was not understood")
            outputs.put_nowait(EngineFailed("The model provider's answer was not understood."))

    def _body(self, request: GenerationRequest, saved_token_ids: Sequence[int]) -> dict[str, Any]:
        messages = [{"role": str(message.role), "content": message.content} for message in request.messages]
        saved = _text(saved_token_ids)
        if saved:
            messages.append({"role": "assistant", "content": saved})
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": _most_new_tokens(request, saved_token_ids),
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def abort(self, generation_id: str, attempt: int) -> None:
        """See Engine.abort. Closes the connection, which ends the work at most servers."""
        call = self._calls.get(f"{generation_id}/{attempt}")
        if call is not None:
            call.cancel()

    def status(self) -> EngineStatus:
        """See Engine.status."""
        return EngineStatus(self._capacity, len(self._calls), 0, 0.0, self._client is not None)


async def _outputs(response: httpx.Response) -> AsyncIterator[EngineOutput]:
    """The server's events; the finish waits for the usage that follows it."""
    finish: FinishReason | None = None
    usage: dict[str, Any] = {}
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineFailed("The model provider sent something that is no event.") from error
        if event.get("error"):
            raise EngineFailed("The model provider failed in the middle of the reply.")
        usage = event.get("usage") or usage
        for choice in event.get("choices", [])[:1]:
            if text := (choice.get("delta") or {}).get("content"):
                yield EngineOutput(_tokens(text))
            if reason := choice.get("finish_reason"):
                finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
    if finish is not None:
        yield EngineOutput(
            [],
            finish,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
        )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines as server-sent events have them; httpx also cuts at U+2028 and the like, which may stand in the JSON."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _tokens(text: str) -> list[int]:
    raw = text.encode("utf-8", "replace")
    return [token_of(raw[start : start + TOKEN_BYTES]) for start in range(0, len(raw), TOKEN_BYTES)]


def _text(token_ids: Sequence[int]) -> str:
    return b"".join(bytes_of(token) for token in token_ids).decode("utf-8", "ignore")


def _most_new_tokens(request: GenerationRequest, saved_token_ids: Sequence[int]) -> int:
    """What is left of the cap. Nobody counted the saved text with the provider's tokenizer; 4 bytes are about one."""
    return request.max_tokens - len(_text(saved_token_ids).encode()) // 4
