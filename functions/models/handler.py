"""The models that the caller's plan may ask for."""

from chat.usecases.conversations import ListModels
from functions.common import runtime
from functions.common.http import Answer, Api, Request


async def page(request: Request) -> Answer:
    """All of them."""
    use_case = ListModels(runtime.stores().accounts, runtime.catalogue())
    return Answer(200, await use_case(request.user_id))


handler = Api({("GET", "/v1/models"): page})
