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
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from chat.errors import ChatError, InvalidRequest, MethodNotAllowed, NotFound, Unauthenticated, Unavailable
from containers.common.asgi import ClientGone, Json, Receive, Scope, Send, read_body, request_id
from containers.common.process import serving, stop_event
from stacks.local.pages import Pages
from stacks.local.sign_in import LocalIdentity, SignInError
from stacks.local.upstream import Connection, Headers, NotConnected, Pool, UpstreamError

logger = logging.getLogger(__name__)

STREAMING = re.compile(r"/v1/(conversations/[^/]+/messages(/[^/]+/regenerate)?|generations/[^/]+/stream)")
MOST_BODY_BYTES = 10 * 1024 * 1024
"""API Gateway's limit."""

GATEWAY_SECONDS = 29
"""API Gateway's limit for routes that do not stream."""

HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"}
NOT_FORWARDED = HOP_BY_HOP | {b"proxy-authorization", b"host", b"expect", b"content-length", b"x-request-id"}
NOT_FORWARDED_BACK = HOP_BY_HOP | {b"date", b"server"}


class Edge:
    """The ASGI application; where things are is read from the file that the applier wrote."""

    def __init__(self, local_dir: Path, web_root: Path) -> None:
        facts = json.loads((local_dir / "state" / "applied.json").read_text())
        self._local_dir, self._pages, self._pool = local_dir, Pages(web_root), Pool()
        self._gateway, self._gateway_path = _origin(facts["apiUrl"])
        self._streamers = [_origin(url)[0] for url in facts["streamers"]]
        self._turn = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        ident = request_id(scope)
        answer = Json(send, ident)
        path, method = str(scope["path"]), str(scope["method"])
        try:
            if STREAMING.fullmatch(path) and (method == "POST" or path.endswith("/stream")):
                await self._to_streamer(scope, receive, send, ident)
            elif path.startswith("/v1/") or path in ("/healthz", "/openapi.json"):
                await self._to_gateway(scope, receive, send, ident)
            elif path == "/local/sign-in":
                await answer.answer(200, {"token": await self._sign_in(scope, receive)})
            elif method not in ("GET", "HEAD"):
                raise MethodNotAllowed("Pages are only read.")
            else:
                await answer.raw(200, *self._pages.page(path))
        except ChatError as error:
            await answer.error(error)
        except ClientGone:
            pass

    async def _to_streamer(self, scope: Scope, receive: Receive, send: Send, ident: str) -> None:
        """To the next streamer that accepts the connection; the answer goes on part by part."""
        body = await read_body(scope, receive, MOST_BODY_BYTES)
        connection = await self._streamer()
        gone = asyncio.create_task(_gone(receive, connection))
        try:
            connection.send(_request(scope, connection.origin, "", body, ident))
            try:
                status, headers = await connection.head()
            except UpstreamError as error:
                if gone.done():
                    raise ClientGone from error
                raise _away(scope, error) from error
            await send({"type": "http.response.start", "status": status, "headers": _backward(headers, ident)})
            # When the streamer dies here, the answer stays without its end: the server closes the connection,
            # and the client sees that it was cut.
            with contextlib.suppress(UpstreamError):
                async for part in connection.body():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self._pool.give_back(connection)

    async def _streamer(self) -> Connection:
        first = next(self._turn)
        for place in range(len(self._streamers)):
            with contextlib.suppress(NotConnected):
                return await self._pool.connect(self._streamers[(first + place) % len(self._streamers)])
        raise Unavailable("The service does not answer; try again.")

    async def _to_gateway(self, scope: Scope, receive: Receive, send: Send, ident: str) -> None:
        body = await read_body(scope, receive, MOST_BODY_BYTES)
        try:
            async with asyncio.timeout(GATEWAY_SECONDS):
                status, headers, content = await self._ask_gateway(scope, body, ident)
        except (UpstreamError, TimeoutError) as error:
            raise _away(scope, error) from error
        if status >= 400 and b'"error"' not in content:
            raise _contract_error(status, content)
        await send({"type": "http.response.start", "status": status, "headers": _backward(headers, ident)})
        await send({"type": "http.response.body", "body": content})

    async def _ask_gateway(self, scope: Scope, body: bytes, ident: str) -> tuple[int, Headers, bytes]:
        connection = await self._pool.connect(self._gateway)
        try:
            connection.send(_request(scope, self._gateway, self._gateway_path, body, ident))
            status, headers = await connection.head()
            return status, headers, b"".join([part async for part in connection.body()])
        finally:
            self._pool.give_back(connection)

    async def _sign_in(self, scope: Scope, receive: Receive) -> str:
        """`POST {user, plan}`; for the page, on this machine only."""
        if scope["method"] != "POST":
            raise MethodNotAllowed("Send a POST.")
        try:
            body = json.loads(await read_body(scope, receive, 10_000))
            user, plan = str(body["user"]), str(body.get("plan", "free"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest("Send a JSON object with user and plan.") from error
        try:
            return await asyncio.to_thread(lambda: LocalIdentity(self._local_dir).sign_in(user, plan))
        except SignInError as error:
            raise InvalidRequest(str(error)) from error


async def _gone(receive: Receive, connection: Connection) -> None:
    """When the client leaves, break off behind as well."""
    while (await receive())["type"] != "http.disconnect":
        pass
    connection.close()


def _origin(url: str) -> tuple[tuple[str, int], str]:
    parts = urlsplit(url)
    return (parts.hostname or "127.0.0.1", parts.port or 80), parts.path


def _request(scope: Scope, origin: tuple[str, int], prefix: str, body: bytes, ident: str) -> bytes:
    """The request for what is behind: the same path, query, headers and body."""
    target = prefix.encode() + scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves the body out
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: %s:%d" % (origin[0].encode(), origin[1])]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in NOT_FORWARDED]
    lines.append(b"x-request-id: " + ident.encode())
    if body or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _backward(headers: Headers, ident: str) -> Headers:
    """The answer's headers for the client."""
    kept = [(name, value) for name, value in headers if name not in NOT_FORWARDED_BACK]
    if not any(name == b"x-request-id" for name, _ in kept):
        kept.append((b"x-request-id", ident.encode()))
    return kept


def _away(scope: Scope, error: Exception) -> ChatError:
    logger.warning("%s %s: %s", scope["method"], scope["path"], error)
    return Unavailable("The service does not answer; try again.")


def _contract_error(status: int, content: bytes) -> ChatError:
    """The gateway's own answers in the contract's shape, as its gateway responses are declared."""
    if status == 404 or b"issing Authentication" in content:
        return NotFound("There is no such route.")
    if status in (401, 403):
        return Unauthenticated("Send `Authorization: Bearer <token>`.")
    if status >= 500:
        return Unavailable("The service does not answer; try again.")
    return InvalidRequest("The request cannot be read.")


async def run(port: int, local_dir: Path, web_root: Path) -> None:
    """Serve until SIGTERM."""
    stopping = stop_event()
    async with serving(Edge(local_dir, web_root), "127.0.0.1", port, timeout_graceful_shutdown=1):
        await stopping.wait()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port of the origin")
    parser.add_argument("--local-dir", type=Path, required=True, help="state of the service")
    parser.add_argument("--web", type=Path, required=True, help="folder of the page")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(run(options.port, options.local_dir, options.web.resolve()))


if __name__ == "__main__":
    main(sys.argv[1:])
