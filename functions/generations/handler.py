"""The state of a reply, and stopping it."""

from chat.usecases.get_generation import GetGeneration
from functions.common import runtime
from functions.common.http import Answer, Api, Request


async def read(request: Request) -> Answer:
    """The generation, with its place while it is queued."""
    use_case = GetGeneration(runtime.stores().generations, runtime.buffer(), runtime.lanes())
    return Answer(200, await use_case(request.user_id, request.path["generationId"]))


async def cancel(request: Request) -> Answer:
    """202 while it is being stopped, 200 when it had ended before."""
    cancelled = await runtime.cancel()(request.user_id, request.path["generationId"])
    body = {"generationId": cancelled.generation_id, "status": cancelled.status}
    return Answer(200 if cancelled.ended else 202, body)


handler = Api(
    {
        ("GET", "/v1/generations/{generationId}"): read,
        ("POST", "/v1/generations/{generationId}/cancel"): cancel,
    }
)
