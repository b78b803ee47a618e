"""The streamer's HTTP: routes to use cases, and streams to sockets. A plain ASGI application, no framework."""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from chat import frames, tracing
from chat.errors import ChatError, InternalError, MethodNotAllowed, NotFound, Unauthenticated, Unavailable
from chat.ports import TokenVerifier
from chat.requests import MAX_BODY_BYTES, RegenerateRequest, SendRequest, decode, sequence_number
from chat.usecases.follow_stream import Followed, Follower, FollowStream
from chat.usecases.regenerate import Regenerate
from chat.usecases.send_message import SendMessage, StartedGeneration
from containers.common.asgi import ClientGone, Json, Receive, Scope, Send, header, read_body, request_id
from containers.streamer.streams import OpenStreams

logger = logging.getLogger(__name__)

_SEND = re.compile(r"/v1/conversations/([^/]+)/messages")
_REGENERATE = re.compile(r"/v1/conversations/([^/]+)/messages/([^/]+)/regenerate")
_STREAM = re.compile(r"/v1/generations/([^/]+)/stream")

DRAIN_RETRY_MS = (50, 1500)
"""A drained client comes back after a random time in this range, so that not all come at once."""


@dataclass(frozen=True)
class UseCases:
    """What the routes call."""

    send: SendMessage
    regenerate: Regenerate
    follow: FollowStream
    verifier: TokenVerifier


