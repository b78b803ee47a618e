"""Queue again a generation that is saved but that the buffer does not know."""

from chat.model import Generation
from chat.usecases.turns import StartedGeneration, Turns


class Recover:
    """Idempotent: a job that the pool knows stays where it is."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __call__(self, generation: Generation) -> StartedGeneration:
        """Raises Unavailable, NotFound."""
        return await self._turns.recover(generation)
