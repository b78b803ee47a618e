"""What sending and regenerating share: claim, save, queue; attach to what was claimed before; recover."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

import msgspec

from chat import tracing
from chat.catalogue import Catalogue
from chat.errors import ChatError, ConversationBusy, IdempotencyConflict, InternalError, NotFound, Unavailable
from chat.ids import new_id, now_ms, rfc3339
from chat.keys import HOLD_SECONDS
from chat.model import Generation, GenerationRequest, GenerationStatus, Job, Message, MessageStatus, Role, StoredMessage
from chat.ports import (
    AccountStore,
    BeginStatus,
    ConversationStore,
    GenerationStore,
    Lanes,
    NewTurn,
    OpenedConversation,
    QueuePlace,
    Send,
    TokenBuffer,
    TokenCounter,
)
from chat.settings import ModelSpec, PlanSpec
from chat.usecases.context import Context, ContextBuilder

NEWEST = 40
"""Messages read when a conversation is opened: more than a usual context holds, and one page of DynamoDB."""

TRIES = 5
"""Concurrent sends to one conversation make each other read again; more than this is no accident."""

PAGES = 20
"""Further pages of history read for one prompt, at most."""

ACCOUNT_SECONDS = 30.0
_CACHED_ACCOUNTS = 50_000


class StartedGeneration(msgspec.Struct, frozen=True):
    """A generation to follow. `attached`: it had been started before."""

    generation_id: str
    conversation_id: str
    pool: str
    place: QueuePlace | None
    attached: bool


@dataclass(frozen=True)
class Ask:
    """What a send or a regeneration asks for; `max_tokens` None is the plan's default."""

    user_id: str
    conversation_id: str
    client_message_id: str
    fingerprint: str
    model: str | None
    max_tokens: int | None


Draft = Callable[[OpenedConversation], Awaitable[tuple[StoredMessage | None, list[StoredMessage]]]]
"""From the opened conversation: the user's new message, if any, and the history newest first that ends the prompt."""


