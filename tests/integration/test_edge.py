"""The local edge in front of stub streamers and a stub gateway."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from stacks.local.backends import ROOT, free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Stub:
    """A server whose behaviour a test sets; it remembers what it was asked."""

    port: int = field(default_factory=free_port)
    handler: Handler | None = None
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name.lower(): value for name, value in request.headers.items()}
            assert len(headers) == len(request.headers)  # none twice
            self.asked.append((request.method, request.raw_path, headers, body))
            if self.handler is not None:
                return await self.handler(request)
            return web.json_response({"from": self.port}, headers={"X-Request-Id": request.headers["X-Request-Id"]})

        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None


@dataclass
class World:
    """The edge and what is behind it."""

    url: str
    port: int
    streamers: list[Stub]
    gateway: Stub
    client: aiohttp.ClientSession


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    streamers, gateway, port = [Stub(), Stub()], Stub(), free_port()
    pages = tmp_path / "web"
    (pages / "js").mkdir(parents=True)
    (pages / "index.html").write_text("<!doctype html><title>chat</title>")
    (pages / "js" / "main.js").write_text("export {};")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "state").mkdir()
    facts = {
        "apiUrl": f"http://127.0.0.1:{gateway.port}/stage",
        "streamers": [f"http://127.0.0.1:{one.port}" for one in streamers],
        "awsUrl": f"http://127.0.0.1:{gateway.port}",
        "userPoolId": "pool",
        "audience": "client",
        "accountsTable": "accounts",
    }
    (tmp_path / "state" / "applied.json").write_text(json.dumps(facts))
    argv = ["-m", "stacks.local.edge", "--port", str(port), "--local-dir", str(tmp_path), "--web", str(pages)]
    edge = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT)
    for one in [*streamers, gateway]:
        await one.start()
    async with aiohttp.ClientSession() as client:
        for _ in range(400):
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"http://127.0.0.1:{port}/config.json"):
                    break
            await asyncio.sleep(0.05)
        yield World(f"http://127.0.0.1:{port}", port, streamers, gateway, client)
    edge.terminate()
    await asyncio.wait_for(edge.wait(), 10)
    for one in [*streamers, gateway]:
        await one.stop()


SEND = "/v1/conversations/conv_1/messages"
FOLLOW = "/v1/generations/gen_1/stream"


def streaming(parts: asyncio.Queue[bytes | None], ended: asyncio.Event | None = None) -> Handler:
    """Answers with the parts of the queue as they come, until None."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Generation-Id": "gen_1"})
        await response.prepare(request)
        try:
            while (part := await parts.get()) is not None:
                await response.write(part)
        finally:
            if ended is not None:
                ended.set()
        return response

    return handle


