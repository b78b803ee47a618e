"""How things look as rows. Attribute names are the field names in camel case.

~meta          conversationId item userId updatedKey title? model? createdAt updatedAt lastSeq
               activeGenerationId?; a deleted one: userId=~deleted ownerId deletedAt, until it is purged
m#<seq>        conversationId item messageId seq role content|contentKey tokens status model? parentId?
               generationId? createdAt usage? usd?
c#<id>         conversationId item fingerprint generationId userSeq replySeq
generation     every field of Generation; openShard while unfinished; usage, cost and error are maps
account        userId item plan
day#<day>      userId item inputTokens outputTokens usd replies
ledger         userId entry generationId conversationId plan model pool inputTokens outputTokens cachedTokens
               usd finishReason at
"""

from typing import Any

import msgspec

from chat import keys
from chat.adapters.dynamo.values import Row
from chat.model import Conversation, Cost, Generation, Message, StoredMessage, Usage
from chat.ports import Send

DELETED_USER = "~deleted"
"""Owner of deleted conversations in the index, so that what a crash left unpurged can be found."""


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.title() for word in rest)


_GENERATION_FIELDS = {field.name: _camel(field.name) for field in msgspec.structs.fields(Generation)}


def meta(user_id: str, conversation: Conversation) -> Row:
    """The `~meta` row."""
    return {
        "conversationId": conversation.conversation_id,
        "item": keys.META_ITEM,
        "userId": user_id,
        "updatedKey": keys.updated_key(conversation.updated_at, conversation.conversation_id),
        "title": conversation.title,
        "model": conversation.model,
        "createdAt": conversation.created_at,
        "updatedAt": conversation.updated_at,
        "lastSeq": conversation.last_seq,
    }


def conversation(row: Row) -> Conversation:
    """From a `~meta` row."""
    return Conversation(
        conversation_id=row["conversationId"],
        title=row.get("title"),
        model=row.get("model"),
        created_at=row["createdAt"],
        updated_at=row["updatedAt"],
        last_seq=row["lastSeq"],
    )


def message(stored: StoredMessage, content: Row) -> Row:
    """A message's row; `content` are the attributes that hold its content."""
    source = stored.message
    return {
        "conversationId": source.conversation_id,
        "item": keys.message_item(source.seq),
        "messageId": source.message_id,
        "seq": source.seq,
        "role": source.role,
        "tokens": stored.tokens,
        "status": source.status,
        "model": source.model,
        "parentId": source.parent_id,
        "generationId": source.generation_id,
        "createdAt": source.created_at,
        **content,
    }


def stored_message(row: Row, content: str) -> StoredMessage:
    """From a message's row and its content."""
    usage, usd = row.get("usage"), row.get("usd")
    source = {name: row.get(_camel(name)) for name in _MESSAGE_PLAIN}
    parsed = msgspec.convert(
        {_camel(name): value for name, value in source.items()} | {"content": content, "usage": usage}, Message
    )
    if usd is not None:
        parsed = msgspec.structs.replace(parsed, cost=Cost(usd))
    return StoredMessage(parsed, row["tokens"])


_MESSAGE_PLAIN = (
    "message_id", "conversation_id", "seq", "role", "status", "model", "parent_id", "generation_id", "created_at",
)  # fmt: skip


def send(conversation_id: str, claim: Send) -> Row:
    """The claim's row."""
    return {
        "conversationId": conversation_id,
        "item": keys.send_item(claim.client_message_id),
        "fingerprint": claim.fingerprint,
        "generationId": claim.generation_id,
        "userSeq": claim.user_seq,
        "replySeq": claim.reply_seq,
    }


def send_of(client_message_id: str, row: Row) -> Send:
    """From a claim's row."""
    return Send(client_message_id, row["fingerprint"], row["generationId"], row["userSeq"], row["replySeq"])


def generation(source: Generation) -> Row:
    """The generation's row, open while it is unfinished."""
    plain: dict[str, Any] = msgspec.to_builtins(source)
    row = {attribute: plain[name] for name, attribute in _GENERATION_FIELDS.items()}
    if not source.status.final:
        row["openShard"] = keys.open_shard(source.generation_id)
    return row


def generation_of(row: Row) -> Generation:
    """From a generation's row."""
    plain = {name: row[attribute] for name, attribute in _GENERATION_FIELDS.items() if attribute in row}
    return msgspec.convert(plain, Generation)


def usage_map(usage: Usage) -> dict[str, int]:
    """Usage as a map."""
    return {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "cachedTokens": usage.cached_tokens,
    }


def ledger(source: Generation, day: str, at: str) -> Row:
    """The ledger's entry of a finished generation."""
    return {
        "userId": source.user_id,
        "entry": keys.ledger_entry(day, source.generation_id),
        "generationId": source.generation_id,
        "conversationId": source.conversation_id,
        "plan": source.plan,
        "model": source.model,
        "pool": source.pool,
        **usage_map(source.usage),
        "usd": source.cost.usd,
        "finishReason": source.finish_reason,
        "at": at,
    }
