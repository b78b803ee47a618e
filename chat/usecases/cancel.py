"""Stop a generation, whatever state it is in."""

import msgspec

from chat.errors import NotFound
from chat.model import FinishReason, Generation, GenerationStatus
from chat.ports import GenerationStore, JobState, Lanes, TokenBuffer
from chat.usecases.finish_turn import FinishTurn


class Cancelled(msgspec.Struct, frozen=True):
    """`ended`: it had ended before; then `status` is final."""

    generation_id: str
    status: GenerationStatus
    ended: bool


class CancelGeneration:
    """Leaves a durable mark first, so that a claim which comes later sees it; then tells whoever has the job."""

    def __init__(self, buffer: TokenBuffer, generations: GenerationStore, lanes: Lanes, finish: FinishTurn) -> None:
        self._buffer, self._generations, self._lanes, self._finish = buffer, generations, lanes, finish

    async def __call__(self, user_id: str, generation_id: str) -> Cancelled:
        """`POST /v1/generations/{id}/cancel`; idempotent. Raises NotFound."""
        generation = await self._generations.get(generation_id)
        if generation is None or generation.user_id != user_id:
            raise NotFound("There is no such generation.")
        return await self._cancel(generation)

    async def by_system(self, generation_id: str) -> None:
        """Nobody follows it any more."""
        generation = await self._generations.get(generation_id)
        if generation is not None:
            await self._cancel(generation)

    async def _cancel(self, generation: Generation) -> Cancelled:
        ident = generation.generation_id
        if generation.status.final:
            await self._lanes.release(generation.pool, ident)
            return Cancelled(ident, generation.status, ended=True)
        await self._buffer.request_cancel(ident)
        found = await self._lanes.cancel(generation.pool, ident)
        if found is JobState.DISPATCHED:
            return Cancelled(ident, GenerationStatus.RUNNING, ended=False)
        # Queued (now out of its lane), or known to no pool: nobody else will end it.
        saved = await self._finish(ident, generation.pool, attempt=None, outcome=None, reason=FinishReason.CANCELLED)
        status = GenerationStatus.CANCELLED if saved is None else saved.status
        return Cancelled(ident, status, ended=False)
