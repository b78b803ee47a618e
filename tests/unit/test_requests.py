"""Bodies and queries: whatever bytes come, a refusal of the contract, never anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.errors import ChatError, InvalidRequest, TooLarge, UnsupportedMediaType
from chat.requests import (
    MAX_BODY_BYTES,
    CreateConversationRequest,
    RegenerateRequest,
    RenameConversationRequest,
    SendRequest,
    decode,
    page_query,
    sequence_number,
)

JSON = "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "content"),
        (b'{"content": ""}', "content"),
        (b'{"content": 5, "clientMessageId": "a"}', "content"),
        (b'{"content": null, "clientMessageId": "a"}', "content"),
        (b'{"content": "x"}', "clientMessageId"),
        (b'{"content": "x", "clientMessageId": "a\\n"}', "clientMessageId"),
        (b'{"content": "x", "clientMessageId": ""}', "clientMessageId"),
        (b'{"content": "x", "clientMessageId": "' + b"a" * 129 + b'"}', "clientMessageId"),
        (b'{"content": "x", "clientMessageId": "a", "maxTokens": 0}', "maxTokens"),
        (b'{"content": "x", "clientMessageId": "a", "maxTokens": 1.5}', "maxTokens"),
        (b'{"content": "x", "clientMessageId": "a", "maxTokens": 1e400}', "maxTokens"),
        (b'{"content": "x", "clientMessageId": "a", "model": ""}', "model"),
        (b'{"content": "' + b"x" * 100_001 + b'", "clientMessageId": "a"}', "content"),
    ],
)
def test_the_field_is_named(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, SendRequest, JSON)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} must be ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"content": "\xff", "clientMessageId": "a"}',
        b'{"content": "\\ud800", "clientMessageId": "a"}',
        b'{"content": "\xed\xa0\x80", "clientMessageId": "a"}',
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b'{"content": "x", "clientMessageId": "a"} x',
    ],
)
@pytest.mark.parametrize("kind", [SendRequest, RegenerateRequest, RenameConversationRequest])
def test_odd_bytes_are_an_invalid_request(body: bytes, kind: type) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, kind, JSON)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        decode(body, CreateConversationRequest, JSON)
    except ChatError as error:
        assert error.status == 400


def test_every_character_of_json_is_kept() -> None:
    body = b'{"content": "a\\u0000b \\ud83d\\udc4b e\xcc\x81", "clientMessageId": "a", "unknown": {"x": [1]}}'
    assert decode(body, SendRequest, JSON).content == "a\0b 👋 e\u0301"


def test_the_longest_content_fits_however_it_is_escaped() -> None:
    body = b'{"content": "' + b"\\ud83d\\udc4b" * 100_000 + b'", "clientMessageId": "a", "model": "m"}'
    assert len(decode(body, SendRequest, JSON).content) == 100_000
    with pytest.raises(TooLarge):
        decode(b" " * (MAX_BODY_BYTES + 1), SendRequest, JSON)


def test_only_json_is_read() -> None:
    for other in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", "json"):
        with pytest.raises(UnsupportedMediaType):
            decode(b"{}", CreateConversationRequest, other)
    assert decode(b"{}", CreateConversationRequest, "Application/JSON") == CreateConversationRequest()
    assert decode(b"", CreateConversationRequest, None) == CreateConversationRequest()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "1.0"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"before": "0"}, "before"),
        ({"before": "-1"}, "before"),
        ({"before": "9" * 400}, "before"),
        ({"cursor": "a" * 3000}, "cursor"),
    ],
)
def test_a_bad_query_names_the_parameter(query: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page_query(query)
    assert caught.value.param == param


def test_a_page_has_a_size_of_its_own() -> None:
    assert page_query(None).limit == 20
    assert page_query({"limit": "100", "before": "7", "cursor": ""}).before == 7
    assert page_query({}, limit=5).limit == 5


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("007", 7), ("x", None), ("-1", None), ("²", None), ("9" * 10, None)]
)
def test_a_number_in_a_path(text: str, number: int | None) -> None:
    assert sequence_number(text) == number
