"""Request bodies and page queries: what is allowed, and refusals that name the field and say it."""

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from chat.errors import InvalidRequest, TooLarge, UnsupportedMediaType

MAX_BODY_BYTES = 1_310_720
"""The longest content, 100,000 characters, as JSON escapes of 12 bytes each, and the other fields."""

MAX_CONTENT_CHARACTERS = 100_000
MAX_TITLE_CHARACTERS = 200
MAX_PAGE = 100
DEFAULT_PAGE = 20
_MAX_CURSOR_CHARACTERS = 2000
_LARGEST_SEQ = 10**9

_Content = Annotated[str, Meta(min_length=1, max_length=MAX_CONTENT_CHARACTERS)]
_Title = Annotated[str, Meta(min_length=1, max_length=MAX_TITLE_CHARACTERS)]
_Model = Annotated[str, Meta(min_length=1, max_length=200)]
# `\Z`, since `$` would let a final line feed pass.
_ClientMessageId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9:_-]{1,128}\Z")]
_MaxTokens = Annotated[int, Meta(ge=1)]


class SendRequest(msgspec.Struct, frozen=True, rename="camel"):
    """`POST /v1/conversations/{id}/messages`."""

    content: _Content
    client_message_id: _ClientMessageId
    model: _Model | None = None
    max_tokens: _MaxTokens | None = None


class RegenerateRequest(msgspec.Struct, frozen=True, rename="camel"):
    """`POST /v1/conversations/{id}/messages/{seq}/regenerate`."""

    client_message_id: _ClientMessageId
    model: _Model | None = None


class CreateConversationRequest(msgspec.Struct, frozen=True, rename="camel"):
    """`POST /v1/conversations`; an empty body is `{}`."""

    title: _Title | None = None
    model: _Model | None = None


class RenameConversationRequest(msgspec.Struct, frozen=True, rename="camel"):
    """`PATCH /v1/conversations/{id}`."""

    title: _Title


_ALLOWED = {
    "content": f"text of 1 to {MAX_CONTENT_CHARACTERS:,} characters",
    "clientMessageId": "1 to 128 of A-Z a-z 0-9 : _ -",
    "model": "the id of a model of your plan, or left out",
    "maxTokens": "a whole number from 1 to the reply cap of your plan, or left out",
    "title": f"text of 1 to {MAX_TITLE_CHARACTERS} characters",
}
_AT_FIELD = re.compile(r"at `\$\.(\w+)")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")

Body = TypeVar("Body", SendRequest, RegenerateRequest, CreateConversationRequest, RenameConversationRequest)


def decode(body: bytes, kind: type[Body], content_type: str | None) -> Body:
    """The checked body; fields that the service does not know are ignored.

    Raises TooLarge, UnsupportedMediaType, InvalidRequest.
    """
    if len(body) > MAX_BODY_BYTES:
        raise TooLarge(f"The body must be at most {MAX_BODY_BYTES:,} bytes.")
    if not body and kind is CreateConversationRequest:
        return kind()
    media_type = (content_type or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("The body must be application/json.")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("The body must be one JSON object in UTF-8.") from error


def _invalid(reason: str) -> InvalidRequest:
    """msgspec's message, made to name the field and what it takes."""
    named = _AT_FIELD.search(reason) or _MISSING_FIELD.search(reason)
    if named is None:
        return InvalidRequest("The body must be one JSON object in UTF-8.")
    field = named.group(1)
    return InvalidRequest(f"{field} must be {_ALLOWED.get(field, 'valid')}.", param=field)


class PageQuery(msgspec.Struct, frozen=True):
    """A page of a list."""

    limit: int
    cursor: str | None
    before: int | None


def page_query(query: Mapping[str, str] | None, limit: int = MAX_PAGE) -> PageQuery:
    """`limit`, `cursor` and `before` of a query string. Raises InvalidRequest naming the parameter."""
    source = query or {}
    cursor = source.get("cursor") or None
    if cursor is not None and len(cursor) > _MAX_CURSOR_CHARACTERS:
        raise InvalidRequest("cursor must be the nextCursor of an earlier page.", param="cursor")
    return PageQuery(
        limit=_whole(source, "limit", limit) or min(DEFAULT_PAGE, limit),
        cursor=cursor,
        before=_whole(source, "before", _LARGEST_SEQ),
    )


def sequence_number(text: str) -> int | None:
    """The number in a path such as `/messages/{seq}/…`; None when it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _whole(source: Mapping[str, str], name: str, largest: int) -> int | None:
    text = source.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= largest):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {largest}.", param=name)
    return int(text)
