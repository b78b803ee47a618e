"""The things the service is about. All are immutable; changes make new ones."""

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class MessageStatus(StrEnum):
    """State of a stored message. User messages are always COMPLETED."""

    STREAMING = "STREAMING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    REFUSED = "REFUSED"


class GenerationStatus(StrEnum):
    """State of one attempt to produce a reply."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    REFUSED = "REFUSED"

    @property
    def final(self) -> bool:
        """Whether nothing more will be generated."""
        return self not in (GenerationStatus.QUEUED, GenerationStatus.RUNNING)


class FinishReason(StrEnum):
    """Why the engine ended: `stop` and `length` complete, `cancelled` was asked for, `error` failed."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def status(self) -> GenerationStatus:
        """The generation's final status for this reason."""
        return _STATUS_OF[self]


_STATUS_OF = {
    FinishReason.STOP: GenerationStatus.COMPLETED,
    FinishReason.LENGTH: GenerationStatus.COMPLETED,
    FinishReason.CANCELLED: GenerationStatus.CANCELLED,
    FinishReason.ERROR: GenerationStatus.FAILED,
}


class ServedBy(StrEnum):
    """Which pool answered; also the names of the pools, but for the cache."""

    LARGE = "large"
    SMALL = "small"
    CACHE = "cache"


class Usage(msgspec.Struct, frozen=True, rename="camel"):
    """Tokens of one reply. `cached_tokens` is the part of the input found in the prefix cache."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class Cost(msgspec.Struct, frozen=True):
    """Cost of one reply in USD."""

    usd: float = 0.0


class Conversation(msgspec.Struct, frozen=True, rename="camel"):
    """A thread of messages that one user owns. Times are RFC 3339 UTC."""

    conversation_id: str
    title: str | None
    model: str | None
    created_at: str
    updated_at: str
    last_seq: int


class Message(msgspec.Struct, frozen=True, rename="camel", omit_defaults=False):
    """One message of a conversation. `seq` counts from 1 without holes inside the conversation."""

    message_id: str
    conversation_id: str
    seq: int
    role: Role
    content: str
    status: MessageStatus
    model: str | None
    parent_id: str | None
    generation_id: str | None
    created_at: str
    usage: Usage | None = None
    cost: Cost | None = None


class StoredMessage(msgspec.Struct, frozen=True):
    """A message with what only the service needs: `tokens` counts its content, without the template."""

    message: Message
    tokens: int


class Generation(msgspec.Struct, frozen=True):
    """One reply being made, or made. Lives in DynamoDB; the live part is in Valkey.

    `hold_tokens` is what the quota reserved, `expires_at` (epoch milliseconds) when a reaper may
    settle it, `reply_seq` the place of the reply in the conversation.
    """

    generation_id: str
    user_id: str
    conversation_id: str
    message_id: str
    reply_seq: int
    parent_id: str
    plan: str
    model: str
    pool: str
    status: GenerationStatus
    created_at: str
    max_tokens: int
    prompt_tokens: int
    hold_tokens: int
    expires_at: int
    client_message_id: str
    usage: Usage = Usage()
    cost: Cost = Cost()
    finish_reason: FinishReason | None = None
    error: dict[str, str] | None = None
    last_event_id: int = 0
    finished_at: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One entry of a prompt."""

    role: Role
    content: str


class GenerationRequest(msgspec.Struct, frozen=True):
    """All that a worker needs; kept in Valkey beside the token buffer, outside the lane."""

    generation_id: str
    user_id: str
    conversation_id: str
    message_id: str
    reply_seq: int
    plan: str
    pool: str
    model: str
    messages: list[ChatMessage]
    max_tokens: int
    prompt_tokens: int
    temperature: float
    created_at_ms: int


class Job(msgspec.Struct, frozen=True):
    """An entry of a lane: what dispatch needs to pick and book, and nothing more.

    `kv_tokens` is the room it needs in a replica's KV cache, in tokens; `attempt` counts dispatches
    from 1 and is the fence of every write; `order` is its place in the lane (lower first), kept when it
    goes back to the head.
    """

    generation_id: str
    user_id: str
    conversation_id: str
    plan: str
    kv_tokens: int
    enqueued_at_ms: int


class Outcome(msgspec.Struct, frozen=True):
    """How a generation ended; sealed in the token buffer before anything is saved."""

    finish_reason: FinishReason
    text: str
    usage: Usage
    cost: Cost
    error: dict[str, str] | None = None


class EventKind(StrEnum):
    """The events of the stream. `queued` has no id and is never stored."""

    QUEUED = "queued"
    STARTED = "started"
    DELTA = "delta"
    DONE = "done"
    ERROR = "error"

    @property
    def last(self) -> bool:
        """Whether the stream ends with it."""
        return self in (EventKind.DONE, EventKind.ERROR)
