"""Between API Gateway's events and use cases: routes, bodies, and errors of the domain as answers."""

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aws_lambda_powertools import Logger

from chat.errors import ChatError, InternalError, InvalidRequest, MethodNotAllowed, NotFound, Unauthenticated
from chat.ids import new_id
from functions.common.loop import run

logger = Logger(service="api")


@dataclass(frozen=True)
class Request:
    """What a route gets."""

    user_id: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    content_type: str | None


@dataclass(frozen=True)
class Answer:
    """A status and anything that msgspec encodes; None is an empty body."""

    status: int
    data: Any = None


Route = Callable[[Request], Awaitable[Answer]]


class Api:
    """Routes by (method, resource), such as ("GET", "/v1/conversations/{conversationId}")."""

    def __init__(self, routes: Mapping[tuple[str, str], Route], *, public: bool = False) -> None:
        self._routes = dict(routes)
        self._public = public

    def __call__(self, event: dict[str, Any], context: Any) -> dict[str, Any]:
        """The Lambda handler: API Gateway's proxy event in, proxy answer out. Never raises."""
        headers = {name.lower(): value for name, value in (event.get("headers") or {}).items()}
        ident = _request_id(event, headers)
        try:
            route = self._route(event)
            answer = run(route(self._request(event, headers)))
            body = b"" if answer.data is None else msgspec.json.encode(answer.data)
            return _answer(answer.status, body, ident, {})
        except ChatError as error:
            return _answer(error.status, msgspec.json.encode(error.body()), ident, error.headers())
        except Exception:
            logger.exception("request failed", request_id=ident)
            error = InternalError("Something broke on our side; try again.")
            return _answer(error.status, msgspec.json.encode(error.body()), ident, {})

    def _route(self, event: dict[str, Any]) -> Route:
        method, resource = event.get("httpMethod", ""), event.get("resource", "")
        route = self._routes.get((method, resource))
        if route is not None:
            return route
        if any(known == resource for _, known in self._routes):
            raise MethodNotAllowed(f"{event.get('path')} does not take {method}.")
        raise NotFound("There is no such route.")

    def _request(self, event: dict[str, Any], headers: Mapping[str, str]) -> Request:
        authorizer = (event.get("requestContext") or {}).get("authorizer") or {}
        user_id = authorizer.get("userId") or ""
        if not user_id and not self._public:
            raise Unauthenticated("Send `Authorization: Bearer <token>`.")
        return Request(
            user_id=user_id,
            path=event.get("pathParameters") or {},
            query=event.get("queryStringParameters") or {},
            body=_body(event),
            content_type=headers.get("content-type"),
        )


def _body(event: dict[str, Any]) -> bytes:
    text = event.get("body") or ""
    if event.get("isBase64Encoded"):
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest("The body must be one JSON object in UTF-8.") from error
    return str(text).encode("utf-8", "surrogateescape")


def _request_id(event: dict[str, Any], headers: Mapping[str, str]) -> str:
    """The caller's id where it is sane, else API Gateway's."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= 128 and all(one.isascii() and (one.isalnum() or one in "-_.:=") for one in given):
        return given
    return (event.get("requestContext") or {}).get("requestId") or new_id("req")


def _answer(status: int, body: bytes, ident: str, headers: Mapping[str, str]) -> dict[str, Any]:
    head = {"Content-Type": "application/json", "X-Request-Id": ident, "Cache-Control": "no-store"} | dict(headers)
    return {"statusCode": status, "headers": head, "body": body.decode(), "isBase64Encoded": False}