class Connection:
    """One request: its ASGI callables and what was read of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.request_id = request_id(scope)
        self.json = Json(send, self.request_id)
        self.streaming = False
        self.received_us = tracing.clock_us()


class StreamerHttp:
    """The ASGI application."""

    def __init__(self, use_cases: UseCases, streams: OpenStreams, heartbeat_seconds: float, most_streams: int) -> None:
        self._use_cases, self._streams = use_cases, streams
        self._heartbeat_seconds, self._most_streams = heartbeat_seconds, most_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = Connection(scope, receive, send)
        self._streams.requests += 1
        try:
            await self._route(connection)
        except ClientGone:
            pass
        except ChatError as error:
            await self._refuse(connection, error)
        except Exception:
            logger.exception("request %s failed", connection.request_id)
            await self._refuse(connection, InternalError("Something broke on our side; try again."))
        finally:
            self._streams.requests -= 1

    async def _refuse(self, connection: Connection, error: ChatError) -> None:
        """Before the stream began: a JSON error. After: just end it, the client resumes."""
        if connection.streaming:
            logger.warning("request %s: the stream ended early: %s", connection.request_id, error.message)
            await connection.send({"type": "http.response.body", "body": b""})
        else:
            await connection.json.error(error)

    async def _route(self, connection: Connection) -> None:
        method, path = connection.scope["method"], connection.scope["path"]
        if path == "/healthz":
            status = 503 if self._streams.draining else 200
            await connection.json.answer(status, {"status": "draining" if status == 503 else "ok"})
            return
        routes: list[tuple[re.Pattern[str], str, Callable[..., Awaitable[None]]]] = [
            (_SEND, "POST", self._send),
            (_REGENERATE, "POST", self._regenerate),
            (_STREAM, "GET", self._stream),
        ]
        for pattern, allowed, handler in routes:
            if match := pattern.fullmatch(path):
                if method != allowed:
                    raise MethodNotAllowed(f"{path} takes {allowed}.")
                if self._streams.draining or len(self._streams) >= self._most_streams:
                    raise Unavailable("This server takes no new streams; try again.", retry_after_seconds=1)
                await handler(connection, *match.groups())
                return
        raise NotFound("There is no such route.")

    async def _user(self, connection: Connection) -> str:
        scheme, _, token = (header(connection.scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("Send `Authorization: Bearer <token>`.")
        return (await self._use_cases.verifier.verify(token.strip())).user_id

    async def _send(self, connection: Connection, conversation_id: str) -> None:
        user_id = await self._user(connection)
        body = await read_body(connection.scope, connection.receive, MAX_BODY_BYTES)
        request = decode(body, SendRequest, header(connection.scope, b"content-type"))
        started = await self._use_cases.send(user_id, conversation_id, request)
        await self._answer_with(connection, user_id, started)

    async def _regenerate(self, connection: Connection, conversation_id: str, seq: str) -> None:
        user_id = await self._user(connection)
        body = await read_body(connection.scope, connection.receive, MAX_BODY_BYTES)
        request = decode(body, RegenerateRequest, header(connection.scope, b"content-type"))
        number = sequence_number(seq)
        if number is None:
            raise NotFound("There is no such message; its number is a whole number.")
        started = await self._use_cases.regenerate(user_id, conversation_id, number, request)
        await self._answer_with(connection, user_id, started)

    async def _answer_with(self, connection: Connection, user_id: str, started: StartedGeneration) -> None:
        tracing.mark(started.generation_id, "received", connection.received_us)
        if started.attached:
            followed = await self._use_cases.follow.permit(user_id, started.generation_id, None)
        else:
            followed = Followed(started.generation_id, started.pool, 0, None)
        await self._follow(connection, followed)

    async def _stream(self, connection: Connection, generation_id: str) -> None:
        user_id = await self._user(connection)
        last = header(connection.scope, b"last-event-id")
        if last is None:
            query = parse_qs(connection.scope["query_string"].decode("latin-1"), keep_blank_values=True)
            last = query.get("lastEventId", [None])[0]
        followed = await self._use_cases.follow.permit(user_id, generation_id, last)
        await self._follow(connection, followed)

    async def _follow(self, connection: Connection, followed: Followed) -> None:
        await self._begin(connection, followed.generation_id)
        first = True

        async def emit(data: bytes) -> None:
            nonlocal first
            await connection.send({"type": "http.response.body", "body": data, "more_body": True})
            if first and b"event: delta" in data:
                first = False
                tracing.mark(followed.generation_id, "forwarded")

        def emit_now(data: bytes) -> bool:
            # The first delta goes the long way, where it is traced.
            return not first and _sent_at_once(connection.send, data)

        follower = Follower(followed, emit, self._heartbeat_seconds, emit_now)
        self._streams.add(follower)
        watcher = asyncio.create_task(_until_gone(connection.receive))
        work = asyncio.current_task()
        watcher.add_done_callback(lambda done: work.cancel() if work and not done.cancelled() else None)
        try:
            await self._use_cases.follow.follow(follower)
            if follower.closing:
                await emit(b"retry: %d\n\n" % random.randint(*DRAIN_RETRY_MS))
        except asyncio.CancelledError:
            if not watcher.done() and not follower.closing:
                raise
            return  # the client is gone, or does not read and was cut off by a drain
        finally:
            self._streams.remove(follower)
            watcher.cancel()
        await connection.send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _begin(connection: Connection, generation_id: str) -> None:
        """Headers and the first bytes at once, so that proxies see a living stream."""
        headers = {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache, no-transform",
            b"x-accel-buffering": b"no",
            b"x-generation-id": generation_id.encode(),
            b"x-request-id": connection.request_id.encode(),
        }
        connection.streaming = True
        await connection.send({"type": "http.response.start", "status": 200, "headers": list(headers.items())})
        await connection.send({"type": "http.response.body", "body": frames.RETRY, "more_body": True})


def _sent_at_once(send: Send, data: bytes) -> bool:
    """Send a part of the body unless that would wait for the client; then nothing is sent.

    The server's `send` waits only before it writes, and only while the client does not read. So one that does
    not end at its first step has written nothing, and may be dropped.
    """
    sending = send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
    try:
        next(sending)
    except StopIteration:
        return True
    sending.close()  # type: ignore[attr-defined]
    return False


async def _until_gone(receive: Receive) -> None:
    message: dict[str, Any] = {}
    with contextlib.suppress(asyncio.CancelledError):
        while message.get("type") != "http.disconnect":
            message = dict(await receive())
        return
    raise asyncio.CancelledError
