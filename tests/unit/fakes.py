"""The stores, the buffer and the lanes in memory, with the promises of `chat.ports`.

`failing` names methods that raise Unavailable; `calls` are the methods called, in order.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from chat import frames
from chat.errors import NotFound, Unavailable
from chat.ids import rfc3339
from chat.model import (
    Conversation,
    Generation,
    GenerationRequest,
    GenerationStatus,
    Job,
    Message,
    MessageStatus,
    Outcome,
    StoredMessage,
)
from chat.ports import (
    Account,
    BeginStatus,
    BufferEntry,
    Claim,
    Fenced,
    JobState,
    LiveState,
    NewTurn,
    OpenedConversation,
    QueuePlace,
    Send,
    UnknownGeneration,
)

replace = msgspec.structs.replace


class Faults:
    """Failure on demand, and a turn of the event loop in each call, so that callers interleave."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.calls: list[str] = []

    async def step(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if name in self.failing:
            raise Unavailable(f"{name} is away")


class MemoryStores(Faults):
    """ConversationStore, GenerationStore and AccountStore over the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, str] = {}
        self.conversations: dict[str, Conversation] = {}
        self.active: dict[str, str] = {}
        self.rows: dict[str, dict[int, StoredMessage]] = {}
        self.sends: dict[tuple[str, str], Send] = {}
        self.generations: dict[str, Generation] = {}
        self.ledger: list[str] = []
        self.plans: dict[str, str] = {}

    def give(self, user_id: str, conversation_id: str, model: str | None = None) -> str:
        at = rfc3339(0)
        self.owners[conversation_id] = user_id
        self.conversations[conversation_id] = Conversation(conversation_id, None, model, at, at, 0)
        self.rows[conversation_id] = {}
        return conversation_id

    def history(self, conversation_id: str) -> list[Message]:
        return [stored.message for _, stored in sorted(self.rows[conversation_id].items())]

    def _own(self, user_id: str, conversation_id: str) -> Conversation:
        if self.owners.get(conversation_id) != user_id:
            raise NotFound("no such conversation")
        return self.conversations[conversation_id]

    async def open(self, user_id: str, conversation_id: str, newest: int) -> OpenedConversation:
        await self.step("open")
        own = self._own(user_id, conversation_id)
        found = [row for _, row in sorted(self.rows[conversation_id].items(), reverse=True)]
        return OpenedConversation(own, self.active.get(conversation_id), found[:newest])

    async def messages(
        self, user_id: str, conversation_id: str, before: int | None, limit: int
    ) -> tuple[list[StoredMessage], int | None]:
        await self.step("messages")
        self._own(user_id, conversation_id)
        found = [
            row
            for seq, row in sorted(self.rows[conversation_id].items(), reverse=True)
            if before is None or seq < before
        ][:limit]
        return found, found[-1].message.seq if found and found[-1].message.seq > 1 else None

    async def begin_turn(self, user_id: str, turn: NewTurn) -> BeginStatus:
        await self.step("begin_turn")
        ident = turn.reply.conversation_id
        if (ident, turn.send.client_message_id) in self.sends:
            return BeginStatus.CLAIMED
        if self.owners.get(ident) != user_id:
            return BeginStatus.GONE
        if ident in self.active:
            return BeginStatus.BUSY
        own = self.conversations[ident]
        if own.last_seq != turn.expected_last_seq:
            return BeginStatus.MOVED
        title = own.title or turn.title
        self.conversations[ident] = replace(own, last_seq=turn.reply.seq, title=title)
        if turn.user is not None:
            self.rows[ident][turn.user.message.seq] = turn.user
        self._hold(turn)
        return BeginStatus.CREATED

    async def retry_turn(self, user_id: str, old: Send, turn: NewTurn) -> BeginStatus:
        await self.step("retry_turn")
        ident = turn.reply.conversation_id
        if self.sends[ident, old.client_message_id].generation_id != old.generation_id:
            return BeginStatus.CLAIMED
        if ident in self.active:
            return BeginStatus.BUSY
        self._hold(turn)
        return BeginStatus.CREATED

    def _hold(self, turn: NewTurn) -> None:
        ident = turn.reply.conversation_id
        self.sends[ident, turn.send.client_message_id] = turn.send
        self.rows[ident][turn.reply.seq] = StoredMessage(turn.reply, 0)
        self.generations[turn.generation.generation_id] = turn.generation
        self.active[ident] = turn.generation.generation_id

    async def find_send(self, conversation_id: str, client_message_id: str) -> Send | None:
        await self.step("find_send")
        return self.sends.get((conversation_id, client_message_id))

    async def release(self, conversation_id: str, generation_id: str) -> None:
        await self.step("release_conversation")
        if self.active.get(conversation_id) == generation_id:
            del self.active[conversation_id]

    async def get(self, ident: str) -> Any:
        """A generation, or an account."""
        await self.step("get")
        return (
            self.generations.get(ident) if ident.startswith("gen_") else Account(ident, self.plans.get(ident, "free"))
        )

    async def finish(self, generation_id: str, outcome: Outcome, last_event_id: int, now_ms: int) -> Generation:
        await self.step("finish")
        if generation_id not in self.generations:
            raise NotFound("no such generation")
        before = self.generations[generation_id]
        if before.status.final:
            return before
        self.ledger.append(generation_id)
        after = replace(
            before,
            status=outcome.finish_reason.status,
            usage=outcome.usage,
            cost=outcome.cost,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            last_event_id=last_event_id,
        )
        self._end(after, outcome.text)
        return after

    async def refuse(self, generation_id: str, now_ms: int) -> None:
        await self.step("refuse")
        before = self.generations[generation_id]
        if not before.status.final:
            self._end(replace(before, status=GenerationStatus.REFUSED), "")

    def _end(self, after: Generation, text: str) -> None:
        self.generations[after.generation_id] = after
        rows = self.rows.get(after.conversation_id, {})
        if after.reply_seq in rows:
            message = replace(rows[after.reply_seq].message, content=text, status=MessageStatus(after.status.value))
            rows[after.reply_seq] = StoredMessage(message, after.usage.output_tokens)
        if self.active.get(after.conversation_id) == after.generation_id:
            del self.active[after.conversation_id]


class MemoryBuffer(Faults):
    """TokenBuffer."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, GenerationRequest] = {}
        self.log: dict[str, list[BufferEntry]] = {}
        self.fence: dict[str, int] = {}
        self.sealed: dict[str, Outcome] = {}
        self.cancelled: set[str] = set()

    def write(self, generation_id: str, *entries: BufferEntry) -> None:
        self.log[generation_id] += entries

    def forget(self) -> None:
        for one in (self.requests, self.log, self.fence, self.sealed):
            one.clear()

    async def open(self, request: GenerationRequest) -> None:
        await self.step("open")
        self.requests.setdefault(request.generation_id, request)
        self.log.setdefault(request.generation_id, [])
        self.fence.setdefault(request.generation_id, 0)

    def _state(self, ident: str) -> LiveState:
        if ident not in self.requests:
            raise UnknownGeneration(ident)
        request, log = self.requests[ident], self.log[ident]
        return LiveState(
            request.user_id,
            request.conversation_id,
            request.pool,
            self.fence[ident],
            len(log),
            ident in self.cancelled,
            ident in self.sealed,
            bool(log) and frames.is_last(log[-1].frame),
        )

    async def live(self, generation_id: str) -> LiveState | None:
        await self.step("live")
        return self._state(generation_id) if generation_id in self.requests else None

    async def claim(self, generation_id: str, attempt: int) -> Claim:
        await self.step("claim")
        state = self._state(generation_id)
        if generation_id not in self.sealed:
            if attempt < self.fence[generation_id]:
                raise Fenced(generation_id)
            self.fence[generation_id] = attempt
        log = list(self.log[generation_id])
        return Claim(self.requests[generation_id], state, log, self.sealed.get(generation_id))

    async def seal(self, generation_id: str, attempt: int | None, outcome: Outcome) -> Outcome:
        await self.step("seal")
        self._state(generation_id)
        if generation_id not in self.sealed:
            if attempt is not None and attempt < self.fence[generation_id]:
                raise Fenced(generation_id)
            self.sealed[generation_id] = outcome
        return self.sealed[generation_id]

    async def publish_last(self, generation_id: str, frame: bytes) -> None:
        await self.step("publish_last")
        if self._state(generation_id).ended:
            return
        if frames.seq_of(frame) != len(self.log[generation_id]) + 1:
            raise Fenced(generation_id)
        self.log[generation_id].append(BufferEntry(frames.seq_of(frame), frames.kind_of(frame), frame))

    async def request_cancel(self, generation_id: str) -> LiveState | None:
        await self.step("request_cancel")
        if generation_id not in self.requests:
            return None
        self.cancelled.add(generation_id)
        return self._state(generation_id)


class MemoryLanes(Faults):
    """Lanes of one pool, as far as use cases need them."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Job] = {}
        self.dispatched: set[str] = set()
        self.enqueued = 0

    async def enqueue(self, pool: str, job: Job) -> QueuePlace:
        await self.step("enqueue")
        if job.generation_id not in self.jobs:
            self.enqueued += 1
            self.jobs[job.generation_id] = job
        return QueuePlace(len(self.jobs), 0.0)

    async def place(self, pool: str, generation_id: str) -> QueuePlace | None:
        await self.step("place")
        if generation_id not in self.jobs:
            return None
        return QueuePlace(0 if generation_id in self.dispatched else 1, 1.5)

    async def cancel(self, pool: str, generation_id: str) -> JobState:
        await self.step("cancel")
        if generation_id in self.dispatched:
            return JobState.DISPATCHED
        return JobState.QUEUED if self.jobs.pop(generation_id, None) else JobState.UNKNOWN

    async def release(self, pool: str, generation_id: str) -> None:
        await self.step("release")
        self.jobs.pop(generation_id, None)
        self.dispatched.discard(generation_id)

    def forget(self) -> None:
        self.jobs.clear()


def delta(seq: int, text: str, token_ids: Sequence[int]) -> BufferEntry:
    from chat.model import EventKind

    return BufferEntry(seq, EventKind.DELTA, frames.durable(seq, EventKind.DELTA, {"text": text}), list(token_ids))
