"""Making the stores: over aiobotocore in containers, over boto3 in Lambdas."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from chat.adapters.dynamo.accounts import DynamoAccounts
from chat.adapters.dynamo.client import AioCalls, BlockingCalls, DynamoCalls, with_retries
from chat.adapters.dynamo.conversations import DynamoConversations
from chat.adapters.dynamo.generations import DynamoGenerations
from chat.adapters.dynamo.objects import Contents, ObjectCalls
from chat.settings import StoreSettings

_OPTIONS: dict[str, Any] = {
    "retries": {"total_max_attempts": 1},  # ours know the deadline
    "connect_timeout": 1,
    "read_timeout": 2,
    "max_pool_connections": 200,
    "tcp_keepalive": True,
    "parameter_validation": False,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


@dataclass(frozen=True)
class Stores:
    """What DynamoDB and S3 keep."""

    conversations: DynamoConversations
    generations: DynamoGenerations
    accounts: DynamoAccounts


def _stores(settings: StoreSettings, calls: DynamoCalls, contents: Contents) -> Stores:
    return Stores(
        DynamoConversations(calls, settings.conversations_table, settings.generations_table, contents),
        DynamoGenerations(
            calls,
            table=settings.generations_table,
            conversations=settings.conversations_table,
            accounts=settings.accounts_table,
            ledger=settings.ledger_table,
            contents=contents,
        ),
        DynamoAccounts(calls, settings.accounts_table),
    )


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


@asynccontextmanager
async def connect(settings: StoreSettings) -> AsyncIterator[Stores]:
    """The stores of a container, for as long as the context lasts. Nothing is called before the first use."""
    # Only containers carry these two.
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    session = get_session()
    config = AioConfig(**_OPTIONS)
    async with AsyncExitStack() as stack:

        async def client(service: str) -> Any:
            made: Any = session.create_client(service, region_name=_region(), config=config)  # type: ignore[call-overload]
            return await stack.enter_async_context(made)

        async def objects() -> ObjectCalls:
            return _AioObjects(await client("s3"))

        calls = AioCalls(await client("dynamodb"))
        yield _stores(settings, calls, Contents(settings.content_bucket, objects))


def connect_blocking(settings: StoreSettings) -> Stores:
    """The stores of a Lambda, for the life of the process."""
    # The Lambda runtime has boto3; importing it takes a third of a second.
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config

    def client(service: str) -> Any:
        return boto3.client(service, region_name=_region(), config=Config(**_OPTIONS))

    async def objects() -> ObjectCalls:
        return _BlockingObjects(client("s3"))

    return _stores(settings, BlockingCalls(client("dynamodb")), Contents(settings.content_bucket, objects))


def _removal(keys: list[str]) -> dict[str, Any]:
    return {"Objects": [{"Key": key} for key in keys], "Quiet": True}


class _AioObjects:
    """ObjectCalls over aiobotocore."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, bucket: str, key: str, body: bytes) -> None:
        await with_retries(lambda: self._client.put_object(Bucket=bucket, Key=key, Body=body))

    async def get(self, bucket: str, key: str) -> bytes:
        async def once() -> bytes:
            found = await self._client.get_object(Bucket=bucket, Key=key)
            async with found["Body"] as stream:
                body: bytes = await stream.read()
            return body

        content: bytes = await with_retries(once)
        return content

    async def delete(self, bucket: str, keys: list[str]) -> None:
        await with_retries(lambda: self._client.delete_objects(Bucket=bucket, Delete=_removal(keys)))


class _BlockingObjects:
    """ObjectCalls over boto3."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, bucket: str, key: str, body: bytes) -> None:
        async def once() -> Any:
            return self._client.put_object(Bucket=bucket, Key=key, Body=body)

        await with_retries(once)

    async def get(self, bucket: str, key: str) -> bytes:
        async def once() -> bytes:
            body: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body

        content: bytes = await with_retries(once)
        return content

    async def delete(self, bucket: str, keys: list[str]) -> None:
        async def once() -> Any:
            return self._client.delete_objects(Bucket=bucket, Delete=_removal(keys))

        await with_retries(once)
