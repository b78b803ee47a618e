"""The transactions that begin a turn."""

from collections.abc import Mapping
from typing import Any

from chat import keys
from chat.adapters.dynamo import rows
from chat.adapters.dynamo.client import DynamoCalls, TransactionCancelled, transact
from chat.adapters.dynamo.objects import Contents
from chat.adapters.dynamo.values import Expression, Row, from_item, to_item
from chat.model import StoredMessage
from chat.ports import BeginStatus, NewTurn, Send

Part = dict[str, Any]


class Turns:
    """Begins turns: each method is one transaction over the conversation and its new generation."""

    def __init__(self, calls: DynamoCalls, table: str, generations_table: str, contents: Contents) -> None:
        self._calls = calls
        self._table = table
        self._generations_table = generations_table
        self._contents = contents

    async def begin(self, user_id: str, turn: NewTurn) -> BeginStatus:
        """Claim, user's message, reply slot, generation and conversation, or none of them."""
        conversation_id = turn.reply.conversation_id
        new = [rows.message(StoredMessage(turn.reply, 0), {"content": turn.reply.content})]
        content: Mapping[str, str | None] = {}
        if turn.user is not None:
            message = turn.user.message
            content = await self._contents.store(conversation_id, message.message_id, message.content)
            new.append(rows.message(turn.user, dict(content)))
        status = await self._write(
            user_id,
            self._create(self._table, rows.send(conversation_id, turn.send), "conversationId"),
            self._hold(user_id, turn, moves=True),
            [
                *(self._create(self._table, row, "conversationId") for row in new),
                self._create(self._generations_table, rows.generation(turn.generation), "generationId"),
            ],
        )
        if status is not BeginStatus.CREATED and (key := content.get("contentKey")):
            await self._contents.remove([key])
        return status

    async def retry(self, user_id: str, old: Send, turn: NewTurn) -> BeginStatus:
        """The claim moves to the new generation, the refused reply slot is opened again."""
        conversation_id = turn.reply.conversation_id
        claim = Expression()
        reply = Expression()
        reply_row = rows.message(StoredMessage(turn.reply, 0), {"content": turn.reply.content})
        return await self._write(
            user_id,
            {
                "Put": {
                    "TableName": self._table,
                    "Item": to_item(rows.send(conversation_id, turn.send)),
                    "ConditionExpression": claim.equals("generationId", old.generation_id),
                    **claim.arguments(),
                }
            },
            self._hold(user_id, turn, moves=False),
            [
                {
                    "Put": {
                        "TableName": self._table,
                        "Item": to_item(reply_row),
                        "ConditionExpression": reply.equals("generationId", old.generation_id),
                        **reply.arguments(),
                    }
                },
                self._create(self._generations_table, rows.generation(turn.generation), "generationId"),
            ],
        )

    async def _write(self, user_id: str, claim: Part, hold: Part, others: list[Part]) -> BeginStatus:
        try:
            await transact(self._calls, [claim, hold, *others])
        except TransactionCancelled as cancelled:
            claimed, held, *_ = cancelled.reasons
            if claimed.failed:
                return BeginStatus.CLAIMED
            return _why_not_held(user_id, from_item(held.item or {})) if held.failed else BeginStatus.MOVED
        return BeginStatus.CREATED

    def _create(self, table: str, row: Row, key: str) -> Part:
        expression = Expression()
        put = {"TableName": table, "Item": to_item(row), "ConditionExpression": expression.absent(key)}
        return {"Put": {**put, **expression.arguments()}}

    def _hold(self, user_id: str, turn: NewTurn, *, moves: bool) -> Part:
        """The conversation belongs to the new generation; `moves`: and its last number to the new reply."""
        conversation_id, at = turn.reply.conversation_id, turn.reply.created_at
        expression = Expression()
        change: Row = {
            "activeGenerationId": turn.generation.generation_id,
            "updatedAt": at,
            "updatedKey": keys.updated_key(at, conversation_id),
        }
        conditions = [expression.equals("userId", user_id), expression.absent("activeGenerationId")]
        if moves:
            change["lastSeq"] = turn.reply.seq
            conditions.append(expression.equals("lastSeq", turn.expected_last_seq))
        update = expression.change(change)
        if turn.title is not None:
            title = expression.name("title")
            update += f", {title} = if_not_exists({title}, {expression.value(turn.title)})"
        return {
            "Update": {
                "TableName": self._table,
                "Key": {"conversationId": {"S": conversation_id}, "item": {"S": keys.META_ITEM}},
                "UpdateExpression": update,
                "ConditionExpression": " AND ".join(conditions),
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
                **expression.arguments(),
            }
        }


def _why_not_held(user_id: str, met: Row) -> BeginStatus:
    if met.get("userId") != user_id:
        return BeginStatus.GONE
    return BeginStatus.BUSY if "activeGenerationId" in met else BeginStatus.MOVED
