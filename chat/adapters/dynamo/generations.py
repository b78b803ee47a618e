"""Generations in DynamoDB, and the transactions that end a turn."""

from typing import Any

import msgspec

from chat import keys
from chat.adapters.dynamo import rows
from chat.adapters.dynamo.client import DynamoCalls, TransactionCancelled, transact
from chat.adapters.dynamo.objects import Contents
from chat.adapters.dynamo.values import Expression, Row, from_item, to_item
from chat.errors import NotFound, Unavailable
from chat.ids import rfc3339, utc_day
from chat.model import Generation, GenerationStatus, MessageStatus, Outcome

_UNFINISHED = (GenerationStatus.QUEUED, GenerationStatus.RUNNING)


class DynamoGenerations:
    """The port GenerationStore. Reads are consistent."""

    def __init__(
        self, calls: DynamoCalls, *, table: str, conversations: str, accounts: str, ledger: str, contents: Contents
    ) -> None:
        self._calls = calls
        self._table = table
        self._conversations = conversations
        self._accounts = accounts
        self._ledger = ledger
        self._contents = contents

    async def get(self, generation_id: str) -> Generation | None:
        """A key lookup."""
        found = await self._calls.call(
            "get_item", TableName=self._table, Key={"generationId": {"S": generation_id}}, ConsistentRead=True
        )
        return rows.generation_of(from_item(found["Item"])) if found.get("Item") else None

    async def finish(self, generation_id: str, outcome: Outcome, last_event_id: int, now_ms: int) -> Generation:
        """Generation, ledger entry and daily counter; reply and conversation where they still exist."""
        before = await self._known(generation_id)
        if before.status.final:
            return before
        after = msgspec.structs.replace(
            before,
            status=outcome.finish_reason.status,
            usage=outcome.usage,
            cost=outcome.cost,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            last_event_id=last_event_id,
            finished_at=rfc3339(now_ms),
        )
        content = await self._contents.store(after.conversation_id, after.message_id, outcome.text)
        saved = await self._end(
            after,
            [self._put_ledger(after, now_ms), self._count(after, now_ms)],
            {
                "reply": self._change_reply(after, outcome, dict(content)),
                "conversation": self._free(after, rfc3339(now_ms)),
            },
        )
        if "reply" not in saved and (key := content["contentKey"]):
            await self._contents.remove([key])
        return after if "generation" in saved else await self._known(generation_id)

    async def refuse(self, generation_id: str, now_ms: int) -> None:
        """No ledger entry: nothing was generated."""
        before = await self._known(generation_id)
        if before.status.final:
            return
        after = msgspec.structs.replace(before, status=GenerationStatus.REFUSED, finished_at=rfc3339(now_ms))
        reply = Expression()
        await self._end(
            after,
            [],
            {
                "reply": self._update_reply(after, reply, reply.change({"status": MessageStatus.REFUSED})),
                "conversation": self._free(after, None),
            },
        )

    async def _known(self, generation_id: str) -> Generation:
        generation = await self.get(generation_id)
        if generation is None:
            raise NotFound("There is no such generation.")
        return generation

    async def _end(
        self, after: Generation, others: list[dict[str, Any]], optional: dict[str, dict[str, Any]]
    ) -> set[str]:
        """Write it all at once; parts whose row is gone or taken by a later turn are left out.

        Answers the names of what was written; without "generation", somebody else had ended it before.
        """
        remaining = dict(optional)
        for _ in range(len(optional) + 2):
            names = ["generation", *remaining]
            try:
                await transact(self._calls, [self._change_generation(after), *remaining.values(), *others])
            except TransactionCancelled as cancelled:
                failed = [name for name, reason in zip(names, cancelled.reasons, strict=False) if reason.failed]
                if "generation" in failed:
                    return set()
                if not failed:
                    others = []  # the ledger has the entry already: charged once is enough
                for name in failed:
                    del remaining[name]
                continue
            return set(names)
        raise Unavailable("The turn could not be saved; nothing was lost, try again.")

    def _change_generation(self, after: Generation) -> dict[str, Any]:
        expression = Expression()
        row = rows.generation(after)
        fields = ("status", "usage", "cost", "finishReason", "error", "lastEventId", "finishedAt")
        update = expression.change({name: row[name] for name in fields}, remove=("openShard",))
        unfinished = ", ".join(expression.value(status) for status in _UNFINISHED)
        return {
            "Update": {
                "TableName": self._table,
                "Key": {"generationId": {"S": after.generation_id}},
                "UpdateExpression": update,
                "ConditionExpression": f"{expression.name('status')} IN ({unfinished})",
                **expression.arguments(),
            }
        }

    def _change_reply(self, after: Generation, outcome: Outcome, content: Row) -> dict[str, Any]:
        expression = Expression()
        row = {
            **content,
            "status": MessageStatus(after.status.value),
            "usage": rows.usage_map(outcome.usage),
            "usd": outcome.cost.usd,
            "tokens": outcome.usage.output_tokens,
            "model": after.model,
        }
        return self._update_reply(after, expression, expression.change(row))

    def _update_reply(self, after: Generation, expression: Expression, update: str) -> dict[str, Any]:
        key = {"conversationId": {"S": after.conversation_id}, "item": {"S": keys.message_item(after.reply_seq)}}
        return {
            "Update": {
                "TableName": self._conversations,
                "Key": key,
                "UpdateExpression": update,
                "ConditionExpression": expression.equals("generationId", after.generation_id),
                **expression.arguments(),
            }
        }

    def _free(self, after: Generation, updated_at: str | None) -> dict[str, Any]:
        expression = Expression()
        row: Row = {}
        if updated_at is not None:
            row = {"updatedAt": updated_at, "updatedKey": keys.updated_key(updated_at, after.conversation_id)}
        return {
            "Update": {
                "TableName": self._conversations,
                "Key": {"conversationId": {"S": after.conversation_id}, "item": {"S": keys.META_ITEM}},
                "UpdateExpression": expression.change(row, remove=("activeGenerationId",)),
                "ConditionExpression": expression.equals("activeGenerationId", after.generation_id),
                **expression.arguments(),
            }
        }

    def _put_ledger(self, after: Generation, now_ms: int) -> dict[str, Any]:
        entry = rows.ledger(after, utc_day(now_ms), rfc3339(now_ms))
        expression = Expression()
        return {
            "Put": {
                "TableName": self._ledger,
                "Item": to_item(entry),
                "ConditionExpression": expression.absent("userId"),
                **expression.arguments(),
            }
        }

    def _count(self, after: Generation, now_ms: int) -> dict[str, Any]:
        expression = Expression()
        added = {
            "inputTokens": after.usage.input_tokens,
            "outputTokens": after.usage.output_tokens,
            "usd": after.cost.usd,
            "replies": 1,
        }
        parts = [f"{expression.name(name)} {expression.value(value)}" for name, value in added.items()]
        return {
            "Update": {
                "TableName": self._accounts,
                "Key": {"userId": {"S": after.user_id}, "item": {"S": keys.day_item(utc_day(now_ms))}},
                "UpdateExpression": "ADD " + ", ".join(parts),
                **expression.arguments(),
            }
        }
