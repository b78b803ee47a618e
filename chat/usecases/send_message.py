"""Send a message: validate, claim, moderate, save, build the context, queue."""

from typing import Protocol

from chat.ids import new_id, rfc3339
from chat.model import Message, MessageStatus, Role, StoredMessage
from chat.ports import OpenedConversation
from chat.requests import SendRequest
from chat.usecases.turns import Ask, StartedGeneration, Turns, fingerprint

__all__ = ["AllowAll", "Moderation", "SendMessage", "StartedGeneration"]


class Moderation(Protocol):
    """The named step at which content may be refused."""

    async def check(self, user_id: str, content: str) -> None:
        """Raises InvalidRequest(param=content) for what must not be answered."""
        ...


class AllowAll:
    """No policy of our own; the model's is what there is."""

    async def check(self, user_id: str, content: str) -> None:
        """See Moderation.check."""


class SendMessage:
    """`POST /v1/conversations/{id}/messages`."""

    def __init__(self, turns: Turns, moderation: Moderation | None = None) -> None:
        self._turns = turns
        self._moderation = moderation or AllowAll()

    async def __call__(self, user_id: str, conversation_id: str, request: SendRequest) -> StartedGeneration:
        """The generation to follow. Raises what `api.md` lists under refusals."""
        turns = self._turns
        plan = await turns.plan(user_id)
        turns.catalogue.check(request.model, plan)
        reply_tokens = turns.catalogue.reply_tokens(request.max_tokens, plan)
        await self._moderation.check(user_id, request.content)
        tokens = turns.counter.count(request.content)
        ask = Ask(
            user_id,
            conversation_id,
            request.client_message_id,
            fingerprint("send", request.content, request.model, request.max_tokens),
            plan,
            request.model,
            reply_tokens,
        )

        def draft(opened: OpenedConversation) -> tuple[StoredMessage, list[StoredMessage]]:
            now = turns.clock()
            message = Message(
                message_id=new_id("msg", now),
                conversation_id=conversation_id,
                seq=opened.conversation.last_seq + 1,
                role=Role.USER,
                content=request.content,
                status=MessageStatus.COMPLETED,
                model=None,
                parent_id=opened.newest[0].message.message_id if opened.newest else None,
                generation_id=None,
                created_at=rfc3339(now),
            )
            stored = StoredMessage(message, tokens)
            return stored, [stored, *opened.newest]

        return await turns.start(ask, draft)
