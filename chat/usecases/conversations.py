"""Create, list, read, rename and delete conversations; read their history."""

import contextlib

import msgspec

from chat.catalogue import Catalogue
from chat.errors import NotFound
from chat.ids import new_id, now_ms, rfc3339
from chat.model import Conversation, Message
from chat.ports import AccountStore, ConversationStore
from chat.requests import CreateConversationRequest
from chat.settings import ModelSpec
from chat.usecases.cancel import CancelGeneration


class ConversationPage(msgspec.Struct, frozen=True, rename="camel"):
    """By last update, newest first."""

    data: list[Conversation]
    next_cursor: str | None


class MessagePage(msgspec.Struct, frozen=True, rename="camel"):
    """Newest first."""

    data: list[Message]
    next_before: int | None


class CreateConversation:
    """`POST /v1/conversations`."""

    def __init__(self, conversations: ConversationStore, accounts: AccountStore, catalogue: Catalogue) -> None:
        self._conversations, self._accounts, self._catalogue = conversations, accounts, catalogue

    async def __call__(self, user_id: str, request: CreateConversationRequest) -> Conversation:
        """Raises InvalidRequest(param=model)."""
        if request.model is not None:
            account = await self._accounts.get(user_id)
            self._catalogue.check(request.model, self._catalogue.plan(account.plan))
        now = now_ms()
        at = rfc3339(now)
        made = Conversation(new_id("conv", now), request.title, request.model, at, at, 0)
        await self._conversations.create(user_id, made)
        return made


class ListConversations:
    """`GET /v1/conversations`."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._conversations = conversations

    async def __call__(self, user_id: str, cursor: str | None, limit: int) -> ConversationPage:
        """Raises InvalidRequest(param=cursor)."""
        return ConversationPage(*await self._conversations.page(user_id, cursor, limit))


class GetConversation:
    """`GET /v1/conversations/{id}`."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._conversations = conversations

    async def __call__(self, user_id: str, conversation_id: str) -> Conversation:
        """Raises NotFound."""
        return (await self._conversations.open(user_id, conversation_id, 0)).conversation


class DeleteConversation:
    """`DELETE /v1/conversations/{id}`: gone at once; what runs is stopped, the rows are removed."""

    def __init__(self, conversations: ConversationStore, cancel: CancelGeneration) -> None:
        self._conversations, self._cancel = conversations, cancel

    async def __call__(self, user_id: str, conversation_id: str) -> None:
        """Raises NotFound."""
        running = await self._conversations.delete(user_id, conversation_id)
        if running is not None:
            with contextlib.suppress(NotFound):
                await self._cancel(user_id, running)
        await self._conversations.purge(conversation_id)


class ListMessages:
    """`GET /v1/conversations/{id}/messages`."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._conversations = conversations

    async def __call__(self, user_id: str, conversation_id: str, before: int | None, limit: int) -> MessagePage:
        """Raises NotFound."""
        found, following = await self._conversations.messages(user_id, conversation_id, before, limit)
        return MessagePage([stored.message for stored in found], following)


class ModelPage(msgspec.Struct, frozen=True):
    """The models that a plan may ask for."""

    data: list[ModelSpec]


class ListModels:
    """`GET /v1/models`."""

    def __init__(self, accounts: AccountStore, catalogue: Catalogue) -> None:
        self._accounts, self._catalogue = accounts, catalogue

    async def __call__(self, user_id: str) -> ModelPage:
        """By the caller's plan."""
        account = await self._accounts.get(user_id)
        return ModelPage(self._catalogue.allowed(self._catalogue.plan(account.plan)))
