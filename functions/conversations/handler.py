"""Create, list, read, rename and delete conversations."""

from chat.requests import CreateConversationRequest, RenameConversationRequest, decode, page_query
from chat.usecases.conversations import (
    CreateConversation,
    DeleteConversation,
    GetConversation,
    ListConversations,
)
from functions.common import runtime
from functions.common.http import Answer, Api, Request

COLLECTION = "/v1/conversations"
ONE = "/v1/conversations/{conversationId}"


async def create(request: Request) -> Answer:
    """201 with the conversation."""
    stores = runtime.stores()
    body = decode(request.body, CreateConversationRequest, request.content_type)
    use_case = CreateConversation(stores.conversations, stores.accounts, runtime.catalogue())
    return Answer(201, await use_case(request.user_id, body))


async def page(request: Request) -> Answer:
    """A page, newest first."""
    query = page_query(request.query, runtime.settings().page_limit)
    use_case = ListConversations(runtime.stores().conversations)
    return Answer(200, await use_case(request.user_id, query.cursor, query.limit))


async def read(request: Request) -> Answer:
    """One conversation."""
    use_case = GetConversation(runtime.stores().conversations)
    return Answer(200, await use_case(request.user_id, request.path["conversationId"]))


async def rename(request: Request) -> Answer:
    """The renamed conversation."""
    body = decode(request.body, RenameConversationRequest, request.content_type)
    conversations = runtime.stores().conversations
    return Answer(200, await conversations.rename(request.user_id, request.path["conversationId"], body.title))


async def delete(request: Request) -> Answer:
    """204."""
    use_case = DeleteConversation(runtime.stores().conversations, runtime.cancel())
    await use_case(request.user_id, request.path["conversationId"])
    return Answer(204)


handler = Api(
    {
        ("POST", COLLECTION): create,
        ("GET", COLLECTION): page,
        ("GET", ONE): read,
        ("PATCH", ONE): rename,
        ("DELETE", ONE): delete,
    }
)
