"""Ask for a reply again: a new message with the same parent; the earlier one is kept."""

from chat.errors import ConversationBusy, InvalidRequest, NotFound
from chat.model import MessageStatus, Role, StoredMessage
from chat.ports import OpenedConversation
from chat.requests import RegenerateRequest
from chat.usecases.turns import NEWEST, Ask, StartedGeneration, Turns, fingerprint


class Regenerate:
    """`POST /v1/conversations/{id}/messages/{seq}/regenerate`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __call__(
        self, user_id: str, conversation_id: str, seq: int, request: RegenerateRequest
    ) -> StartedGeneration:
        """The generation to follow. `seq` is a reply's. Raises NotFound, InvalidRequest(param=seq) and as a send."""
        turns = self._turns
        plan = await turns.plan(user_id)
        turns.catalogue.check(request.model, plan)
        before, _ = await turns.conversations.messages(user_id, conversation_id, seq + 1, NEWEST)
        history = _question_of(before, seq)
        ask = Ask(
            user_id,
            conversation_id,
            request.client_message_id,
            fingerprint("regenerate", seq, request.model),
            plan,
            request.model,
            turns.catalogue.reply_tokens(None, plan),
        )

        def draft(opened: OpenedConversation) -> tuple[None, list[StoredMessage]]:
            return None, history

        return await turns.start(ask, draft)


def _question_of(newest_first: list[StoredMessage], seq: int) -> list[StoredMessage]:
    """The history newest first, from the message that reply `seq` answers."""
    reply = newest_first[0].message if newest_first else None
    if reply is None or reply.seq != seq:
        raise NotFound("There is no such message.")
    if reply.role is not Role.ASSISTANT:
        raise InvalidRequest("seq must be the number of a reply, not of a message of yours.", param="seq")
    if reply.status is MessageStatus.STREAMING:
        raise ConversationBusy("This reply is still running; stop it first.", generation_id=reply.generation_id)
    for place, stored in enumerate(newest_first):
        if stored.message.message_id == reply.parent_id:
            return newest_first[place:]
    raise NotFound("The message that was answered is not there.")
