"""The OpenAPI document: as clients read it, and as API Gateway is provisioned from it."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

RUNS_ON = "x-chat-runs-on"
STREAMER = "streamer"
STAGE = "live"
METHODS = ("get", "post", "put", "patch", "delete")
STREAM_TIMEOUT_MS = 900_000
"""API Gateway's most for response streaming: 15 minutes."""

FUNCTION_TIMEOUT_MS = 29_000
AUTHORIZER_CACHE_SECONDS = 300
RETRY_AFTER_SECONDS = 2

_ERRORS = {
    "UNAUTHORIZED": (401, "authentication_error", "unauthenticated", "Send `Authorization: Bearer <token>`."),
    "ACCESS_DENIED": (401, "authentication_error", "unauthenticated", "The token is not valid here."),
    "MISSING_AUTHENTICATION_TOKEN": (404, "invalid_request_error", "not_found", "There is no such route."),
    "RESOURCE_NOT_FOUND": (404, "invalid_request_error", "not_found", "There is no such route."),
    "BAD_REQUEST_BODY": (400, "invalid_request_error", "invalid_request", "The body is not as documented."),
    "BAD_REQUEST_PARAMETERS": (400, "invalid_request_error", "invalid_request", "A parameter is not as documented."),
    "REQUEST_TOO_LARGE": (413, "invalid_request_error", "too_large", "The body is too large."),
    "UNSUPPORTED_MEDIA_TYPE": (415, "invalid_request_error", "unsupported_media_type", "Send application/json."),
    "THROTTLED": (429, "rate_limit_error", "overloaded", "Too many requests; slow down."),
    "DEFAULT_5XX": (503, "api_error", "unavailable", "The service does not answer; try again."),
}


def load() -> dict[str, Any]:
    """The document as it is written."""
    document: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "openapi.yaml").read_text())
    return document


def public() -> dict[str, Any]:
    """As clients read it: without what only the deployment needs."""
    document = load()
    for _, _, operation in operations(document):
        operation.pop(RUNS_ON, None)
    return document


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, method, operation) of every route."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, method, item[method]


def render(region: str, function_arns: Mapping[str, str], streamer_url: str, link: str, target: str) -> str:
    """The document with API Gateway's extensions, as JSON. Raises KeyError for a route that nothing runs."""
    document = _importable(load())
    for path, method, operation in operations(document):
        runs_on = operation.pop(RUNS_ON)
        if runs_on == STREAMER:
            operation["x-amazon-apigateway-integration"] = _stream(path, method, streamer_url, link, target)
        else:
            operation["x-amazon-apigateway-integration"] = _function(region, function_arns[runs_on])
    bearer = document["components"]["securitySchemes"]["bearer"]
    bearer.clear()
    bearer |= {
        "type": "apiKey",
        "name": "Authorization",
        "in": "header",
        "x-amazon-apigateway-authtype": "custom",
        "x-amazon-apigateway-authorizer": {
            "type": "token",
            "authorizerUri": _invocation(region, function_arns["authorizer"]),
            "authorizerResultTtlInSeconds": AUTHORIZER_CACHE_SECONDS,
            "identityValidationExpression": "^[Bb]earer .+$",
        },
    }
    document["x-amazon-apigateway-request-validators"] = {"body": {"validateRequestBody": True}}
    document["x-amazon-apigateway-request-validator"] = "body"
    document["x-amazon-apigateway-gateway-responses"] = {
        kind: _gateway_response(*error) for kind, error in _ERRORS.items()
    }
    return json.dumps(document, sort_keys=True)


def _importable(document: dict[str, Any]) -> dict[str, Any]:
    """In the subset of OpenAPI that API Gateway's importer honours.

    It ignores security and parameters that are declared above an operation, and its models (JSON Schema draft 4)
    know neither `nullable` nor a `default` response. Answers are proxied, so it needs no description of them.
    """
    components = document["components"]
    for path, item in document["paths"].items():
        shared = item.pop("parameters", [])
        for method in METHODS:
            if method in item:
                operation = item[method]
                operation.setdefault("security", document["security"])
                declared = [*shared, *operation.get("parameters", [])]
                operation["parameters"] = [_parameter(components, one) for one in declared]
                operation["responses"] = {"200": {"description": f"From {path}"}}
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for _, _, operation in operations(document)
        if "requestBody" in operation
    }
    document["components"] = {
        "schemas": {name: components["schemas"][name] for name in sorted(bodies)},
        "securitySchemes": components["securitySchemes"],
    }
    del document["security"], document["servers"]
    return document


def _parameter(components: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    found = components["parameters"][declared["$ref"].rpartition("/")[2]] if "$ref" in declared else declared
    return copy.deepcopy(dict(found))


def _invocation(region: str, function_arn: str) -> str:
    return f"arn:aws:apigateway:{region}:lambda:path/2015-03-31/functions/{function_arn}/invocations"


def _function(region: str, arn: str) -> dict[str, Any]:
    return {
        "type": "aws_proxy",
        "httpMethod": "POST",
        "uri": _invocation(region, arn),
        "timeoutInMillis": FUNCTION_TIMEOUT_MS,
        "passthroughBehavior": "when_no_match",
    }


def _stream(path: str, method: str, url: str, link: str, target: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return {
        "type": "http_proxy",
        "httpMethod": method.upper(),
        "uri": f"{url}{path}",
        "connectionType": "VPC_LINK",
        "connectionId": link,
        "integrationTarget": target,
        "responseTransferMode": "STREAM",
        "timeoutInMillis": STREAM_TIMEOUT_MS,
        "requestParameters": {f"integration.request.path.{name}": f"method.request.path.{name}" for name in names},
    }


def _gateway_response(status: int, kind: str, code: str, message: str) -> dict[str, Any]:
    error: dict[str, Any] = {"type": kind, "code": code, "message": message}
    parameters = {"gatewayresponse.header.X-Request-Id": "context.requestId"}
    if status in (429, 503):
        error["retryAfterSeconds"] = RETRY_AFTER_SECONDS
        parameters["gatewayresponse.header.Retry-After"] = f"'{RETRY_AFTER_SECONDS}'"
    return {
        "statusCode": status,
        "responseParameters": parameters,
        "responseTemplates": {"application/json": json.dumps({"error": error})},
    }
