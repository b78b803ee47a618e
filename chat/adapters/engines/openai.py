"""Any OpenAI-compatible server as an engine: a provider's API, or `vllm serve` elsewhere.

Providers answer text. It is carried as byte tokens (3 bytes of UTF-8 each), so that the buffer holds what a
continuation needs; usage is the provider's own count where it gives one. A continuation after a crash sends the
saved text as the beginning of the assistant's message: servers that do not continue a last assistant message
may phrase the rest anew, but what the user has seen stays.
"""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from chat.adapters.engines.detokenizer import ByteDetokenizer, bytes_of, token_of
from chat.adapters.tokenizer import TOKEN_BYTES
from chat.errors import EngineFailed
from chat.model import FinishReason, GenerationRequest
from chat.ports import EngineOutput, EngineStatus

TIMEOUT = httpx.Timeout(10.0, read=120.0)


class OpenAIEngine:
    """Implements `chat.ports.Engine`. Room is counted as if each of `concurrency` requests had a whole context."""

    def __init__(self, base_url: str, api_key: str, model: str, concurrency: int, context_tokens: int) -> None:
        self._base_url, self._api_key, self._model = base_url.rstrip("/"), api_key, model
        self._capacity = concurrency * context_tokens
        self._client: httpx.AsyncClient | None = None
        self._active: dict[str, bool] = {}
        self._responses: dict[str, httpx.Response] = {}

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
        if self._client is None:
            raise EngineFailed("The engine is not started.")
        name = f"{request.generation_id}/{attempt}"
        self._active[name] = True
        try:
            async with self._client.stream(
                "POST", f"{self._base_url}/chat/completions", json=self._body(request, saved_token_ids)
            ) as response:
                self._responses[name] = response
                if response.status_code != 200:
                    await response.aread()
                    raise EngineFailed(f"The model provider answered {response.status_code}.")
                async for output in self._outputs(response):
                    if not self._active.get(name):
                        break
                    yield output
                    if output.finish_reason is not None:
                        return
            if self._active.get(name):
                raise EngineFailed("The model provider ended the reply too early.")
            yield EngineOutput([], FinishReason.CANCELLED)
        except httpx.HTTPError as error:
            if self._active.get(name):
                raise EngineFailed("The model provider broke the connection.") from error
            yield EngineOutput([], FinishReason.CANCELLED)
        finally:
            self._active.pop(name, None)
            self._responses.pop(name, None)

    def _body(self, request: GenerationRequest, saved_token_ids: Sequence[int]) -> dict[str, Any]:
        messages = [{"role": str(message.role), "content": message.content} for message in request.messages]
        saved = b"".join(bytes_of(token) for token in saved_token_ids).decode("utf-8", "ignore")
        if saved:
            messages.append({"role": "assistant", "content": saved})
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @staticmethod
    async def _outputs(response: httpx.Response) -> AsyncIterator[EngineOutput]:
        """The server's events; the finish waits for the usage that follows it."""
        finish: FinishReason | None = None
        usage: dict[str, int] = {}
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
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
                prompt_tokens=usage.get("prompt_tokens"),
                output_tokens=usage.get("completion_tokens"),
            )

    async def abort(self, generation_id: str, attempt: int) -> None:
        """See Engine.abort. Closes the connection, which ends the work at most servers."""
        name = f"{generation_id}/{attempt}"
        if name in self._active:
            self._active[name] = False
            if name in self._responses:
                await self._responses[name].aclose()

    def status(self) -> EngineStatus:
        """See Engine.status."""
        return EngineStatus(self._capacity, len(self._active), 0, 0.0, self._client is not None)


def _tokens(text: str) -> list[int]:
    raw = text.encode("utf-8", "replace")
    return [token_of(raw[start : start + TOKEN_BYTES]) for start in range(0, len(raw), TOKEN_BYTES)]
