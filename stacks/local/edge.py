"""The local edge: one origin in the place of CloudFront and API Gateway's streaming.

Streaming routes go to a streamer, everything else of the API to the emulated API Gateway, the rest is the web page.
The emulator buffers its answers and has no gateway responses, hence the two things that are done here.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import mimetypes
import re
import signal
import sys
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from chat.ids import new_id
from stacks.local.sign_in import LocalIdentity, SignInError

logger = logging.getLogger(__name__)

STREAMING = re.compile(r"/v1/(conversations/[^/]+/messages(/[^/]+/regenerate)?|generations/[^/]+/stream)")
MOST_BODY_BYTES = 10 * 1024 * 1024
"""API Gateway's limit."""

mimetypes.add_type("text/javascript", ".js")  # where the machine's own table is older
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "proxy-authorization",
    "host",
}
NOT_FORWARDED_BACK = HOP_BY_HOP | {"content-length", "content-encoding", "date", "server"}
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Edge:
    """The handlers; `routes` is read from the file that the supervisor writes."""

    def __init__(self, local_dir: Path, web_root: Path) -> None:
        self._local_dir, self._web_root = local_dir, web_root
        facts = json.loads((local_dir / "state" / "applied.json").read_text())
        self._api_url: str = facts["apiUrl"]
        self._streamers: list[str] = facts["streamers"]
        self._turn = itertools.count()
        self._client: aiohttp.ClientSession | None = None

    async def start(self, app: web.Application) -> None:
        """Open the connection pool to what is behind."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def stop(self, app: web.Application) -> None:
        """Close it."""
        if self._client is not None:
            await self._client.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Route a request."""
        path = request.path
        ident = request.headers.get("X-Request-Id") or new_id("req")
        streams = STREAMING.fullmatch(path) and (request.method == "POST" or path.endswith("/stream"))
        try:
            if streams:
                return await self._to_streamer(request, ident)
            if path.startswith("/v1/") or path in ("/healthz", "/openapi.json"):
                return await self._to_gateway(request, ident)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, "invalid_request_error", "too_large", "The body is too large.", ident)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("%s %s: %s", request.method, path, error)
            message = "The service does not answer; try again."
            return refusal(503, "api_error", "unavailable", message, ident, {"Retry-After": "2"})
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "invalid_request_error", "method_not_allowed", "Pages are read only.", ident)
        return self._page(path, ident)

    async def _to_streamer(self, request: web.Request, ident: str) -> web.StreamResponse:
        """To the next streamer that accepts the connection."""
        body = await request.read() if request.can_read_body else None
        first = next(self._turn)
        for place in range(len(self._streamers)):
            origin = self._streamers[(first + place) % len(self._streamers)]
            try:
                return await self._forward(request, origin + request.path_qs, body, ident)
            except aiohttp.ClientConnectorError:
                if place + 1 == len(self._streamers):
                    raise
        raise AssertionError("there is no streamer")

    async def _to_gateway(self, request: web.Request, ident: str) -> web.StreamResponse:
        assert self._client is not None  # noqa: S101 - started before it serves
        body = await request.read() if request.can_read_body else None
        async with self._client.request(
            request.method,
            self._api_url + request.path_qs,
            data=body,
            headers=forwarded(request, ident),
            timeout=aiohttp.ClientTimeout(total=29),
        ) as answer:
            content = await answer.read()
            if answer.status in (401, 403) and b'"error"' not in content:
                message = "Send `Authorization: Bearer <token>`."
                if request.method in ("GET", "POST", "PATCH", "DELETE") and b"issing Authentication" not in content:
                    return refusal(401, "authentication_error", "unauthenticated", message, ident)
                return refusal(404, "invalid_request_error", "not_found", "There is no such route.", ident)
            if answer.status == 404 and b'"error"' not in content:
                return refusal(404, "invalid_request_error", "not_found", "There is no such route.", ident)
            if answer.status >= 500 and b'"error"' not in content:
                message = "The service does not answer; try again."
                return refusal(503, "api_error", "unavailable", message, ident, {"Retry-After": "2"})
            headers = backward(answer)
            headers.setdefault("X-Request-Id", ident)
            return web.Response(status=answer.status, body=content, headers=headers)

    async def _forward(self, request: web.Request, url: str, body: bytes | None, ident: str) -> web.StreamResponse:
        """Pass an answer on as it arrives; the client's end is passed back at once."""
        assert self._client is not None  # noqa: S101 - started before it serves
        async with self._client.request(request.method, url, data=body, headers=forwarded(request, ident)) as answer:
            response = web.StreamResponse(status=answer.status, headers=backward(answer))
            await response.prepare(request)
            with contextlib.suppress(ConnectionResetError):
                try:
                    async for part in answer.content.iter_any():
                        await response.write(part)
                    await response.write_eof()
                except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
                    # The streamer died: end the client's connection as hard, so that it resumes.
                    if request.transport is not None:
                        request.transport.abort()
            return response

    def _page(self, path: str, ident: str) -> web.StreamResponse:
        if path == "/config.json":
            return web.json_response({"auth": {"kind": "local"}, "apiBase": ""}, headers=SECURITY)
        file = self._file(path)
        if file is None:
            return refusal(404, "invalid_request_error", "not_found", "There is no such page.", ident)
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return web.FileResponse(file, headers=SECURITY | {"Content-Type": kind})

    def _file(self, path: str) -> Path | None:
        """The file behind a path, which may say anything."""
        with contextlib.suppress(ValueError, OSError):
            file = (self._web_root / path.lstrip("/")).resolve()
            if file.is_dir():
                file /= "index.html"
            if file.is_relative_to(self._web_root) and file.is_file():
                return file
        return None

    async def sign_in(self, request: web.Request) -> web.Response:
        """`POST /local/sign-in {user, plan}` answers `{token}`; for the page, on this machine only."""
        try:
            body = await request.json()
            user, plan = str(body["user"]), str(body.get("plan", "free"))
            token = await asyncio.to_thread(lambda: LocalIdentity(self._local_dir).sign_in(user, plan))
        except SignInError as error:
            return refusal(400, "invalid_request_error", "invalid_request", str(error), new_id("req"))
        except (ValueError, KeyError, TypeError, AttributeError):
            message = "Send a JSON object with user and plan."
            return refusal(400, "invalid_request_error", "invalid_request", message, new_id("req"))
        return web.json_response({"token": token})


