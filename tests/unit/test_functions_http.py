"""What the Lambdas share: routes, the caller, errors of the domain as answers, figures."""

import base64
import json
from typing import Any

import pytest

from chat.errors import DailyQuotaExceeded, NotFound, Unavailable
from functions.common.http import Answer, Api, Request


def an_event(method: str = "GET", resource: str = "/v1/things/{id}", **more: Any) -> dict[str, Any]:
    return {
        "httpMethod": method,
        "resource": resource,
        "path": "/v1/things/7",
        "pathParameters": {"id": "7"},
        "queryStringParameters": None,
        "headers": {"Content-Type": "application/json"},
        "body": None,
        "isBase64Encoded": False,
        "requestContext": {"requestId": "gateway-1", "authorizer": {"userId": "ada"}},
    } | more


def call(api: Api, event: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    answer = api(event, None)
    assert answer["headers"]["X-Request-Id"]
    assert answer["headers"]["Content-Type"] == "application/json"
    return answer["statusCode"], json.loads(answer["body"] or "null"), answer["headers"]


def api_that(result: Any, **options: Any) -> Api:
    async def route(request: Request) -> Answer:
        if isinstance(result, Exception):
            raise result
        return Answer(200, {"user": request.user_id, "id": request.path["id"], "size": len(request.body)})

    return Api({("GET", "/v1/things/{id}"): route}, **options)


def test_a_route_gets_the_caller_and_the_parts() -> None:
    status, body, headers = call(api_that(None), an_event())
    assert (status, body, headers["X-Request-Id"]) == (200, {"user": "ada", "id": "7", "size": 0}, "gateway-1")


def test_a_body_may_come_in_base64() -> None:
    event = an_event(body=base64.b64encode(b"\xff\xfe").decode(), isBase64Encoded=True)
    assert call(api_that(None), event)[1]["size"] == 2
    assert call(api_that(None), an_event(body="%%%", isBase64Encoded=True))[0] == 400
    assert call(api_that(None), an_event(body="ế"))[1]["size"] == 3


def test_errors_of_the_domain_have_one_shape() -> None:
    status, body, _ = call(api_that(NotFound("There is no such thing.")), an_event())
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body, headers = call(api_that(Unavailable("Away.", retry_after_seconds=1.2)), an_event())
    assert (status, body["error"]["retryAfterSeconds"], headers["Retry-After"]) == (503, 2, "2")
    _, _, headers = call(api_that(DailyQuotaExceeded("Used up.", retry_after_seconds=60)), an_event())
    assert headers["x-should-retry"] == "false"


def test_a_fault_tells_nothing_of_the_inside() -> None:
    status, body, _ = call(api_that(RuntimeError("secret of the inside")), an_event())
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


def test_unknown_routes_methods_and_callers() -> None:
    assert call(api_that(None), an_event(resource="/v1/nothing"))[0] == 404
    assert call(api_that(None), an_event("PUT"))[0] == 405
    assert call(api_that(None), an_event(requestContext={}))[0] == 401
    assert call(api_that(None, public=True), an_event(requestContext={}))[0] == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("mine-1", True), ("x" * 129, False), ("a b", False), ("é", False), ("\r\nSet-Cookie: a", False)],
)
def test_a_sane_request_id_of_the_caller_is_kept(given: str, kept: bool) -> None:
    _, _, headers = call(api_that(None), an_event(headers={"x-request-id": given}))
    assert headers["X-Request-Id"] == (given if kept else "gateway-1")


def test_each_request_leaves_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    call(api_that(Unavailable("Away.")), an_event())
    call(api_that(None), an_event(resource="/v1/nothing"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "_aws" in line]
    assert [line["route"] for line in lines] == ["GET /v1/things/{id}", "unknown"]
    assert [(line["Faults"], line["Refusals"]) for line in lines] == [([1.0], [0.0]), ([0.0], [1.0])]
    assert all(line["Latency"][0] >= 0 for line in lines)
