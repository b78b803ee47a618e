"""Conversations, turns, generations and accounts: what DynamoDB keeps."""

from enum import StrEnum
from typing import Protocol

import msgspec

from chat.model import Conversation, Generation, Message, Outcome, StoredMessage


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

    async def delete(self, user_id: str, conversation_id: str) -> str | None:
        """Raises NotFound. The conversation is gone at once. Answers the generation that was running in it."""
        ...

    async def purge(self, conversation_id: str) -> bool:
        """Remove rows of a deleted conversation in bounded batches; True when none is left. Idempotent."""
        ...

    async def release(self, conversation_id: str, generation_id: str) -> None:
        """Free a conversation that is held by a generation that is over, or never was; else a no-op."""
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

        Idempotent: the first outcome stays and is answered. Raises NotFound for an unknown generation.
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
