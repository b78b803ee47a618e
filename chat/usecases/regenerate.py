"""Ask for a reply again: a new message with the same parent; the earlier one is kept."""

from chat.errors import ConversationBusy, InvalidRequest, NotFound
from chat.model import Message, MessageStatus, Role, StoredMessage
from chat.ports import OpenedConversation
from chat.requests import RegenerateRequest
from chat.usecases.turns import Ask, StartedGeneration, Turns, fingerprint


class Regenerate:
    """`POST /v1/conversations/{id}/messages/{seq}/regenerate`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __call__(
        self, user_id: str, conversation_id: str, seq: int, request: RegenerateRequest
    ) -> StartedGeneration:
        """The generation to follow. `seq` is a reply's. Raises NotFound, InvalidRequest(param=seq) and as a send."""
        turns = self._turns

        async def draft(opened: OpenedConversation) -> tuple[None, list[StoredMessage]]:
            reply = await self._reply(user_id, opened, seq)
            for place, stored in enumerate(opened.newest):
                if stored.message.message_id == reply.parent_id:
                    return None, opened.newest[place:]
            return None, await turns.history_from(user_id, conversation_id, seq, reply.parent_id)

        ask = Ask(
            user_id,
            conversation_id,
            request.client_message_id,
            fingerprint("regenerate", seq, request.model),
            request.model,
            max_tokens=None,
        )
        return await turns.start(ask, draft)

    async def _reply(self, user_id: str, opened: OpenedConversation, seq: int) -> Message:
        if not 0 < seq <= opened.conversation.last_seq:
            raise NotFound("There is no such message.")
        found = [stored for stored in opened.newest if stored.message.seq == seq]
        if not found:
            ident = opened.conversation.conversation_id
            found, _ = await self._turns.conversations.messages(user_id, ident, seq + 1, 1)
        reply = found[0].message if found else None
        if reply is None or reply.seq != seq:
            raise NotFound("There is no such message.")
        if reply.role is not Role.ASSISTANT:
            raise InvalidRequest("seq must be the number of a reply, not of a message of yours.", param="seq")
        if reply.status is MessageStatus.STREAMING:
            raise ConversationBusy("This reply is still running; stop it first.", generation_id=reply.generation_id)
        return reply