class Turns:
    """Starts turns. Every step is idempotent or fenced, so a crash after any of them is mended by the same send."""

    def __init__(
        self,
        conversations: ConversationStore,
        generations: GenerationStore,
        accounts: AccountStore,
        buffer: TokenBuffer,
        lanes: Lanes,
        counter: TokenCounter,
        catalogue: Catalogue,
        context: ContextBuilder,
        temperature: float,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.conversations, self.generations, self._accounts = conversations, generations, accounts
        self._buffer, self._lanes = buffer, lanes
        self.counter, self._catalogue, self._context = counter, catalogue, context
        self._temperature, self.clock = temperature, clock
        self._plans: dict[str, tuple[float, PlanSpec]] = {}
        self._launches: set[asyncio.Task[StartedGeneration | BeginStatus]] = set()

    async def start(self, ask: Ask, draft: Draft) -> StartedGeneration:
        """Begin the turn, or attach to the one that this clientMessageId began before."""
        read_us = tracing.clock_us()
        plan, opened = await self._plan_and_conversation(ask)
        for _ in range(TRIES):
            opened_us = tracing.clock_us()
            if opened.active_generation_id is not None:
                known = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                if known is not None:
                    return await self._attach(ask, known)
                await self._make_way(ask.conversation_id, opened.active_generation_id)
            else:
                try:
                    turn, context = await self._turn(ask, plan, opened, draft)
                except ChatError:
                    # What was accepted once stays accepted, whatever plan, models or limits are by now.
                    known = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                    if known is None:
                        raise
                    return await self._attach(ask, known)
                started = await self._unhindered(
                    self._launch(ask.user_id, turn, context, {"read": read_us, "opened": opened_us})
                )
                if isinstance(started, StartedGeneration):
                    return started
                if started is BeginStatus.GONE:
                    raise NotFound("There is no such conversation.")
                known = None
                if started is BeginStatus.CLAIMED:
                    known = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                if known is not None:
                    return await self._attach(ask, known)
            opened = await self.conversations.open(ask.user_id, ask.conversation_id, NEWEST)
        raise Unavailable("Too many messages at once in this conversation; try again.", retry_after_seconds=1)

    async def recover(self, generation: Generation) -> StartedGeneration:
        """Queue a saved generation that the buffer does not know: a crash came between, or Valkey lost it."""
        history = await self.history_from(
            generation.user_id, generation.conversation_id, generation.reply_seq, generation.parent_id
        )
        model = self._model_of(generation)
        context = await self._fill(generation.user_id, history, model, generation.max_tokens)
        place = await self._queue(generation, context)
        return _started(generation, place, attached=True)

    async def history_from(
        self, user_id: str, conversation_id: str, before: int, message_id: str | None
    ) -> list[StoredMessage]:
        """Messages newest first from `message_id`, which is below number `before`. Raises NotFound."""
        following: int | None = before
        for _ in range(PAGES):
            found, following = await self.conversations.messages(user_id, conversation_id, following, NEWEST)
            for place, stored in enumerate(found):
                if stored.message.message_id == message_id:
                    return found[place:]
            if following is None:
                break
        raise NotFound("The message that was to be answered is not there.")

    async def _plan_and_conversation(self, ask: Ask) -> tuple[PlanSpec, OpenedConversation]:
        """The caller's plan, at most 30 seconds old, and the conversation, at the same time."""
        opening = self.conversations.open(ask.user_id, ask.conversation_id, NEWEST)
        known = self._plans.get(ask.user_id)
        if known is not None and time.monotonic() - known[0] < ACCOUNT_SECONDS:
            return known[1], await opening
        account, opened = await asyncio.gather(self._accounts.get(ask.user_id), opening)
        plan = self._catalogue.plan(account.plan)
        if len(self._plans) >= _CACHED_ACCOUNTS:
            self._plans.clear()
        self._plans[ask.user_id] = (time.monotonic(), plan)
        return plan, opened

    async def _unhindered(
        self, launch: Coroutine[None, None, StartedGeneration | BeginStatus]
    ) -> StartedGeneration | BeginStatus:
        """A client that goes away between saving and queueing must not leave a turn that never runs."""
        task = asyncio.create_task(launch)
        self._launches.add(task)
        task.add_done_callback(self._launches.discard)
        return await asyncio.shield(task)

    async def _launch(
        self, user_id: str, turn: NewTurn, context: Context, marks: Mapping[str, int], old: Send | None = None
    ) -> StartedGeneration | BeginStatus:
        """Save and queue; `old` is the refused send that is tried again."""
        if old is None:
            status = await self.conversations.begin_turn(user_id, turn)
        else:
            status = await self.conversations.retry_turn(user_id, old, turn)
        if status is not BeginStatus.CREATED:
            return status
        generation = turn.generation
        for stage, at_us in marks.items():
            tracing.mark(generation.generation_id, stage, at_us)
        tracing.mark(generation.generation_id, "saved")
        try:
            place = await self._queue(generation, context)
        except Unavailable as error:
            with contextlib.suppress(Unavailable):
                await self.generations.refuse(generation.generation_id, self.clock())
            raise Unavailable(
                "The message is saved but could not be queued; send it again with the same clientMessageId."
            ) from error
        return _started(generation, place, attached=False)

    async def _attach(self, ask: Ask, known: Send) -> StartedGeneration:
        if known.fingerprint != ask.fingerprint:
            raise IdempotencyConflict("This clientMessageId was used with another content in this conversation.")
        generation = await self.generations.get(known.generation_id)
        if generation is None:
            raise InternalError("The claimed reply is not there; send with a new clientMessageId.")
        if generation.status is GenerationStatus.REFUSED:
            return await self._retry(ask, known, generation)
        place = None if generation.status.final else await self._ensure_queued(generation)
        return _started(generation, place, attached=True)

    async def _retry(self, ask: Ask, known: Send, refused: Generation) -> StartedGeneration:
        """A refused send gets a new generation in the same place."""
        now = self.clock()
        generation = msgspec.structs.replace(
            refused,
            generation_id=new_id("gen", now),
            status=GenerationStatus.QUEUED,
            created_at=rfc3339(now),
            expires_at=now + HOLD_SECONDS * 1000,
            finish_reason=None,
            error=None,
            finished_at=None,
        )
        history = await self.history_from(ask.user_id, ask.conversation_id, refused.reply_seq, refused.parent_id)
        context = await self._fill(ask.user_id, history, self._model_of(refused), refused.max_tokens)
        send = msgspec.structs.replace(known, generation_id=generation.generation_id)
        turn = NewTurn(send, None, _reply(generation), generation, known.reply_seq, title=None)
        for _ in range(TRIES):
            started = await self._unhindered(self._launch(ask.user_id, turn, context, {}, old=known))
            if isinstance(started, StartedGeneration):
                return started
            if started is BeginStatus.GONE:
                raise NotFound("There is no such conversation.")
            if started is BeginStatus.CLAIMED:
                current = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                if current is not None and current.generation_id != known.generation_id:
                    return await self._attach(ask, current)
            opened = await self.conversations.open(ask.user_id, ask.conversation_id, 0)
            if opened.active_generation_id is not None:
                await self._make_way(ask.conversation_id, opened.active_generation_id)
        raise Unavailable("Too many messages at once in this conversation; try again.", retry_after_seconds=1)

    async def _make_way(self, conversation_id: str, active_id: str) -> None:
        """Raises ConversationBusy, unless what holds the conversation is over. What holds it must also run:
        one that a crash or Valkey lost is queued again, so that no conversation is busy for ever."""
        active = await self.generations.get(active_id)
        if active is None or active.status.final:
            await self.conversations.release(conversation_id, active_id)
            return
        await self._ensure_queued(active)
        raise ConversationBusy(
            "Another reply is running in this conversation; follow or stop it first.", generation_id=active_id
        )

    async def _ensure_queued(self, generation: Generation) -> QueuePlace | None:
        """An unfinished generation runs, or is queued again. A job too many is harmless: it meets a sealed outcome."""
        live = await self._buffer.live(generation.generation_id)
        if live is None:
            return (await self.recover(generation)).place
        if live.attempt > 0 or live.last_seq > 0 or live.sealed:
            return None
        place = await self._lanes.place(generation.pool, generation.generation_id)
        if place is not None:
            return place
        return await self._lanes.enqueue(generation.pool, self._job(generation, generation.hold_tokens))

    async def _queue(self, generation: Generation, context: Context) -> QueuePlace:
        request = GenerationRequest(
            generation_id=generation.generation_id,
            user_id=generation.user_id,
            conversation_id=generation.conversation_id,
            message_id=generation.message_id,
            reply_seq=generation.reply_seq,
            plan=generation.plan,
            pool=generation.pool,
            model=generation.model,
            messages=context.messages,
            max_tokens=context.max_tokens,
            prompt_tokens=context.prompt_tokens,
            temperature=self._temperature,
            created_at_ms=self.clock(),
        )
        await self._buffer.open(request)
        job = self._job(generation, context.prompt_tokens + context.max_tokens)
        place = await self._lanes.enqueue(generation.pool, job)
        tracing.mark(generation.generation_id, "enqueued")
        return place

    def _job(self, generation: Generation, kv_tokens: int) -> Job:
        return Job(
            generation.generation_id,
            generation.user_id,
            generation.conversation_id,
            generation.plan,
            kv_tokens,
            self.clock(),
        )

    async def _fill(self, user_id: str, history: list[StoredMessage], model: ModelSpec, reply_tokens: int) -> Context:
        """The context, with as many pages of history as it has room for."""
        conversation_id = history[0].message.conversation_id
        context = self._context.build(history, model, reply_tokens)
        for _ in range(PAGES):
            oldest = history[-1].message.seq
            if not context.room_left or oldest <= 1:
                break
            found, _ = await self.conversations.messages(user_id, conversation_id, oldest, NEWEST)
            if not found:
                break
            history = [*history, *found]
            context = self._context.build(history, model, reply_tokens)
        return context

    async def _turn(
        self, ask: Ask, plan: PlanSpec, opened: OpenedConversation, draft: Draft
    ) -> tuple[NewTurn, Context]:
        model = self._catalogue.choose(ask.model, opened.conversation.model, plan)
        reply_tokens = self._catalogue.reply_tokens(ask.max_tokens, plan)
        user, history = await draft(opened)
        context = await self._fill(ask.user_id, history, model, reply_tokens)
        now = self.clock()
        last = opened.conversation.last_seq
        reply_seq = last + (1 if user is None else 2)
        question = history[0].message
        generation = Generation(
            generation_id=new_id("gen", now),
            user_id=ask.user_id,
            conversation_id=ask.conversation_id,
            message_id=new_id("msg", now + 1),
            reply_seq=reply_seq,
            parent_id=question.message_id,
            plan=plan.name,
            model=model.id,
            pool=model.pool,
            status=GenerationStatus.QUEUED,
            created_at=rfc3339(now),
            max_tokens=context.max_tokens,
            prompt_tokens=context.prompt_tokens,
            hold_tokens=context.prompt_tokens + context.max_tokens,
            expires_at=now + HOLD_SECONDS * 1000,
            client_message_id=ask.client_message_id,
        )
        send = Send(ask.client_message_id, ask.fingerprint, generation.generation_id, question.seq, reply_seq)
        title = None if user is None or opened.conversation.title else title_of(user.message.content)
        return NewTurn(send, user, _reply(generation), generation, last, title), context

    def _model_of(self, generation: Generation) -> ModelSpec:
        """A model that is no longer in the catalogue keeps the room that it was given."""
        known = self._catalogue.model(generation.model)
        return known or ModelSpec(
            generation.model, generation.pool, generation.prompt_tokens + generation.max_tokens, [], 0, 0
        )


def _started(generation: Generation, place: QueuePlace | None, *, attached: bool) -> StartedGeneration:
    return StartedGeneration(
        generation.generation_id, generation.conversation_id, generation.pool, place, attached=attached
    )


def fingerprint(*parts: object) -> str:
    """A digest of what was asked for; the same id with another digest is a conflict."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def title_of(content: str) -> str:
    """A first title: the beginning of the first message, on one line."""
    line = " ".join(content[:400].split())
    return line if len(line) <= 60 else line[:59].rstrip() + "…"


def _reply(generation: Generation) -> Message:
    return Message(
        message_id=generation.message_id,
        conversation_id=generation.conversation_id,
        seq=generation.reply_seq,
        role=Role.ASSISTANT,
        content="",
        status=MessageStatus.STREAMING,
        model=generation.model,
        parent_id=generation.parent_id,
        generation_id=generation.generation_id,
        created_at=generation.created_at,
    )
