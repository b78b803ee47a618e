"""One method to call DynamoDB with, over aiobotocore (containers) or boto3 (Lambdas).

Both add what the SDKs do not agree on: one deadline over all tries, jitter between them, and two exceptions that
store code can read. Throttling and lost connections end as `Unavailable`; a faulty call stays the SDK's error.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from chat.errors import Unavailable

DEADLINE_SECONDS = 4.0
"""All tries of one call together; below the patience of a person who waits for the first token."""

_FIRST_PAUSE_SECONDS = 0.03
_RETRIED_CODES = frozenset(
    {
        "InternalServerError",
        "InternalFailure",
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "SlowDown",
        "ThrottlingError",
        "ThrottlingException",
        "TransactionConflict",
        "TransactionConflictException",
        "TransactionInProgressException",
    }
)
_CONDITION_FAILED = "ConditionalCheckFailed"


class Reason(msgspec.Struct, frozen=True):
    """Why one part of a transaction failed (code `None` if it did not), and the row that it met."""

    code: str
    item: dict[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Whether this part's condition did not hold."""
        return self.code == _CONDITION_FAILED


class ConditionFailed(Exception):
    """The condition of a single write did not hold."""


class TransactionCancelled(Exception):
    """At least one condition of a transaction did not hold; nothing was written."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__([reason.code for reason in reasons])
        self.reasons = reasons


class DynamoCalls(Protocol):
    """Calls of DynamoDB's API by operation name, such as `get_item`."""

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """The response. Raises ConditionFailed, TransactionCancelled, Unavailable."""
        ...


async def transact(calls: DynamoCalls, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write all parts or none. A try that was applied but not heard of is not applied again."""
    await calls.call("transact_write_items", TransactItems=list(parts), ClientRequestToken=uuid.uuid4().hex)


class AioCalls:
    """Over an aiobotocore client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """See DynamoCalls."""
        response: Mapping[str, Any] = await with_retries(lambda: getattr(self._client, operation)(**arguments))
        return response


class BlockingCalls:
    """Over a boto3 client; blocks the loop, which is right where a process serves one request at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """See DynamoCalls."""

        async def once() -> Any:
            return getattr(self._client, operation)(**arguments)

        response: Mapping[str, Any] = await with_retries(once)
        return response


async def with_retries(attempt: Callable[[], Awaitable[Any]], deadline_seconds: float = DEADLINE_SECONDS) -> Any:
    """Try until it works, the error is final, or the deadline has passed (then Unavailable)."""
    end = time.monotonic() + deadline_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.05, end - time.monotonic())):
                return await attempt()
        except ClientError as error:
            failure: Exception = error
            raise_if_final(error)
        except (BotoCoreError, OSError, TimeoutError) as error:
            failure = error
        pause = min(pause * 2, 1.0)
        wait = random.uniform(pause / 4, pause)
        if time.monotonic() + wait >= end:
            raise Unavailable("The store does not answer; nothing was lost, try again.") from failure
        await asyncio.sleep(wait)


def raise_if_final(error: ClientError) -> None:
    """Raise what the caller must see; return if another try may help."""
    code = error.response.get("Error", {}).get("Code", "")
    if code == "ConditionalCheckFailedException":
        raise ConditionFailed from error
    if code == "TransactionCanceledException":
        raw: Sequence[Any] = error.response.get("CancellationReasons", [])
        reasons = [Reason(reason.get("Code") or "None", reason.get("Item")) for reason in raw]
        if any(reason.failed for reason in reasons):
            raise TransactionCancelled(reasons) from error
        if reasons and all(reason.code == "None" or reason.code in _RETRIED_CODES for reason in reasons):
            return
        raise error
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code not in _RETRIED_CODES and status < 500:
        raise error
