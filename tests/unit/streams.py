"""A token buffer, its live events and the stores around it, in memory, for tests of following."""

import asyncio
from collections.abc import Callable

from chat import frames
from chat.errors import Unavailable
from chat.model import (
    EventKind,
    FinishReason,
    Generation,
    GenerationStatus,
    Message,
    MessageStatus,
    Role,
    StoredMessage,
)
from chat.ports import LiveState, QueuePlace

GEN = "gen_1"


def reply(events: int) -> list[bytes]:
    """`started`, deltas and `done`: so many events in all."""
    middle = [frames.durable(seq, EventKind.DELTA, {"text": f"<{seq}>"}) for seq in range(2, events)]
    return [
        frames.durable(1, EventKind.STARTED, {"generationId": GEN}),
        *middle,
        frames.durable(events, EventKind.DONE, {"finishReason": "stop"}),
    ]


def saved_generation(status: GenerationStatus = GenerationStatus.COMPLETED, last: int = 9) -> Generation:
    return Generation(
        generation_id=GEN,
        user_id="ada",
        conversation_id="conv_1",
        message_id="msg_2",
        reply_seq=2,
        parent_id="msg_1",
        plan="free",
        model="sim-large",
        pool="large",
        status=status,
        created_at="2026-01-01T00:00:00Z",
        max_tokens=10,
        prompt_tokens=5,
        hold_tokens=0,
        expires_at=0,
        client_message_id="c1",
        finish_reason=FinishReason.STOP if status.final else None,
        last_event_id=last if status.final else 0,
    )


class FakeSubscription:
    """Frames that were published; drops some when told to."""

    def __init__(self, hub: "FakeStore") -> None:
        self._hub, self._frames, self._gap, self.closed = hub, [], False, False
        self._changed = asyncio.Event()
        self._waiting, self._take = False, lambda frame: False

    def deliver(self, frame: bytes) -> None:
        if self._waiting and not self._changed.is_set() and self._take(frame):
            return
        self._frames.append(frame)
        self._changed.set()

    def pipe(self, take: Callable[[bytes], bool]) -> None:
        self._take = take

    def lose(self) -> None:
        self._frames.clear()
        self._gap = True
        self._changed.set()

    async def next(self, timeout_seconds: float) -> bytes | None:
        if not self._frames and not self._gap:
            self._changed.clear()
            self._waiting = True
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_seconds)
            except TimeoutError:
                return None
            finally:
                self._waiting = False
        if self._gap:
            self._gap = False
            return None
        return self._frames.pop(0)

    def ready(self) -> list[bytes]:
        found, self._frames = self._frames, []
        return found

    async def close(self) -> None:
        self.closed = True
        self._hub.subscriptions.remove(self)


class FakeStore:
    """Buffer, wakeups, lanes, generations, conversations and recovery, all in one. `lossy` drops publishes."""

    def __init__(self) -> None:
        self.log: list[bytes] | None = []
        self.user = "ada"
        self.lossy: Callable[[bytes], bool] = lambda frame: False
        self.subscriptions: list[FakeSubscription] = []
        self.generation: Generation | None = None
        self.text = ""
        self.places: list[QueuePlace | None] = []
        self.down = False
        self.reads = 0
        self.recovered: list[str] = []

    def append(self, frame: bytes) -> None:
        assert self.log is not None
        self.log.append(frame)
        for one in self.subscriptions:
            if not self.lossy(frame):
                one.deliver(frame)

    def _check(self) -> None:
        if self.down:
            raise Unavailable("away")

    async def live(self, generation_id: str) -> LiveState | None:
        self._check()
        if self.log is None or generation_id != GEN:
            return None
        ended = bool(self.log) and frames.is_last(self.log[-1])
        return LiveState(self.user, "conv_1", "large", 1, len(self.log), False, ended, ended)

    async def frames(self, generation_id: str, after: int, limit: int = 256) -> list[bytes]:
        self._check()
        self.reads += 1
        await asyncio.sleep(0)
        return [one for one in self.log or [] if frames.seq_of(one) > after][:limit]

    async def subscribe(self, generation_id: str) -> FakeSubscription:
        self._check()
        self.subscriptions.append(FakeSubscription(self))
        return self.subscriptions[-1]

    async def place(self, pool: str, generation_id: str) -> QueuePlace | None:
        self._check()
        return self.places.pop(0) if len(self.places) > 1 else (self.places or [None])[0]

    async def get(self, generation_id: str) -> Generation | None:
        return self.generation if generation_id == GEN else None

    async def messages(
        self, user_id: str, conversation_id: str, before: int | None, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        assert (user_id, conversation_id, before, limit) == ("ada", "conv_1", 3, 1)
        message = Message(
            "msg_2",
            "conv_1",
            2,
            Role.ASSISTANT,
            self.text,
            MessageStatus.COMPLETED,
            "m",
            "msg_1",
            GEN,
            "2026-01-01T00:00:00Z",
        )
        return [StoredMessage(message, 3)], None

    async def __call__(self, generation: Generation) -> object:
        self.recovered.append(generation.generation_id)
        self.log = []
        return None


class Client:
    """Reads what a follower emits, as a browser does: keeps the text and the last id; may drop after so many bytes."""

    def __init__(self) -> None:
        self.got = b""
        self.pause: asyncio.Event | None = None
        self.refuses: Callable[[], bool] = lambda: False
        self.at_once = 0

    async def emit(self, data: bytes) -> None:
        if self.pause is not None:
            await self.pause.wait()
        self.got += data

    def emit_now(self, data: bytes) -> bool:
        if self.pause is not None or self.refuses():
            return False
        self.got += data
        self.at_once += 1
        return True

    @property
    def frames(self) -> list[bytes]:
        """Whole frames, without comments."""
        whole = self.got[: self.got.rfind(b"\n\n") + 2]
        return [one + b"\n\n" for one in whole.split(b"\n\n") if one and not one.startswith((b":", b"retry"))]

    @property
    def durable(self) -> list[bytes]:
        return [one for one in self.frames if one.startswith(b"id: ")]


async def until(condition: Callable[[], object], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
