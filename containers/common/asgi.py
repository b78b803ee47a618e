"""The little that our ASGI applications share: bodies with a limit, JSON answers, errors of the domain."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from chat.errors import ChatError, TooLarge
from chat.ids import new_id

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def request_id(scope: Scope) -> str:
    """The caller's X-Request-Id where it is sane, else a new one."""
    given = header(scope, b"x-request-id") or ""
    sane = 0 < len(given) <= 128 and all(one.isascii() and (one.isalnum() or one in "-_.:=") for one in given)
    return given if sane else new_id("req")


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body. Raises TooLarge, without reading on, and ClientGone."""
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > most_bytes:
        raise TooLarge(f"The body may have at most {most_bytes} bytes.")
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise TooLarge(f"The body may have at most {most_bytes} bytes.")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


class Json:
    """Answers of one request."""

    def __init__(self, send: Send, ident: str | None = None) -> None:
        self._send = send
        self._ident = ident or new_id("req")

    async def answer(self, status: int, data: object, headers: dict[str, str] | None = None) -> None:
        """A JSON body."""
        await self.raw(status, msgspec.json.encode(data), "application/json", headers)

    async def error(self, error: ChatError) -> None:
        """The error's own status, headers and body."""
        await self.answer(error.status, error.body(), error.headers())

    async def raw(self, status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> None:
        """Any body."""
        head = {"content-type": content_type, "content-length": str(len(body)), "x-request-id": self._ident}
        head |= {name.lower(): value for name, value in (headers or {}).items()}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": body})
