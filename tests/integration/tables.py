"""The tables of `chat.keys`, made on the emulator for store tests."""

import uuid
from typing import Any

import boto3

from chat import keys
from chat.settings import StoreSettings
from stacks.local.backends import REGION


def _table(client: Any, name: str, key: list[str], index: tuple[str, str, str, str] | None = None) -> None:
    kinds = dict.fromkeys(key, "S")
    arguments: dict[str, Any] = {}
    if index is not None:
        index_name, first, second, kind = index
        kinds |= {first: "S", second: kind}
        arguments["GlobalSecondaryIndexes"] = [
            {"IndexName": index_name, "KeySchema": _schema([first, second]), "Projection": {"ProjectionType": "ALL"}}
        ]
    client.create_table(
        TableName=name,
        KeySchema=_schema(key),
        AttributeDefinitions=[{"AttributeName": n, "AttributeType": k} for n, k in kinds.items()],
        BillingMode="PAY_PER_REQUEST",
        **arguments,
    )


def _schema(key: list[str]) -> list[dict[str, str]]:
    return [{"AttributeName": n, "KeyType": t} for n, t in zip(key, ["HASH", "RANGE"], strict=False)]


def create(endpoint: str) -> StoreSettings:
    """Fresh tables and a bucket under names of their own; the credentials come from the environment."""
    prefix = "t" + uuid.uuid4().hex[:8]
    client = boto3.client("dynamodb", endpoint_url=endpoint, region_name=REGION)
    _table(
        client, f"{prefix}-conversations", ["conversationId", "item"],
        (keys.BY_USER_INDEX, "userId", "updatedKey", "S"),
    )  # fmt: skip
    _table(
        client, f"{prefix}-generations", ["generationId"],
        (keys.OPEN_BY_EXPIRY_INDEX, "openShard", "expiresAt", "N"),
    )  # fmt: skip
    _table(client, f"{prefix}-accounts", ["userId", "item"])
    _table(client, f"{prefix}-ledger", ["userId", "entry"])
    boto3.client("s3", endpoint_url=endpoint, region_name=REGION).create_bucket(
        Bucket=f"{prefix}-content", CreateBucketConfiguration={"LocationConstraint": REGION}
    )
    return StoreSettings(
        environment="test",
        conversations_table=f"{prefix}-conversations",
        generations_table=f"{prefix}-generations",
        accounts_table=f"{prefix}-accounts",
        ledger_table=f"{prefix}-ledger",
        content_bucket=f"{prefix}-content",
        valkey_url="redis://127.0.0.1:1",
    )
