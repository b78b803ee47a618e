"""Every error that a caller can be told, as one tree.

ChatError
├── InvalidRequest            400 invalid_request          (param)
│   └── ContextLengthExceeded 400 context_length_exceeded  (param)
├── Unauthenticated           401 unauthenticated
├── NotFound                  404 not_found
├── MethodNotAllowed          405 method_not_allowed
├── ConversationBusy          409 conversation_busy        (generationId)
├── IdempotencyConflict       409 idempotency_conflict
├── TooLarge                  413 too_large
├── UnsupportedMediaType      415 unsupported_media_type
├── Refused                   429, always with Retry-After
│   ├── DailyQuotaExceeded        daily_quota_exceeded
│   ├── MinuteQuotaExceeded       minute_quota_exceeded
│   ├── TooManyReplies            too_many_replies
│   └── Overloaded                overloaded               (estimatedWaitSeconds)
├── InternalError             500 internal_error
└── Unavailable               503 unavailable, always with Retry-After
    └── EngineFailed          503 engine_failed            (only inside a stream)
"""

import math
from typing import Any


class ChatError(Exception):
    """An error with a stable code, an HTTP status and a message fit for the user."""

    status = 500
    code = "internal_error"
    type = "api_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        generation_id: str | None = None,
        estimated_wait_seconds: float | None = None,
        quota: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.generation_id = generation_id
        self.estimated_wait_seconds = estimated_wait_seconds
        self.quota = quota

    def body(self) -> dict[str, Any]:
        """The JSON body, `{"error": {...}}`, as `api.md` words it."""
        error: dict[str, Any] = {"type": self.type, "code": self.code, "message": self.message}
        optional = {
            "param": self.param,
            "retryAfterSeconds": self.retry_after,
            "generationId": self.generation_id,
            "estimatedWaitSeconds": self.estimated_wait_seconds,
            "quota": self.quota,
        }
        error |= {name: value for name, value in optional.items() if value is not None}
        return {"error": error}

    @property
    def retry_after(self) -> int | None:
        """Whole seconds, rounded up, at least 1."""
        if self.retry_after_seconds is None:
            return None
        return max(1, math.ceil(self.retry_after_seconds))

    def headers(self) -> dict[str, str]:
        """`Retry-After` where there is a wait."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class InvalidRequest(ChatError):
    """The request is malformed; `param` names the field."""

    status, code, type = 400, "invalid_request", "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt alone does not fit the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(ChatError):
    """No token, or one that does not verify."""

    status, code, type = 401, "unauthenticated", "authentication_error"


class NotFound(ChatError):
    """Unknown, deleted, or somebody else's."""

    status, code, type = 404, "not_found", "invalid_request_error"


class MethodNotAllowed(ChatError):
    """The path exists, the method does not."""

    status, code, type = 405, "method_not_allowed", "invalid_request_error"


class ConversationBusy(ChatError):
    """Another reply is running in this conversation; attach to `generation_id`."""

    status, code, type = 409, "conversation_busy", "conflict_error"


class IdempotencyConflict(ChatError):
    """The same clientMessageId was used with other content."""

    status, code, type = 409, "idempotency_conflict", "conflict_error"


class TooLarge(ChatError):
    """The body is larger than the service reads."""

    status, code, type = 413, "too_large", "invalid_request_error"


class UnsupportedMediaType(ChatError):
    """The body is not application/json."""

    status, code, type = 415, "unsupported_media_type", "invalid_request_error"


class Refused(ChatError):
    """A limit was reached; trying later helps."""

    status, type = 429, "rate_limit_error"


class DailyQuotaExceeded(Refused):
    """The day's token budget is used up."""

    code = "daily_quota_exceeded"

    def headers(self) -> dict[str, str]:
        """An SDK should not retry by itself before tomorrow."""
        return super().headers() | {"x-should-retry": "false"}


class MinuteQuotaExceeded(Refused):
    """The per-minute token bucket is empty."""

    code = "minute_quota_exceeded"


class TooManyReplies(Refused):
    """The plan's number of simultaneous replies is running."""

    code = "too_many_replies"


class Overloaded(Refused):
    """The pool cannot serve the request within the plan's wait limit."""

    code = "overloaded"


class InternalError(ChatError):
    """A fault of the service; the request id finds it in the logs."""


class Unavailable(ChatError):
    """A store is away; nothing was lost, try again."""

    status, code, type = 503, "unavailable", "api_error"

    def __init__(self, message: str, *, retry_after_seconds: float = 2, **more: Any) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds, **more)


class EngineFailed(Unavailable):
    """The model engine broke; what was generated before is kept."""

    code = "engine_failed"
