"""End a turn: seal, save, publish, release. Any process may run it, at any time, as often as it likes."""

from collections.abc import Callable, Sequence

import msgspec

from chat import frames
from chat.catalogue import Catalogue
from chat.errors import NotFound
from chat.ids import now_ms
from chat.model import Cost, EventKind, FinishReason, Generation, GenerationStatus, Outcome, Usage
from chat.ports import BufferEntry, Claim, GenerationStore, Lanes, TokenBuffer, UnknownGeneration

_ENGINE_FAILED = {
    "type": "api_error",
    "code": "engine_failed",
    "message": "The model failed; what it wrote before is kept. Ask again.",
}
_REFUSED = {"type": "api_error", "code": "unavailable", "message": "The message was not queued; send it again."}
_BYTES_A_TOKEN = 4
"""Only for engines that give text without token ids, when a process other than theirs ends the turn."""


class FinishTurn:
    """Ends a turn in four idempotent steps; after a crash between any two, running it again completes it."""

    def __init__(
        self,
        buffer: TokenBuffer,
        generations: GenerationStore,
        lanes: Lanes,
        catalogue: Catalogue,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._buffer = buffer
        self._generations = generations
        self._lanes = lanes
        self._catalogue = catalogue
        self._clock = clock

    async def __call__(
        self,
        generation_id: str,
        pool: str,
        *,
        attempt: int | None,
        outcome: Outcome | None,
        reason: FinishReason = FinishReason.ERROR,
        error: dict[str, str] | None = None,
    ) -> Generation | None:
        """Answers the generation as it is saved; None if DynamoDB does not know it.

        `outcome=None`: what the buffer holds, ended for `reason`. `attempt=None` takes it over from whoever has
        it. An outcome with tokens and without cost is priced here. Raises Fenced when a later attempt owns it,
        Unavailable when a store is away; run it again then.
        """
        try:
            sealed = await self._seal(generation_id, attempt, outcome, reason, error)
        except UnknownGeneration:
            known = outcome or _outcome(reason, "", Usage(), error)
            saved = await self._save(generation_id, await self._priced(generation_id, known), 0)
            await self._lanes.release(pool, generation_id)
            return saved
        live = await self._buffer.live(generation_id)
        last_seq = 0 if live is None else live.last_seq
        if live is None or not live.ended:
            last_seq += 1
        saved = await self._save(generation_id, sealed, last_seq)
        await self._publish(generation_id, last_seq, saved, sealed)
        await self._lanes.release(pool, generation_id)
        return saved

    async def _seal(
        self,
        generation_id: str,
        attempt: int | None,
        outcome: Outcome | None,
        reason: FinishReason,
        error: dict[str, str] | None,
    ) -> Outcome:
        if outcome is not None:
            return await self._buffer.seal(generation_id, attempt, await self._priced(generation_id, outcome))
        if attempt is None:
            attempt = await self._take_over(generation_id)
        claim = await self._buffer.claim(generation_id, attempt)
        if claim.sealed_outcome is not None:
            return claim.sealed_outcome
        derived = _derived(claim, reason, error)
        priced = msgspec.structs.replace(derived, cost=self._catalogue.cost(claim.request.model, derived.usage))
        return await self._buffer.seal(generation_id, attempt, priced)

    async def _take_over(self, generation_id: str) -> int:
        """The next attempt: claiming it fences whoever writes now, so that what is read is all there is."""
        live = await self._buffer.live(generation_id)
        if live is None:
            raise UnknownGeneration(generation_id)
        return live.attempt + 1

    async def _priced(self, generation_id: str, outcome: Outcome) -> Outcome:
        if outcome.usage == Usage() or outcome.cost != Cost():
            return outcome
        generation = await self._generations.get(generation_id)
        if generation is None:
            return outcome
        return msgspec.structs.replace(outcome, cost=self._catalogue.cost(generation.model, outcome.usage))

    async def _save(self, generation_id: str, outcome: Outcome, last_seq: int) -> Generation | None:
        try:
            return await self._generations.finish(generation_id, outcome, last_seq, self._clock())
        except NotFound:
            return None

    async def _publish(self, generation_id: str, seq: int, saved: Generation | None, outcome: Outcome) -> None:
        frame = last_frame(seq, saved) if saved is not None else _frame_of(seq, outcome)
        try:
            await self._buffer.publish_last(generation_id, frame)
        except UnknownGeneration:
            return  # lost just now; followers find the saved reply


def last_frame(seq: int, generation: Generation) -> bytes:
    """The `done` or `error` event of a generation that is saved as final."""
    if generation.status is GenerationStatus.REFUSED:
        return frames.durable(seq, EventKind.ERROR, {"error": _REFUSED})
    reason = generation.finish_reason or FinishReason.ERROR
    return _frame_of(seq, Outcome(reason, "", generation.usage, generation.cost, generation.error))


def _frame_of(seq: int, outcome: Outcome) -> bytes:
    if outcome.finish_reason is FinishReason.ERROR:
        return frames.durable(seq, EventKind.ERROR, {"error": outcome.error or _ENGINE_FAILED})
    data = {
        "status": outcome.finish_reason.status,
        "finishReason": outcome.finish_reason,
        "usage": outcome.usage,
        "cost": outcome.cost,
    }
    return frames.durable(seq, EventKind.DONE, data)


def _outcome(reason: FinishReason, text: str, usage: Usage, error: dict[str, str] | None) -> Outcome:
    if reason is FinishReason.ERROR:
        error = error or _ENGINE_FAILED
    return Outcome(reason, text, usage, Cost(), error)


def _derived(claim: Claim, reason: FinishReason, error: dict[str, str] | None) -> Outcome:
    """What the buffer proves: nothing was used before the first token."""
    text = text_of(claim.entries)
    output = sum(len(entry.token_ids) for entry in claim.entries)
    if output == 0 and text:
        output = -(-len(text.encode()) // _BYTES_A_TOKEN)
    usage = Usage(claim.request.prompt_tokens, output) if output else Usage()
    return _outcome(reason, text, usage, error)


def text_of(entries: Sequence[BufferEntry]) -> str:
    """The text of all `delta` events."""
    return "".join(frames.data_of(entry.frame)["text"] for entry in entries if entry.kind is EventKind.DELTA)
