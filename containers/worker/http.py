"""The replica's own server, by SageMaker's contract: `GET /ping`, `POST /invocations`; and `GET /metrics`."""

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from chat.adapters.tokenizer import ByteCounter
from chat.errors import ChatError, InvalidRequest, MethodNotAllowed, NotFound
from chat.ids import now_ms
from chat.model import ChatMessage, GenerationRequest
from chat.ports import Engine
from containers.common.asgi import Json, read_body
from containers.worker.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY_BYTES = 1_000_000


class Invocation(msgspec.Struct, frozen=True):
    """A direct call of the model, beside the queues; for smoke tests and benchmarks."""

    messages: list[ChatMessage]
    max_tokens: int = 64
    temperature: float = 0.7
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
                healthy = self._ready() and self._engine.status().healthy
                await json.answer(200 if healthy else 503, {"status": "ok" if healthy else "unhealthy"})
            elif route == ("GET", "/metrics"):
                await json.raw(200, self._metrics.text(), "text/plain; version=0.0.4")
            elif route == ("POST", "/invocations"):
                await self._invoke(await read_body(scope, receive, MOST_BODY_BYTES), send, json)
            elif scope["path"] in ("/ping", "/metrics", "/invocations"):
                raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
            else:
                raise NotFound("There is nothing here; see /ping, /invocations, /metrics.")
        except ChatError as error:
            await json.error(error)

    async def _invoke(self, body: bytes, send: Send, json: Json) -> None:
        try:
            call = msgspec.json.decode(body, type=Invocation)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidRequest(f"The body is not an invocation: {error}") from error
        request = GenerationRequest(
            generation_id=f"invocation-{secrets.token_hex(8)}",
            user_id="",
            conversation_id="",
            message_id="",
            reply_seq=0,
            plan="",
            pool=self._pool,
            model=self._model,
            messages=call.messages,
            max_tokens=max(1, call.max_tokens),
            prompt_tokens=ByteCounter().prompt(call.messages),
            temperature=call.temperature,
            created_at_ms=now_ms(),
        )
        if call.stream:
            head = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        text, count = "", 0
        detokenizer = self._engine.detokenizer()
        async for output in self._engine.generate(request, 1, []):
            piece = detokenizer.feed(output.token_ids)
            count += len(output.token_ids)
            text += piece
            if call.stream and piece:
                await send(_chunk({"text": piece}))
        if call.stream:
            await send(_chunk({"usage": {"outputTokens": count}}))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            await json.answer(200, {"text": text, "usage": {"outputTokens": count}})


def _chunk(data: object) -> dict[str, object]:
    body = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}
