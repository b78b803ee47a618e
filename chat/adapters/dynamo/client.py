"""One method to call DynamoDB with, over plain HTTP (containers, `http.py`) or boto3 (Lambdas).

Both share what is decided here: one deadline over all tries, jitter between them, and two exceptions that
store code can read. Throttling and lost connections end as `Unavailable`; a faulty call stays the SDK's error.
"""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from chat.errors import Unavailable

DEADLINE_SECONDS = 4.0
"""All tries of one call together; below the patience of a person who waits for the first token."""

TRY_SECONDS = 2.0
"""One try of a call."""

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


class CallFailed(Exception):
    """DynamoDB refused a call: its error code, the HTTP status, and the reasons of a cancelled transaction."""

    def __init__(self, code: str, status: int, message: str, reasons: Sequence[Reason] = ()) -> None:
        super().__init__(f"{code} ({status}): {message}")
        self.code, self.status, self.reasons = code, status, reasons


class DynamoCalls(Protocol):
    """Calls of DynamoDB's API by operation name, such as `get_item`."""

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """The response. Raises ConditionFailed, TransactionCancelled, Unavailable; CallFailed or the SDK's own
        error for a call that is wrong in itself."""
        ...


async def transact(calls: DynamoCalls, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write all parts or none. A try that was applied but not heard of is not applied again."""
    await calls.call("transact_write_items", TransactItems=list(parts), ClientRequestToken=uuid.uuid4().hex)


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
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(min(end, loop.time() + TRY_SECONDS)):
                return await attempt()
        except ClientError as error:
            failure: Exception = error
            raise_if_final(_of_sdk(error), error)
        except CallFailed as error:
            failure = error
            raise_if_final(error, error)
        except (BotoCoreError, OSError, TimeoutError) as error:
            failure = error
        pause = min(pause * 2, 1.0)
        wait = random.uniform(pause / 4, pause)
        if loop.time() + wait >= end:
            raise Unavailable("The store does not answer; nothing was lost, try again.") from failure
        await asyncio.sleep(wait)


def _of_sdk(error: ClientError) -> CallFailed:
    body: Mapping[str, Any] = error.response
    reasons = [Reason(one.get("Code") or "None", one.get("Item")) for one in body.get("CancellationReasons", [])]
    about = body.get("Error", {})
    status = body.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return CallFailed(about.get("Code", ""), status, about.get("Message", ""), reasons)


def raise_if_final(failed: CallFailed, error: Exception) -> None:
    """Raise what the caller must see; return if another try may help."""
    if failed.code == "ConditionalCheckFailedException":
        raise ConditionFailed from error
    if failed.code == "TransactionCanceledException":
        if any(reason.failed for reason in failed.reasons):
            raise TransactionCancelled(failed.reasons) from error
        codes = {reason.code for reason in failed.reasons} - {"None"}
        if not codes or codes - _RETRIED_CODES:
            raise error
        return
    if failed.code not in _RETRIED_CODES and failed.status < 500:
        raise error
