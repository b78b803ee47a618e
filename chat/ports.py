"""What the use cases need from the outside, as protocols. Adapters implement them; tests use in-memory ones.

Every method raises `chat.errors.Unavailable` when its store does not answer within the adapter's deadline.
"""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from chat.model import (
    ChatMessage,
    Conversation,
    EventKind,
    FinishReason,
    Generation,
    GenerationRequest,
    Job,
    Message,
    Outcome,
    StoredMessage,
)

# --- conversations, turns and generations: DynamoDB -------------------------------------------------------


class OpenedConversation(msgspec.Struct, frozen=True):
    """A conversation with its newest messages (newest first) and the generation that runs in it, if any."""

    conversation: Conversation
    active_generation_id: str | None
    newest: list[StoredMessage]


class Send(msgspec.Struct, frozen=True):
    """The durable claim of one clientMessageId. `fingerprint` is a hash of what was asked for."""

    client_message_id: str
    fingerprint: str
    generation_id: str
    user_seq: int
    reply_seq: int


class NewTurn(msgspec.Struct, frozen=True):
    """All rows of one send, written in one transaction.

    `user` is None for a regeneration. `expected_last_seq` fences concurrent sends. `title` is given to a
    conversation that has none.
    """

    send: Send
    user: StoredMessage | None
    reply: Message
    generation: Generation
    expected_last_seq: int
    title: str | None


class BeginStatus(StrEnum):
    """What became of `begin_turn`."""

    CREATED = "created"
    CLAIMED = "claimed"
    """This clientMessageId was used before; look it up with `find_send`."""
    BUSY = "busy"
    MOVED = "moved"
    """`expected_last_seq` was stale: read again and retry."""
    GONE = "gone"


