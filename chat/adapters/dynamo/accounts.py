"""Accounts in DynamoDB."""

from chat import keys
from chat.adapters.dynamo.client import DynamoCalls
from chat.adapters.dynamo.values import Expression, from_item
from chat.ports import Account


class DynamoAccounts:
    """The port AccountStore."""

    def __init__(self, calls: DynamoCalls, table: str) -> None:
        self._calls = calls
        self._table = table

    async def get(self, user_id: str) -> Account:
        """A key lookup; eventually consistent, since plans change rarely."""
        found = await self._calls.call("get_item", TableName=self._table, Key=_key(user_id))
        return Account(user_id, from_item(found["Item"])["plan"]) if found.get("Item") else Account(user_id)

    async def set_plan(self, user_id: str, plan: str) -> None:
        """Makes the account if there is none."""
        expression = Expression()
        await self._calls.call(
            "update_item",
            TableName=self._table,
            Key=_key(user_id),
            UpdateExpression=expression.change({"plan": plan}),
            **expression.arguments(),
        )


def _key(user_id: str) -> dict[str, dict[str, str]]:
    return {"userId": {"S": user_id}, "item": {"S": keys.ACCOUNT_ITEM}}