def forwarded(request: web.Request, ident: str) -> dict[str, str]:
    """The request's headers for what is behind."""
    left_out = HOP_BY_HOP | {"content-length", "x-request-id"}
    headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
    return headers | {"X-Request-Id": ident}


def backward(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """The answer's headers for the client."""
    return {name: value for name, value in answer.headers.items() if name.lower() not in NOT_FORWARDED_BACK}


def refusal(
    status: int, kind: str, code: str, message: str, ident: str, headers: dict[str, str] | None = None
) -> web.Response:
    """An error in the contract's shape, as API Gateway's own responses are declared."""
    error: dict[str, object] = {"type": kind, "code": code, "message": message}
    if headers and "Retry-After" in headers:
        error["retryAfterSeconds"] = int(headers["Retry-After"])
    body = {"error": error}
    return web.json_response(body, status=status, headers={"X-Request-Id": ident} | (headers or {}))


async def serve(port: int, local_dir: Path, web_root: Path) -> None:
    """Serve until SIGTERM."""
    edge = Edge(local_dir, web_root)
    app = web.Application(client_max_size=MOST_BODY_BYTES)
    app.on_startup.append(edge.start)
    app.on_cleanup.append(edge.stop)
    app.router.add_post("/local/sign-in", edge.sign_in)
    app.router.add_route("*", "/{path:.*}", edge.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stopping = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stopping.set)
    await stopping.wait()
    await runner.cleanup()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port of the origin")
    parser.add_argument("--local-dir", type=Path, required=True, help="state of the service")
    parser.add_argument("--web", type=Path, required=True, help="folder of the page")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(serve(options.port, options.local_dir, options.web.resolve()))


if __name__ == "__main__":
    main(sys.argv[1:])
