"""Contents that are too large for a DynamoDB item, kept in S3.

The key is a function of the message, so a retry overwrites and leaves nothing behind.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

INLINE_BYTES = 300_000
"""Longest content, in UTF-8 bytes, that stays in the item: DynamoDB's limit is 400 KB with all attributes."""


class ObjectCalls(Protocol):
    """The three calls of S3 that are needed."""

    async def put(self, bucket: str, key: str, body: bytes) -> None: ...

    async def get(self, bucket: str, key: str) -> bytes: ...

    async def delete(self, bucket: str, keys: list[str]) -> None: ...


class Contents:
    """Message contents outside the table. The S3 client is made when the first large content is met."""

    def __init__(self, bucket: str, connect: Callable[[], Awaitable[ObjectCalls]]) -> None:
        self._bucket = bucket
        self._connect = connect
        self._calls: ObjectCalls | None = None

    async def _s3(self) -> ObjectCalls:
        if self._calls is None:
            self._calls = await self._connect()
        return self._calls

    async def store(self, conversation_id: str, message_id: str, content: str) -> dict[str, str | None]:
        """The attributes that hold this content: `content` itself, or `contentKey`."""
        if len(content) * 4 <= INLINE_BYTES or len(body := content.encode()) <= INLINE_BYTES:
            return {"content": content, "contentKey": None}
        key = f"contents/{conversation_id}/{message_id}"
        await (await self._s3()).put(self._bucket, key, body)
        return {"content": None, "contentKey": key}

    async def load(self, key: str) -> str:
        """The content under a key."""
        return (await (await self._s3()).get(self._bucket, key)).decode()

    async def remove(self, keys: list[str]) -> None:
        """Remove contents; unknown keys are no error."""
        if keys:
            await (await self._s3()).delete(self._bucket, keys)