@pytest.mark.parametrize(
    ("method", "path", "streams"),
    [
        ("POST", SEND, True),
        ("GET", SEND, False),
        ("POST", SEND + "/3/regenerate", True),
        ("GET", FOLLOW, True),
        ("GET", FOLLOW + "?lastEventId=3", True),
        ("GET", "/v1/generations/gen_1", False),
        ("POST", "/v1/generations/gen_1/cancel", False),
        ("DELETE", "/v1/conversations/conv_1", False),
        ("PATCH", "/v1/conversations/conv_1", False),
        ("GET", "/v1/conversations?cursor=a%2Bb%3D&limit=2", False),
        ("GET", "/v1/conversations/a%2Fb%20c", False),
        ("GET", "/healthz", False),
        ("GET", "/openapi.json", False),
    ],
)
async def test_routes_and_what_is_passed_on(world: World, method: str, path: str, streams: bool) -> None:
    headers = {"authorization": "Bearer t", "last-event-id": "7", "x-request-id": "req_mine"}
    body = b'{"content": "\xe1\xba\xbf"}' if method in ("POST", "PATCH") else None
    from yarl import URL

    url = URL(world.url + path, encoded=True)
    async with world.client.request(method, url, data=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "req_mine"
    (asked,) = [one for stub in world.streamers for one in stub.asked] if streams else world.gateway.asked
    assert asked[:2] == (method, path if streams else "/stage" + path)
    assert asked[3] == (body or b"")
    assert headers.items() <= asked[2].items()


async def test_requests_get_an_id(world: World) -> None:
    for path in ("/v1/models", FOLLOW):
        async with world.client.get(world.url + path) as response:
            assert response.headers["X-Request-Id"].startswith("req_")


async def test_parts_arrive_as_they_are_sent(world: World) -> None:
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()
    for stub in world.streamers:
        stub.handler = streaming(parts)
    async with world.client.post(world.url + SEND, json={}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Generation-Id"] == "gen_1"
        for part in (b"retry: 1000\n\n", b"id: 1\ndata: {}\n\n", "data: ế\n\n".encode()):
            parts.put_nowait(part)
            assert await asyncio.wait_for(response.content.readany(), 5) == part
        parts.put_nowait(None)
        assert await asyncio.wait_for(response.content.read(), 5) == b""


async def test_a_client_that_leaves_is_noticed_behind(world: World) -> None:
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()
    ended = asyncio.Event()
    for stub in world.streamers:
        stub.handler = streaming(parts, ended)
    parts.put_nowait(b": hello\n\n")
    async with world.client.post(world.url + SEND, json={}) as response:
        await response.content.readany()
        response.close()
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_slow_client_slows_what_is_behind(world: World) -> None:
    """Megabytes do not pile up in the edge while nobody reads them."""
    sent = 0

    async def pours(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(640):
            await response.write(b"x" * 100_000)
            sent += 100_000
        return response

    for stub in world.streamers:
        stub.handler = pours
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=2**16)
    writer.write(f"GET {FOLLOW} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    before = -1
    while sent == 0 or sent != before:  # until nothing moves any more
        before = sent
        await asyncio.sleep(0.5)
    assert sent < 32_000_000
    received = 0
    while received < 64_000_000:
        received += len(await asyncio.wait_for(reader.read(2**20), 10))
    writer.close()


async def test_a_streamer_that_is_away_is_passed_over(world: World) -> None:
    await world.streamers[0].stop()
    for _ in range(6):
        async with world.client.post(world.url + SEND, json={}) as response:
            assert response.status == 200
    assert len(world.streamers[1].asked) == 6


@pytest.mark.parametrize("path", [FOLLOW, "/v1/models"])
async def test_connections_are_kept(world: World, path: str) -> None:
    peers = set()

    async def answers(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    for stub in [*world.streamers, world.gateway]:
        stub.handler = answers
    for _ in range(8):
        async with world.client.get(world.url + path) as response:
            assert response.status == 200
    assert len(peers) <= 2


async def test_streamers_take_turns(world: World) -> None:
    for _ in range(6):
        async with world.client.get(world.url + FOLLOW) as response:
            assert response.status == 200
    assert [len(one.asked) for one in world.streamers] == [3, 3]


@pytest.mark.parametrize("path", [FOLLOW, "/v1/models"])
async def test_nobody_behind_is_a_503(world: World, path: str) -> None:
    for one in [*world.streamers, world.gateway]:
        await one.stop()
    async with world.client.get(world.url + path) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["X-Request-Id"]
        assert (await response.json())["error"]["code"] == "unavailable"


async def test_a_broken_stream_does_not_look_like_its_end(world: World) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"id: 1\ndata: {}\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    for stub in world.streamers:
        stub.handler = breaks
    with pytest.raises(aiohttp.ClientError):
        async with world.client.get(world.url + FOLLOW) as response:
            await asyncio.wait_for(response.content.read(), 5)


async def test_a_streamer_that_breaks_before_it_answers_is_a_503(world: World) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    for stub in world.streamers:
        stub.handler = breaks
    async with world.client.post(world.url + SEND, json={}) as response:
        assert response.status == 503
    assert sum(len(one.asked) for one in world.streamers) == 1  # a send is not tried twice


@pytest.mark.parametrize(
    ("status", "body", "expected", "code"),
    [
        (401, {"message": "Unauthorized"}, 401, "unauthenticated"),
        (403, {"Message": "User is not authorized"}, 401, "unauthenticated"),
        (403, {"message": "Missing Authentication Token"}, 404, "not_found"),
        (404, {"message": "Not Found"}, 404, "not_found"),
        (502, {"message": "Internal server error"}, 503, "unavailable"),
        (404, {"error": {"code": "not_found", "message": "own"}}, 404, "not_found"),
        (503, {"error": {"code": "unavailable", "message": "own"}}, 503, "unavailable"),
    ],
)
async def test_the_gateways_own_answers_have_the_contracts_shape(
    world: World, status: int, body: dict, expected: int, code: str
) -> None:
    async def answers(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    world.gateway.handler = answers
    async with world.client.get(world.url + "/v1/models") as response:
        assert response.status == expected
        assert response.headers["X-Request-Id"]
        error = (await response.json())["error"]
        assert error["code"] == code and error["message"]


@pytest.mark.parametrize("path", [SEND, "/v1/conversations"])
async def test_a_body_over_the_gateways_limit_is_a_413(world: World, path: str) -> None:
    async with world.client.post(world.url + path, data=b"x" * (10 * 1024 * 1024 + 1)) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "too_large"


async def test_a_chunked_body_arrives_whole(world: World) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 70_000

    async with world.client.post(world.url + "/v1/conversations", data=parts()) as response:
        assert response.status == 200
    assert world.gateway.asked[0][3] == b"x" * 210_000


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/", "text/html", "<!doctype html><title>chat</title>"),
        ("/index.html", "text/html", "<!doctype html><title>chat</title>"),
        ("/js/main.js", "text/javascript", "export {};"),
        ("/config.json", "application/json", '{"auth": {"kind": "local"}, "apiBase": ""}'),
    ],
)
async def test_the_page(world: World, path: str, kind: str, text: str) -> None:
    async with world.client.get(world.url + path) as response:
        assert response.status == 200
        assert response.content_type == kind
        assert response.headers["Cache-Control"] == "no-cache"
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert await response.text() == text


@pytest.mark.parametrize(
    "target", ["/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/js/%00", "/js/..%2f..%2fsecret.txt", "/js"]
)
async def test_nothing_outside_the_page_is_served(world: World, target: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.split()[1] in (b"404", b"400"), answer
    assert b"secret" not in answer and b"root:" not in answer


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"user": "a b"}', b'{"user": "ada", "plan": "gold"}'])
async def test_a_bad_sign_in_says_what_is_wrong(world: World, body: bytes) -> None:
    async with world.client.post(world.url + "/local/sign-in", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_request"


async def test_heads_and_other_methods(world: World) -> None:
    for path in ("/", "/healthz"):
        async with world.client.head(world.url + path) as response:
            assert response.status == 200 and await response.read() == b""
    async with world.client.post(world.url + "/") as response:
        assert response.status == 405
