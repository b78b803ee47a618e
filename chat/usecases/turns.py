"""What sending and regenerating share: claim, save, queue; attach to what was claimed before; recover."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from chat import tracing
from chat.catalogue import Catalogue
from chat.errors import ConversationBusy, IdempotencyConflict, InternalError, NotFound, Unavailable
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
    """What a send or a regeneration asks for, once it is known to be allowed."""

    user_id: str
    conversation_id: str
    client_message_id: str
    fingerprint: str
    plan: PlanSpec
    model: str | None
    reply_tokens: int


Draft = Callable[[OpenedConversation], tuple[StoredMessage | None, list[StoredMessage]]]
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
        self.counter, self.catalogue, self._context = counter, catalogue, context
        self._temperature, self.clock = temperature, clock
        self._plans: dict[str, tuple[float, PlanSpec]] = {}

    async def plan(self, user_id: str) -> PlanSpec:
        """The caller's plan, at most 30 seconds old."""
        known = self._plans.get(user_id)
        if known is not None and time.monotonic() - known[0] < ACCOUNT_SECONDS:
            return known[1]
        plan = self.catalogue.plan((await self._accounts.get(user_id)).plan)
        if len(self._plans) >= _CACHED_ACCOUNTS:
            self._plans.clear()
        self._plans[user_id] = (time.monotonic(), plan)
        return plan

    async def start(self, ask: Ask, draft: Draft) -> StartedGeneration:
        """Begin the turn, or attach to the one that this clientMessageId began before."""
        for _ in range(TRIES):
            read_us = tracing.clock_us()
            opened = await self.conversations.open(ask.user_id, ask.conversation_id, NEWEST)
            opened_us = tracing.clock_us()
            if opened.active_generation_id is not None:
                known = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                if known is not None:
                    return await self._attach(ask, known)
                if await self._runs(opened.active_generation_id):
                    raise ConversationBusy(
                        "Another reply is running in this conversation; follow or stop it first.",
                        generation_id=opened.active_generation_id,
                    )
                await self.conversations.release(ask.conversation_id, opened.active_generation_id)
                continue
            turn, context = self._turn(ask, opened, draft)
            status = await self.conversations.begin_turn(ask.user_id, turn)
            if status is BeginStatus.CREATED:
                ident = turn.generation.generation_id
                tracing.mark(ident, "read", read_us)
                tracing.mark(ident, "opened", opened_us)
                tracing.mark(ident, "saved")
                return await self._queue(turn.generation, context, attached=False)
            if status is BeginStatus.CLAIMED:
                known = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
                if known is not None:
                    return await self._attach(ask, known)
            if status is BeginStatus.GONE:
                raise NotFound("There is no such conversation.")
        raise Unavailable("Too many messages at once in this conversation; try again.", retry_after_seconds=1)

    async def recover(self, generation: Generation) -> StartedGeneration:
        """Queue a saved generation that the buffer does not know: a crash came between, or Valkey lost it."""
        context = self._context_of(generation, await self._history(generation))
        return await self._queue(generation, context, attached=True)

    async def _attach(self, ask: Ask, known: Send) -> StartedGeneration:
        if known.fingerprint != ask.fingerprint:
            raise IdempotencyConflict("This clientMessageId was used with another content in this conversation.")
        generation = await self.generations.get(known.generation_id)
        if generation is None:
            raise InternalError("The claimed reply is not there; send with a new clientMessageId.")
        if generation.status is GenerationStatus.REFUSED:
            return await self._retry(ask, known, generation)
        if not generation.status.final and await self._buffer.live(generation.generation_id) is None:
            return await self.recover(generation)
        return StartedGeneration(
            generation.generation_id, ask.conversation_id, generation.pool, place=None, attached=True
        )

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
        history = await self._history(generation)
        context = self._context_of(generation, history)
        send = msgspec.structs.replace(known, generation_id=generation.generation_id)
        turn = NewTurn(send, None, _reply(generation), generation, known.reply_seq, title=None)
        status = await self.conversations.retry_turn(ask.user_id, known, turn)
        if status is BeginStatus.CREATED:
            return await self._queue(generation, context, attached=False)
        if status is BeginStatus.GONE:
            raise NotFound("There is no such conversation.")
        if status is BeginStatus.CLAIMED:
            current = await self.conversations.find_send(ask.conversation_id, ask.client_message_id)
            if current is not None and current.generation_id != known.generation_id:
                return await self._attach(ask, current)
        raise ConversationBusy("Another reply is running in this conversation; follow or stop it first.")

    async def _queue(self, generation: Generation, context: Context, *, attached: bool) -> StartedGeneration:
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
        job = Job(
            generation.generation_id,
            generation.user_id,
            generation.conversation_id,
            generation.plan,
            context.prompt_tokens + context.max_tokens,
            self.clock(),
        )
        try:
            await self._buffer.open(request)
            place = await self._lanes.enqueue(generation.pool, job)
        except Unavailable as error:
            with contextlib.suppress(Unavailable):
                await self.generations.refuse(generation.generation_id, self.clock())
            raise Unavailable(
                "The message is saved but could not be queued; send it again with the same clientMessageId."
            ) from error
        tracing.mark(generation.generation_id, "enqueued")
        return StartedGeneration(
            generation.generation_id, generation.conversation_id, generation.pool, place, attached=attached
        )

    def _turn(self, ask: Ask, opened: OpenedConversation, draft: Draft) -> tuple[NewTurn, Context]:
        now = self.clock()
        model = self.catalogue.choose(ask.model, opened.conversation.model, ask.plan)
        user, history = draft(opened)
        context = self._context.build(history, model, ask.reply_tokens)
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
            plan=ask.plan.name,
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

    async def _runs(self, generation_id: str) -> bool:
        generation = await self.generations.get(generation_id)
        return generation is not None and not generation.status.final

    async def _history(self, generation: Generation) -> list[StoredMessage]:
        """Newest first from the message that the generation answers."""
        found, _ = await self.conversations.messages(
            generation.user_id, generation.conversation_id, generation.reply_seq, NEWEST
        )
        for place, stored in enumerate(found):
            if stored.message.message_id == generation.parent_id:
                return found[place:]
        raise NotFound("The message that was to be answered is not there.")

    def _context_of(self, generation: Generation, history: list[StoredMessage]) -> Context:
        model = self.catalogue.model(generation.model) or ModelSpec(
            generation.model, generation.pool, generation.prompt_tokens + generation.max_tokens, [], 0, 0
        )
        return self._context.build(history, model, generation.max_tokens)


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
