"""The replica's own server, by SageMaker's contract: `GET /ping`, `POST /invocations`; and `GET /metrics`."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from chat.adapters.tokenizer import ByteCounter
from chat.errors import ChatError, EngineFailed, InvalidRequest, MethodNotAllowed, NotFound
from chat.ids import now_ms
from chat.model import ChatMessage, FinishReason, GenerationRequest
from chat.ports import Engine
from containers.common.asgi import ClientGone, Json, Receive, Scope, Send, read_body
from containers.worker.metrics import Metrics

logger = logging.getLogger(__name__)

MOST_BODY_BYTES = 1_000_000


class Invocation(msgspec.Struct, frozen=True):
    """A direct call of the model, beside the queues; for smoke tests and benchmarks."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.7
    stream: bool = False


class WorkerHttp:
    """An ASGI application."""

    def __init__(self, engine: Engine, metrics: Metrics, model: str, pool: str, ready: Callable[[], bool]) -> None:
        self._engine, self._metrics, self._ready = engine, metrics, ready
        self._model, self._pool = model, pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        json = Json(send)
        try:
            route = (scope["method"], scope["path"])
            if route in (("GET", "/ping"), ("GET", "/healthz")):
                healthy = self._ready()
                await json.answer(200 if healthy else 503, {"status": "ok" if healthy else "unhealthy"})
            elif route == ("GET", "/metrics"):
                await json.raw(200, self._metrics.text(), "text/plain; version=0.0.4")
            elif route == ("POST", "/invocations"):
                request, stream = self._request(await read_body(scope, receive, MOST_BODY_BYTES))
                await _while_connected(receive, self._invoke(request, stream, send, json))
            elif scope["path"] in ("/ping", "/metrics", "/invocations"):
                raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
            else:
                raise NotFound("There is nothing here; see /ping, /invocations, /metrics.")
        except ClientGone:
            return
        except ChatError as error:
            await json.error(error)

    def _request(self, body: bytes) -> tuple[GenerationRequest, bool]:
        try:
            call = msgspec.json.decode(body, type=Invocation)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidRequest(f"The body is not an invocation: {error}") from error
        return GenerationRequest(
            generation_id=f"invocation-{secrets.token_hex(8)}",
            user_id="",
            conversation_id="",
            message_id="",
            reply_seq=0,
            plan="",
            pool=self._pool,
            model=self._model,
            messages=call.messages,
            max_tokens=call.max_tokens,
            prompt_tokens=ByteCounter().prompt(call.messages),
            temperature=call.temperature,
            created_at_ms=now_ms(),
        ), call.stream

    async def _invoke(self, request: GenerationRequest, stream: bool, send: Send, json: Json) -> None:
        answer = _Stream(send) if stream else _Whole(json)
        detokenizer, usage = self._engine.detokenizer(), {"inputTokens": request.prompt_tokens, "outputTokens": 0}
        finish = FinishReason.ERROR
        try:
            async for output in self._engine.generate(request, 1, []):
                await answer.text(detokenizer.feed(output.token_ids))
                usage["outputTokens"] += len(output.token_ids)
                if output.prompt_tokens is not None:
                    usage["inputTokens"] = output.prompt_tokens
                if output.output_tokens is not None:
                    usage["outputTokens"] = output.output_tokens
                finish = output.finish_reason or finish
            await answer.text(detokenizer.flush())
        except ChatError as error:
            await answer.fail(error)
        except Exception:
            logger.exception("invocation failed")
            await answer.fail(EngineFailed("The model engine failed."))
        else:
            await answer.end({"finishReason": finish, "usage": usage})


class _Whole:
    """One JSON answer at the end."""

    def __init__(self, json: Json) -> None:
        self._json, self._parts = json, list[str]()

    async def text(self, piece: str) -> None:
        self._parts.append(piece)

    async def end(self, summary: dict[str, Any]) -> None:
        await self._json.answer(200, {"text": "".join(self._parts)} | summary)

    async def fail(self, error: ChatError) -> None:
        await self._json.error(error)


class _Stream:
    """Server-sent events: `{text}` for each piece, the summary, then `[DONE]`; a failure is an `{error}`."""

    def __init__(self, send: Send) -> None:
        self._send, self._begun = send, False

    async def text(self, piece: str) -> None:
        if piece:
            await self._event(msgspec.json.encode({"text": piece}))

    async def end(self, summary: dict[str, Any]) -> None:
        await self._event(msgspec.json.encode(summary))
        await self._event(b"[DONE]", more=False)

    async def fail(self, error: ChatError) -> None:
        await self._event(msgspec.json.encode(error.body()), more=False)

    async def _event(self, data: bytes, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})


async def _while_connected(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """Answer; a client that leaves ends the generation, so that it does not fill the batch for nobody."""
    work = asyncio.create_task(answering)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
