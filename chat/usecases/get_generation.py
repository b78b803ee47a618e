"""The state of one reply: saved, and live while it runs."""

import msgspec

from chat.errors import NotFound
from chat.model import GenerationStatus, Usage
from chat.ports import GenerationStore, Lanes, TokenBuffer


class GenerationView(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """As the API shows it; place and wait only while it is queued."""

    generation_id: str
    conversation_id: str
    status: GenerationStatus
    model: str
    usage: Usage
    position: int | None = None
    estimated_wait_seconds: float | None = None


class GetGeneration:
    """`GET /v1/generations/{id}`."""

    def __init__(self, generations: GenerationStore, buffer: TokenBuffer, lanes: Lanes) -> None:
        self._generations, self._buffer, self._lanes = generations, buffer, lanes

    async def __call__(self, user_id: str, generation_id: str) -> GenerationView:
        """Raises NotFound."""
        found = await self._generations.get(generation_id)
        if found is None or found.user_id != user_id:
            raise NotFound("There is no such generation.")
        view = GenerationView(generation_id, found.conversation_id, found.status, found.model, found.usage)
        if found.status.final:
            return view
        live = await self._buffer.live(generation_id)
        if live is not None and (live.last_seq > 0 or live.attempt > 0):
            return msgspec.structs.replace(view, status=GenerationStatus.RUNNING)
        place = await self._lanes.place(found.pool, generation_id)
        if place is None or place.position == 0:
            return view
        return msgspec.structs.replace(
            view, position=place.position, estimated_wait_seconds=place.estimated_wait_seconds
        )
