"""The OpenAPI document against the code that answers: routes, request bodies, error codes."""

import inspect
import json

import msgspec
import pytest
from openapi_spec_validator import validate

from chat import errors
from chat.errors import InvalidRequest
from chat.model import Conversation, Message, MessageStatus
from chat.requests import CreateConversationRequest, RegenerateRequest, RenameConversationRequest, SendRequest, decode
from infra.api.document import METHODS, RUNS_ON, load, operations, public

BODIES = {
    "SendMessage": SendRequest,
    "Regenerate": RegenerateRequest,
    "CreateConversation": CreateConversationRequest,
    "RenameConversation": RenameConversationRequest,
}
FUNCTIONS = ("conversations", "messages", "generations", "models", "meta")


def test_the_document_is_valid() -> None:
    validate(load())
    assert RUNS_ON not in json.dumps(public())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_answer_exactly_the_routes_that_name_them(name: str) -> None:
    handler = __import__(f"functions.{name}.handler", fromlist=["handler"]).handler
    documented = {(method.upper(), path) for path, method, one in operations(load()) if one[RUNS_ON] == name}
    assert set(handler._routes) == documented


def test_every_route_names_what_runs_it() -> None:
    known = {*FUNCTIONS, "streamer"}
    assert {operation[RUNS_ON] for _, _, operation in operations(load())} == known
    for path, item in load()["paths"].items():
        assert set(item) - {"parameters"} <= set(METHODS), path


@pytest.mark.parametrize(("schema", "kind"), BODIES.items())
def test_request_bodies_have_the_documented_fields(schema: str, kind: type[msgspec.Struct]) -> None:
    documented = load()["components"]["schemas"][schema]
    fields = {field.encode_name: field.required for field in msgspec.structs.fields(kind)}
    assert set(documented["properties"]) == set(fields)
    assert set(documented.get("required", [])) == {name for name, required in fields.items() if required}


@pytest.mark.parametrize(("schema", "kind"), [("Conversation", Conversation), ("Message", Message)])
def test_objects_have_the_documented_fields(schema: str, kind: type[msgspec.Struct]) -> None:
    documented = load()["components"]["schemas"][schema]["properties"]
    assert set(documented) == {field.encode_name for field in msgspec.structs.fields(kind)}


def test_bounds_are_those_of_the_document() -> None:
    properties = load()["components"]["schemas"]["SendMessage"]["properties"]
    longest = properties["content"]["maxLength"]
    body = {"content": "x" * longest, "clientMessageId": "a"}
    assert decode(json.dumps(body).encode(), SendRequest, "application/json").content == body["content"]
    for wrong in ({"content": "x" * (longest + 1)}, {"content": ""}, {"clientMessageId": "a b"}, {"maxTokens": 0}):
        with pytest.raises(InvalidRequest) as caught:
            decode(json.dumps(body | wrong).encode(), SendRequest, "application/json")
        assert caught.value.param == next(iter(wrong))


def test_every_error_code_is_documented() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ChatError)]
    codes = {kind.code for kind in kinds}
    documented = load()["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert codes == set(documented)


def test_message_statuses_are_documented() -> None:
    documented = load()["components"]["schemas"]["Message"]["properties"]["status"]["enum"]
    assert set(documented) == set(MessageStatus)
