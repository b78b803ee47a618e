"""Conversations and their messages in DynamoDB. Reads are consistent, but for the list by user."""

import asyncio
import base64
import binascii
from typing import Any

import msgspec

from chat import keys
from chat.adapters.dynamo import rows
from chat.adapters.dynamo.client import ConditionFailed, DynamoCalls
from chat.adapters.dynamo.objects import Contents
from chat.adapters.dynamo.turns import Turns
from chat.adapters.dynamo.values import Expression, Row, from_item, to_item
from chat.errors import InvalidRequest, NotFound
from chat.ids import now_ms, rfc3339
from chat.model import Conversation, StoredMessage
from chat.ports import BeginStatus, NewTurn, OpenedConversation, Send

_FIRST_MESSAGE = keys.message_item(0)
_PURGE_ROUNDS = 100
_PURGE_PAGE = 100
_BATCH = 25  # rows of one BatchWriteItem
_OPENED_OBJECTS = 4
"""Large contents fetched when a conversation is opened; older messages are then left to the next page."""


class _Cursor(msgspec.Struct, forbid_unknown_fields=True):
    """Where a page of conversations ended; the user is always the caller."""

    u: str
    c: str


class DynamoConversations:
    """The port ConversationStore."""

    def __init__(self, calls: DynamoCalls, table: str, generations_table: str, contents: Contents) -> None:
        self._calls = calls
        self._table = table
        self._contents = contents
        self._turns = Turns(calls, table, generations_table, contents)

    async def create(self, user_id: str, conversation: Conversation) -> None:
        """A new conversation; the same id twice is one."""
        expression = Expression()
        try:
            await self._calls.call(
                "put_item",
                TableName=self._table,
                Item=to_item(rows.meta(user_id, conversation)),
                ConditionExpression=expression.absent("conversationId"),
                **expression.arguments(),
            )
        except ConditionFailed:
            await self._own_meta(user_id, conversation.conversation_id)

    async def page(self, user_id: str, cursor: str | None, limit: int) -> tuple[list[Conversation], str | None]:
        """By updatedAt, newest first; one query."""
        expression = Expression()
        arguments: dict[str, Any] = {}
        if cursor is not None:
            after = _decode_cursor(cursor)
            arguments["ExclusiveStartKey"] = to_item(
                {"conversationId": after.c, "item": keys.META_ITEM, "userId": user_id, "updatedKey": after.u}
            )
        found = await self._calls.call(
            "query",
            TableName=self._table,
            IndexName=keys.BY_USER_INDEX,
            KeyConditionExpression=expression.equals("userId", user_id),
            ScanIndexForward=False,
            Limit=limit + 1,
            **expression.arguments(),
            **arguments,
        )
        items = [from_item(item) for item in found["Items"]]
        more = len(items) > limit or (bool(items) and "LastEvaluatedKey" in found)
        items = items[:limit]
        following = _encode_cursor(items[-1]) if more else None
        return [rows.conversation(row) for row in items], following

    async def open(self, user_id: str, conversation_id: str, newest: int) -> OpenedConversation:
        """One query backwards from `~meta`, which comes before the newest message."""
        found = await self._newest_first(conversation_id, keys.META_ITEM, newest + 1)
        if not found or found[0]["item"] != keys.META_ITEM or found[0]["userId"] != user_id:
            raise _not_found()
        row, messages = found[0], found[1:]
        large = [place for place, message in enumerate(messages) if "contentKey" in message]
        if len(large) > _OPENED_OBJECTS:
            messages = messages[: large[_OPENED_OBJECTS]]
        return OpenedConversation(
            rows.conversation(row), row.get("activeGenerationId"), await self._with_contents(messages)
        )

    async def messages(
        self, user_id: str, conversation_id: str, before: int | None, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        """Newest first. A page may be shorter than `limit` when its contents are long."""
        if before is None:
            found = await self._newest_first(conversation_id, keys.META_ITEM, limit + 1)
            if not found or found[0]["item"] != keys.META_ITEM or found[0]["userId"] != user_id:
                raise _not_found()
            found = found[1:]
        else:
            last = keys.message_item(min(before, 10**10) - 1)
            found, _ = await asyncio.gather(
                self._newest_first(conversation_id, last, limit), self._own_meta(user_id, conversation_id)
            )
        messages = await self._with_contents(found)
        oldest = messages[-1].message.seq if messages else 1
        return messages, oldest if oldest > 1 else None

    async def rename(self, user_id: str, conversation_id: str, title: str) -> Conversation:
        """Raises NotFound. The place in the list stays: a new title is no new message."""
        expression = Expression()
        try:
            changed = await self._calls.call(
                "update_item",
                TableName=self._table,
                Key=_key(conversation_id, keys.META_ITEM),
                UpdateExpression=expression.change({"title": title}),
                ConditionExpression=expression.equals("userId", user_id),
                ReturnValues="ALL_NEW",
                **expression.arguments(),
            )
        except ConditionFailed as error:
            raise _not_found() from error
        return rows.conversation(from_item(changed["Attributes"]))

    async def delete(self, user_id: str, conversation_id: str) -> str | None:
        """Marks it; from here on it is absent for everybody. Marked twice by its owner is marked once."""
        at = rfc3339(now_ms())
        expression = Expression()
        mark = {
            "userId": rows.DELETED_USER,
            "ownerId": user_id,
            "deletedAt": at,
            "updatedKey": keys.updated_key(at, conversation_id),
        }
        try:
            old = await self._calls.call(
                "update_item",
                TableName=self._table,
                Key=_key(conversation_id, keys.META_ITEM),
                UpdateExpression=expression.change(mark, remove=("title", "activeGenerationId")),
                ConditionExpression=f"{expression.equals('userId', user_id)} OR "
                f"{expression.equals('ownerId', user_id)}",
                ReturnValues="ALL_OLD",
                **expression.arguments(),
            )
        except ConditionFailed as error:
            raise _not_found() from error
        active: str | None = from_item(old["Attributes"]).get("activeGenerationId")
        return active

    async def purge(self, conversation_id: str) -> bool:
        """Rows first, the mark last, so that a crash leaves what finds the rest."""
        for _ in range(_PURGE_ROUNDS):
            found = await self._rows_to_purge(conversation_id)
            if not found:
                await self._remove_mark(conversation_id)
                return True
            await self._contents.remove([row["contentKey"] for row in found if "contentKey" in row])
            items = [row["item"] for row in found]
            batches = [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]
            await asyncio.gather(*(self._remove_rows(conversation_id, batch) for batch in batches))
        return False

    async def release(self, conversation_id: str, generation_id: str) -> None:
        """Only what is held by this very generation."""
        expression = Expression()
        try:
            await self._calls.call(
                "update_item",
                TableName=self._table,
                Key=_key(conversation_id, keys.META_ITEM),
                UpdateExpression=expression.change({}, remove=("activeGenerationId",)),
                ConditionExpression=expression.equals("activeGenerationId", generation_id),
                **expression.arguments(),
            )
        except ConditionFailed:
            return

    async def begin_turn(self, user_id: str, turn: NewTurn) -> BeginStatus:
        """One transaction."""
        return await self._turns.begin(user_id, turn)

    async def retry_turn(self, user_id: str, old: Send, turn: NewTurn) -> BeginStatus:
        """One transaction."""
        return await self._turns.retry(user_id, old, turn)

    async def find_send(self, conversation_id: str, client_message_id: str) -> Send | None:
        """A key lookup."""
        row = await self._get(conversation_id, keys.send_item(client_message_id))
        return None if row is None else rows.send_of(client_message_id, row)

    async def _own_meta(self, user_id: str, conversation_id: str) -> Row:
        row = await self._get(conversation_id, keys.META_ITEM)
        if row is None or row["userId"] != user_id:
            raise _not_found()
        return row

    async def _get(self, conversation_id: str, item: str) -> Row | None:
        found = await self._calls.call(
            "get_item", TableName=self._table, Key=_key(conversation_id, item), ConsistentRead=True
        )
        return from_item(found["Item"]) if found.get("Item") else None

    async def _newest_first(self, conversation_id: str, last_item: str, limit: int) -> list[Row]:
        expression = Expression()
        within = (
            f"{expression.equals('conversationId', conversation_id)} AND {expression.name('item')} "
            f"BETWEEN {expression.value(_FIRST_MESSAGE)} AND {expression.value(last_item)}"
        )
        found = await self._calls.call(
            "query",
            TableName=self._table,
            KeyConditionExpression=within,
            ScanIndexForward=False,
            ConsistentRead=True,
            Limit=limit,
            **expression.arguments(),
        )
        return [from_item(item) for item in found["Items"]]

    async def _with_contents(self, found: list[Row]) -> list[StoredMessage]:
        large = [row for row in found if "contentKey" in row]
        loaded = await asyncio.gather(*(self._contents.load(row["contentKey"]) for row in large))
        by_item = {row["item"]: content for row, content in zip(large, loaded, strict=True)}
        return [rows.stored_message(row, by_item.get(row["item"]) or row.get("content", "")) for row in found]

    async def _rows_to_purge(self, conversation_id: str) -> list[Row]:
        expression = Expression()
        before_meta = (
            f"{expression.equals('conversationId', conversation_id)} AND "
            f"{expression.name('item')} < {expression.value(keys.META_ITEM)}"
        )
        found = await self._calls.call(
            "query",
            TableName=self._table,
            KeyConditionExpression=before_meta,
            ProjectionExpression=f"{expression.name('item')}, {expression.name('contentKey')}",
            ConsistentRead=True,
            Limit=_PURGE_PAGE,
            **expression.arguments(),
        )
        return [from_item(item) for item in found["Items"]]

    async def _remove_rows(self, conversation_id: str, items: list[str]) -> None:
        requests = [{"DeleteRequest": {"Key": _key(conversation_id, item)}} for item in items]
        # What is left unprocessed here is met again by the next round's query.
        await self._calls.call("batch_write_item", RequestItems={self._table: requests})

    async def _remove_mark(self, conversation_id: str) -> None:
        expression = Expression()
        try:
            await self._calls.call(
                "delete_item",
                TableName=self._table,
                Key=_key(conversation_id, keys.META_ITEM),
                ConditionExpression=expression.equals("userId", rows.DELETED_USER),
                **expression.arguments(),
            )
        except ConditionFailed:
            return


def _key(conversation_id: str, item: str) -> dict[str, Any]:
    return {"conversationId": {"S": conversation_id}, "item": {"S": item}}


def _not_found() -> NotFound:
    return NotFound("There is no such conversation.")


def _encode_cursor(row: Row) -> str:
    plain = msgspec.json.encode(_Cursor(row["updatedKey"], row["conversationId"]))
    return base64.urlsafe_b64encode(plain).rstrip(b"=").decode()


def _decode_cursor(cursor: str) -> _Cursor:
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        after = msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=_Cursor)
    except (UnicodeEncodeError, binascii.Error, msgspec.DecodeError, RecursionError) as error:
        raise _bad_cursor() from error
    if not 0 < len(after.u) <= 1024 or not after.u.endswith(f"#{after.c}") or not after.c:
        raise _bad_cursor()
    return after


def _bad_cursor() -> InvalidRequest:
    return InvalidRequest("cursor must be the nextCursor of an earlier page.", param="cursor")
