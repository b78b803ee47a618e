"""The token buffer and its live events: what Valkey keeps of a generation, in one slot."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from chat.model import EventKind, GenerationRequest, Outcome


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
        """Raise the fence to `attempt`. Raises Fenced when a later attempt exists, UnknownGeneration.

        A sealed generation is answered to any attempt and keeps its fence: only the steps after the seal are left.
        """
        ...

    async def append(
        self,
        generation_id: str,
        attempt: int,
        entries: Sequence[BufferEntry],
        owner: GenerationRequest | None = None,
    ) -> int:
        """Write contiguous entries; those already there are skipped. Answers the last seq in the buffer.

        When the buffer lost entries (last seq < first given - 1) nothing is written: send again from
        last + 1. A lost generation (0) is made anew by an append that begins at seq 1 and
        names its `owner`. Raises Fenced.
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

    def pipe(self, take: Callable[[bytes], bool]) -> None:
        """Offer each frame that arrives while `next` waits to `take` first; what it answers False to goes to `next`.

        `take` is called where frames are received, so it must be quick. The timeout of `next` begins anew with
        each frame that it took.
        """
        ...

    def lose(self) -> None:
        """Wake whoever waits, as if frames had been dropped."""
        ...

    def ready(self) -> list[bytes]:
        """Everything that has arrived, without waiting."""
        ...

    async def close(self) -> None: ...


class Wakeups(Protocol):
    """Live events: one subscription connection a shard a process, shared by all followers."""

    async def subscribe(self, generation_id: str) -> Subscription:
        """Returns once the subscription is confirmed, so that a read after it leaves no hole."""
        ...