class ConversationStore(Protocol):
    """Conversations and their messages. A conversation of another user is as absent as an unknown one."""

    async def create(self, user_id: str, conversation: Conversation) -> None: ...

    async def page(self, user_id: str, cursor: str | None, limit: int) -> tuple[list[Conversation], str | None]:
        """By updatedAt, newest first. Raises InvalidRequest(param=cursor) for a malformed cursor."""
        ...

    async def open(self, user_id: str, conversation_id: str, newest: int) -> OpenedConversation:
        """One bounded query. Raises NotFound."""
        ...

    async def messages(
        self, user_id: str, conversation_id: str, before: int | None, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        """Newest first, with `seq < before`; and the next `before`, None at the beginning. Raises NotFound."""
        ...

    async def rename(self, user_id: str, conversation_id: str, title: str) -> Conversation: ...

    async def delete(self, user_id: str, conversation_id: str) -> None:
        """Raises NotFound. The conversation is gone at once; its rows are removed in bounded batches."""
        ...

    async def begin_turn(self, user_id: str, turn: NewTurn) -> BeginStatus: ...

    async def find_send(self, conversation_id: str, client_message_id: str) -> Send | None: ...

    async def retry_turn(self, user_id: str, old: Send, turn: NewTurn) -> BeginStatus:
        """Give a REFUSED send a new generation. CLAIMED if another copy did so first."""
        ...


class GenerationStore(Protocol):
    """Generations, and the one transaction that ends a turn."""

    async def get(self, generation_id: str) -> Generation | None: ...

    async def finish(self, generation_id: str, outcome: Outcome, last_event_id: int, now_ms: int) -> Generation:
        """Save reply, status, ledger entry and daily counter at once.

        Idempotent: the first outcome stays and is answered.
        """
        ...

    async def refuse(self, generation_id: str, now_ms: int) -> None:
        """The generation never ran: reply slot and generation become REFUSED, the conversation is free."""
        ...


class Account(msgspec.Struct, frozen=True):
    """A user's plan."""

    user_id: str
    plan: str = "free"


class AccountStore(Protocol):
    """Accounts; an unknown user is on the free plan."""

    async def get(self, user_id: str) -> Account: ...

    async def set_plan(self, user_id: str, plan: str) -> None: ...


# --- the token buffer: Valkey, one slot a generation -------------------------------------------------------


class BufferEntry(msgspec.Struct, frozen=True):
    """One durable event: its rendered frame (see `chat.frames`) and the token ids that it took."""

    seq: int
    kind: EventKind
    frame: bytes
    token_ids: list[int] = []


class LiveState(msgspec.Struct, frozen=True):
    """What the buffer knows of a generation. `ended`: its last event is in the buffer."""

    user_id: str
    conversation_id: str
    pool: str
    attempt: int
    last_seq: int
    cancel_requested: bool
    sealed: bool
    ended: bool


class Claim(msgspec.Struct, frozen=True):
    """What a worker finds when it takes a generation: the request and everything already in the buffer."""

    request: GenerationRequest
    state: LiveState
    entries: list[BufferEntry]
    sealed_outcome: Outcome | None


class Fenced(Exception):
    """A later attempt owns the generation, or it is sealed: stop writing, drop it."""


class UnknownGeneration(Exception):
    """The buffer has no such generation: expired, flushed or never opened."""


class TokenBuffer(Protocol):
    """The durable log of a generation's events.

    Sequence numbers are 1, 2, 3 … without a hole. Each append is also published on the generation's sharded
    channel, one message an entry, whose payload is the frame.
    """

    async def open(self, request: GenerationRequest) -> None:
        """Make the generation known, with its request; idempotent."""
        ...

    async def claim(self, generation_id: str, attempt: int) -> Claim:
        """Raise the fence to `attempt`. Raises Fenced when a later attempt exists, UnknownGeneration."""
        ...

    async def append(self, generation_id: str, attempt: int, entries: Sequence[BufferEntry]) -> int:
        """Write contiguous entries; those already there are skipped. Answers the last seq in the buffer.

        When the buffer lost entries (last seq < first given - 1) nothing is written: send again from
        last + 1. A lost generation (0) is made anew by an append that begins at seq 1. Raises Fenced.
        """
        ...

    async def seal(self, generation_id: str, attempt: int | None, outcome: Outcome) -> Outcome:
        """Decide the outcome once and for all; the first one stays and is answered. No append passes after it.

        `attempt=None` takes the generation over from whoever has it. Raises Fenced, UnknownGeneration.
        """
        ...

    async def publish_last(self, generation_id: str, frame: bytes) -> None:
        """Append the last event of a sealed generation; idempotent. Starts the resume window."""
        ...

    async def request_cancel(self, generation_id: str) -> LiveState | None:
        """Leave a durable mark that no claim can miss. None when the buffer does not know the generation."""
        ...

    async def live(self, generation_id: str) -> LiveState | None: ...

    async def entries(self, generation_id: str, after: int = 0, limit: int = 1000) -> list[BufferEntry]: ...

    async def frames(self, generation_id: str, after: int, limit: int = 256) -> list[bytes]:
        """Frames with seq > after, in order; what streamers read."""
        ...


class Subscription(Protocol):
    """Frames of one generation as they are published; may lose some, never reorders."""

    async def next(self, timeout_seconds: float) -> bytes | None:
        """The next frame; None after the timeout, or when frames were dropped: read the buffer again."""
        ...

    async def close(self) -> None: ...


class Wakeups(Protocol):
    """Live events: one subscription connection a shard a process, shared by all followers."""

    async def subscribe(self, generation_id: str) -> Subscription:
        """Returns once the subscription is confirmed, so that a read after it leaves no hole."""
        ...


# --- lanes and replicas: Valkey, one slot a pool -----------------------------------------------------------


class QueuePlace(msgspec.Struct, frozen=True):
    """Place in the lane from 1, and the estimated wait; position 0 means already dispatched."""

    position: int
    estimated_wait_seconds: float


class JobState(StrEnum):
    """Where a cancel found the job."""

    QUEUED = "queued"
    """It was taken out of its lane: the caller must finish the turn."""
    DISPATCHED = "dispatched"
    """Its replica was told, and finishes the turn."""
    UNKNOWN = "unknown"


class Assignment(msgspec.Struct, frozen=True):
    """A generation dispatched to a replica."""

    generation_id: str
    attempt: int


class ReplicaStatus(msgspec.Struct, frozen=True):
    """What a replica says of itself. `replica_id` is unique to a process, so a restart is a new replica."""

    replica_id: str
    kv_capacity_tokens: int
    running: int
    draining: bool
    bookings: dict[str, int] = {}
    """generation id -> KV tokens that it has in hand; restores the books after Valkey lost them"""


class PoolStatus(msgspec.Struct, frozen=True):
    """A pool at one moment."""

    queued: dict[str, int]
    replicas: int
    kv_capacity_tokens: int
    kv_booked_tokens: int
    running: int


class Swept(msgspec.Struct, frozen=True):
    """What a sweep found: put back at the head of their lanes, out of attempts, without followers."""

    requeued: list[str]
    exhausted: list[str]
    abandoned: list[str]


class Lanes(Protocol):
    """Queues by plan, replicas and bookings of a pool. Time is always an argument, in epoch milliseconds."""

    async def enqueue(self, pool: str, job: Job) -> QueuePlace:
        """Idempotent by generation id; wakes the dispatchers."""
        ...

    async def place(self, pool: str, generation_id: str) -> QueuePlace | None:
        """None when the pool does not know the job (finished, or lost)."""
        ...

    async def cancel(self, pool: str, generation_id: str) -> JobState: ...

    async def dispatch(self, pool: str, now_ms: int, limit: int) -> list[Assignment]:
        """Pop, pick a replica, book and hand over, all in one script; up to `limit` jobs."""
        ...

    async def heartbeat(self, pool: str, status: ReplicaStatus, now_ms: int) -> None: ...

    async def take(self, pool: str, replica_id: str, timeout_seconds: float) -> Assignment | None:
        """Wait for the next assignment of this replica."""
        ...

    async def release(self, pool: str, generation_id: str) -> None:
        """The turn is finished: forget the job, free its booking, wake the dispatchers; idempotent."""
        ...

    async def hand_over(self, pool: str, replica_id: str, generation_id: str) -> None:
        """Put a running job back at the head of its lane (a draining replica); no-op if it is not this replica's."""
        ...

    async def leave(self, pool: str, replica_id: str) -> None:
        """The replica is gone for good; whatever it still had goes back to its lanes."""
        ...

    async def sweep(self, pool: str, now_ms: int, silent_ms: int, abandoned_ms: int, max_attempts: int) -> Swept: ...

    async def touch_followed(self, pool: str, generation_ids: Sequence[str], now_ms: int) -> None:
        """Somebody is following these: they are not abandoned."""
        ...

    async def status(self, pool: str) -> PoolStatus: ...


# --- engines -----------------------------------------------------------------------------------------------


class EngineOutput(msgspec.Struct, frozen=True):
    """A step's tokens. The last output of a generation has a finish reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    text: str | None = None
    """Only from engines that give text instead of token ids (a provider's API)."""
    cached_tokens: int = 0
    prompt_tokens: int | None = None


class EngineStatus(msgspec.Struct, frozen=True):
    """Room and load of an engine; `kv_used_fraction` from 0 to 1."""

    kv_capacity_tokens: int
    running: int
    waiting: int
    kv_used_fraction: float
    healthy: bool


class Detokenizer(Protocol):
    """Incremental decoding: emits whole characters only."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what is half a character is kept back."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end."""
        ...


class Engine(Protocol):
    """A model that continues a prompt."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def detokenizer(self) -> Detokenizer: ...

    def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """Stream the reply after the saved tokens. Raises EngineFailed when the engine breaks.

        The engine-side request id is `<generation id>/<attempt>`, so that it is used once.
        """
        ...

    async def abort(self, generation_id: str, attempt: int) -> None:
        """End it before the next step and free its blocks; no-op when unknown."""
        ...

    def status(self) -> EngineStatus: ...


class TokenCounter(Protocol):
    """Counts with the model's own tokenizer."""

    def count(self, text: str) -> int: ...

    def prompt(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of a whole prompt with the chat template."""
        ...


# --- identity ----------------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """A verified caller."""

    user_id: str


class TokenVerifier(Protocol):
    """Verifies issuer, audience, algorithm, signature and expiry."""

    async def verify(self, token: str) -> Identity:
        """Raises Unauthenticated."""
        ...
