"""The history of a conversation."""

from chat.requests import page_query
from chat.usecases.conversations import ListMessages
from functions.common import runtime
from functions.common.http import Answer, Api, Request


async def page(request: Request) -> Answer:
    """A page, newest first."""
    query = page_query(request.query, runtime.settings().page_limit)
    use_case = ListMessages(runtime.stores().conversations)
    return Answer(200, await use_case(request.user_id, request.path["conversationId"], query.before, query.limit))


handler = Api({("GET", "/v1/conversations/{conversationId}/messages"): page})
