"""A service of the contract in one thread and in memory, which misbehaves on demand: for what the page must survive.

It serves the real page. Replies are written word by word; `Faults` says what goes wrong.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

WEB = Path(__file__).resolve().parents[3] / "web"
REPLY = "Slowly **but** surely, crème brûlée 🍮 arrives; \u1ec7 and 👩🏽‍🚀 too. " * 6


@dataclass
class Faults:
    """What goes wrong; each is used up as it happens. Times are in seconds."""

    lose_send_answers: int = 0
    """Sends that are saved and then cut before the answer's first byte."""
    drop_after: list[int] = field(default_factory=list)
    """For each next stream: cut the connection after this many events, in the middle of a frame."""
    refuse_sends: list[tuple[int, str, int]] = field(default_factory=list)
    """For each next send: status, code, Retry-After."""
    away: int = 0
    """Requests of history and lists that are answered 503."""
    fail_at: int | None = None
    """The next generation breaks at this event."""
    queued: int = 0
    """Places in the queue that are told before the start."""
    pause: float = 0.01
    """Between events."""


@dataclass
class Generation:
    """A reply being made: its frames so far, and who waits for more."""

    ident: str
    conversation: str
    message: dict[str, Any]
    frames: list[bytes] = field(default_factory=list)
    over: bool = False
    cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeService:
    """The handlers and what they keep."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.reply = REPLY
        self.conversations: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, list[dict[str, Any]]] = {}
        self.generations: dict[str, Generation] = {}
        self.claims: dict[tuple[str, str], str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path and Last-Event-ID of each request of a stream."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self._open: set[asyncio.Transport] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/config.json", self.config)
        app.router.add_post("/local/sign-in", self.sign_in)
        app.router.add_route("*", "/v1/conversations", self.many)
        app.router.add_route("*", "/v1/conversations/{id}", self.one)
        app.router.add_get("/v1/conversations/{id}/messages", self.history)
        app.router.add_post("/v1/conversations/{id}/messages", self.send)
        app.router.add_post("/v1/conversations/{id}/messages/{seq}/regenerate", self.regenerate)
        app.router.add_get("/v1/generations/{id}/stream", self.follow)
        app.router.add_post("/v1/generations/{id}/cancel", self.cancel)
        app.router.add_get("/", self.index)
        app.router.add_static("/", WEB)
        return app

    async def index(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(WEB / "index.html")

    async def config(self, request: web.Request) -> web.Response:
        return web.json_response({"auth": {"kind": "local"}, "apiBase": ""})

    async def sign_in(self, request: web.Request) -> web.Response:
        return web.json_response({"token": (await request.json())["user"]})

    async def many(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == "Bearer expired":
            return refusal(401, "unauthenticated", 0)
        if request.method == "POST":
            return web.json_response(self.new_conversation((await request.json()).get("title")), status=201)
        if self.faults.away:
            self.faults.away -= 1
            return refusal(503, "unavailable", 1)
        newest = sorted(self.conversations.values(), key=lambda one: str(one["updatedAt"]), reverse=True)
        start, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 30))
        following = str(start + limit) if start + limit < len(newest) else None
        return web.json_response({"data": newest[start : start + limit], "nextCursor": following})

    def new_conversation(self, title: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        ident, time = f"conv_{number}", f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000Z"
        made = {"conversationId": ident, "title": title, "model": None, "updatedAt": time, "lastSeq": 0}
        self.conversations[ident], self.messages[ident] = made, []
        return made

    async def one(self, request: web.Request) -> web.Response:
        conversation = self.conversations.get(request.match_info["id"])
        if conversation is None:
            return refusal(404, "not_found", 0)
        if request.method == "PATCH":
            conversation["title"] = (await request.json())["title"]
        if request.method == "DELETE":
            del self.conversations[conversation["conversationId"]]
            return web.Response(status=204)
        return web.json_response(conversation)

    async def history(self, request: web.Request) -> web.Response:
        if self.faults.away:
            self.faults.away -= 1
            return refusal(503, "unavailable", 1)
        if request.match_info["id"] not in self.conversations:
            return refusal(404, "not_found", 0)
        messages = self.messages[request.match_info["id"]]
        before, limit = int(request.query.get("before", 10**9)), int(request.query.get("limit", 30))
        older = [one for one in reversed(messages) if one["seq"] < before]
        page = older[:limit]
        return web.json_response({"data": page, "nextBefore": page[-1]["seq"] if len(older) > limit else None})

    def add(self, conversation: str, role: str, content: str, **more: Any) -> dict[str, Any]:
        """Append a message as saved."""
        messages = self.messages[conversation]
        message = {"messageId": f"msg_{next(self._numbers)}", "seq": len(messages) + 1, "role": role} | {
            "content": content,
            "status": "COMPLETED",
            "model": None,
            "parentId": messages[-1]["messageId"] if messages else None,
            "generationId": None,
            **more,
        }
        messages.append(message)
        return message

    async def send(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        body, conversation = await request.json(), request.match_info["id"]
        claim = (conversation, body["clientMessageId"])
        if claim not in self.claims:
            if self.faults.refuse_sends:
                return refusal(*self.faults.refuse_sends.pop(0))
            if running := self._running(conversation):
                return refusal(409, "conversation_busy", 0, generationId=running.ident)
            parent = self.add(conversation, "user", body["content"])
            self.claims[claim] = self._generate(conversation, str(parent["messageId"])).ident
        if self.faults.lose_send_answers:
            self.faults.lose_send_answers -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await self._stream(request, self.generations[self.claims[claim]], 0)

    async def regenerate(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        conversation, seq = request.match_info["id"], int(request.match_info["seq"])
        claim = (conversation, (await request.json())["clientMessageId"])
        if claim not in self.claims:
            parent = self.messages[conversation][seq - 1]["parentId"]
            self.claims[claim] = self._generate(conversation, parent).ident
        return await self._stream(request, self.generations[self.claims[claim]], 0)

    async def follow(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        after = int(request.headers.get("Last-Event-ID", 0))
        return await self._stream(request, self.generations[request.match_info["id"]], after)

    async def cancel(self, request: web.Request) -> web.Response:
        generation = self.generations[request.match_info["id"]]
        generation.cancelled = True
        return web.json_response({"generationId": generation.ident, "status": "RUNNING"}, status=202)

    def cut(self) -> None:
        """Break every open stream; for another thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(lambda: [transport.abort() for transport in list(self._open)])

    def _note(self, request: web.Request) -> None:
        self.requests.append((request.method, request.path, request.headers.get("Last-Event-ID")))

    def _running(self, conversation: str) -> Generation | None:
        mine = (one for one in self.generations.values() if one.conversation == conversation)
        return next((one for one in mine if not one.over), None)

    def _generate(self, conversation: str, parent: str) -> Generation:
        ident = f"gen_{next(self._numbers)}"
        empty = {"status": "STREAMING", "parentId": parent, "generationId": ident}
        generation = Generation(ident, conversation, self.add(conversation, "assistant", "", **empty))
        self.generations[ident] = generation
        task = asyncio.create_task(self._write(generation, self.faults.fail_at))
        self.faults.fail_at = None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _write(self, generation: Generation, fail_at: int | None) -> None:
        """Make the frames, one durable event after the other."""
        message = generation.message
        while self.faults.queued and not generation.cancelled:
            await asyncio.sleep(0.05)
        started = {"generationId": generation.ident, "messageId": message["messageId"], "seq": message["seq"]}
        if not self.faults.queued:
            self._push(generation, "started", started | {"model": "fake-1", "servedBy": "small", "degraded": True})
        text = ""
        for piece in self.reply.split(" "):
            await asyncio.sleep(self.faults.pause)
            if generation.cancelled or len(generation.frames) == fail_at:
                break
            text += piece + " "
            self._push(generation, "delta", {"text": piece + " "})
        status = "FAILED" if fail_at else "CANCELLED" if generation.cancelled else "COMPLETED"
        message.update(content=text, status=status, model="fake-1", usage={"inputTokens": 3, "outputTokens": 9})
        generation.over = True
        if fail_at:
            self._push(generation, "error", {"error": {"code": "engine_failed", "message": "The engine broke."}})
        else:
            self._push(generation, "done", {"status": status, "finishReason": "stop", "usage": message["usage"]})

    def _push(self, generation: Generation, kind: str, data: dict[str, Any]) -> None:
        seq, text = len(generation.frames) + 1, json.dumps(data, ensure_ascii=False)
        generation.frames.append(f"id: {seq}\r\nevent: {kind}\r\ndata: {text}\r\n\r\n".encode())
        generation.changed.set()
        generation.changed = asyncio.Event()

    async def _stream(self, request: web.Request, generation: Generation, sent: int) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "X-Generation-Id": generation.ident}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b"retry: 1000\n\n: keep-alive\n\n")
        assert request.transport is not None
        self._open.add(request.transport)
        drop = self.faults.drop_after.pop(0) if self.faults.drop_after else None
        with contextlib.suppress(ConnectionError):
            await self._tell_queue(response, generation)
            while not (generation.over and sent == len(generation.frames)):
                changed = generation.changed
                while sent < len(generation.frames):
                    frame = generation.frames[sent]
                    if drop == 0:
                        await response.write(frame[: len(frame) * 2 // 3])
                        request.transport.close()  # what was written arrives; the end of the body never does
                        return response
                    await response.write(frame)
                    sent += 1
                    drop = None if drop is None else drop - 1
                if not generation.over:
                    await changed.wait()
        return response

    async def _tell_queue(self, response: web.StreamResponse, generation: Generation) -> None:
        told = None
        while (place := self.faults.queued) and not generation.over:
            if place != told:
                data = {"generationId": generation.ident, "position": place, "estimatedWaitSeconds": place * 4}
                await response.write(f"event: queued\ndata: {json.dumps(data)}\n\n".encode())
                told = place
            await asyncio.sleep(0.02)


def refusal(status: int, code: str, retry_after: int, **more: Any) -> web.Response:
    """An error in the contract's shape."""
    error = {"type": "fake", "code": code, "message": f"Refused on purpose: {code}.", **more}
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    return web.json_response({"error": error}, status=status, headers=headers)


@contextlib.contextmanager
def running(service: FakeService) -> Iterator[str]:
    """Serve in a thread; gives the origin."""
    service.loop = loop = asyncio.new_event_loop()
    ready, origin = threading.Event(), []
    runner = web.AppRunner(service.app(), shutdown_timeout=0.1)

    async def begin() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        origin.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()

    def serve() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10), "the fake service did not start"
    try:
        yield origin[0]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
