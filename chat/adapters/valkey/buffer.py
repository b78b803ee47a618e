"""The token buffer: a Valkey stream, a state hash and the request of each generation, in one slot."""

from collections.abc import Sequence
from typing import Any

import msgspec

from chat import frames, keys
from chat.adapters.valkey.client import Script, Valkey
from chat.model import GenerationRequest, Outcome
from chat.ports import BufferEntry, Claim, Fenced, LiveState, UnknownGeneration

_OPEN, _APPEND, _CLAIM = Script("open"), Script("append"), Script("claim")
_SEAL, _PUBLISH_LAST, _REQUEST_CANCEL = Script("seal"), Script("publish_last"), Script("request_cancel")

_STATE_FIELDS = ("user", "conversation", "pool", "attempt", "last", "cancel", "sealed", "ended")
_PAGE = 500


class ValkeyTokenBuffer:
    """Implements `chat.ports.TokenBuffer`."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    async def open(self, request: GenerationRequest) -> None:
        """See TokenBuffer.open."""
        at = keys.GenerationKeys(request.generation_id)
        arguments = [
            keys.QUEUED_TTL_SECONDS,
            request.user_id,
            request.conversation_id,
            request.pool,
            msgspec.json.encode(request),
        ]
        await self._valkey.run(_OPEN, [at.state, at.request], arguments)

    async def claim(self, generation_id: str, attempt: int) -> Claim:
        """See TokenBuffer.claim. A sealed generation is answered to any attempt: nobody writes it any more."""
        at = keys.GenerationKeys(generation_id)
        arguments = [attempt, keys.QUEUED_TTL_SECONDS, _PAGE]
        answer = await self._valkey.run(_CLAIM, [at.state, at.events, at.request], arguments)
        if answer == 0:
            raise UnknownGeneration(generation_id)
        if answer == -1:
            raise Fenced(generation_id)
        raw, fields, rows = answer
        state, sealed = _state_of(fields)
        if state is None:
            raise UnknownGeneration(generation_id)
        request = msgspec.json.decode(raw, type=GenerationRequest)
        outcome = msgspec.json.decode(sealed, type=Outcome) if sealed else None
        entries = _entries_of(rows)
        while len(rows) == _PAGE:
            rows = await self._range(generation_id, entries[-1].seq, _PAGE)
            entries += _entries_of(rows)
        return Claim(request, state, entries, outcome)

    async def append(
        self,
        generation_id: str,
        attempt: int,
        entries: Sequence[BufferEntry],
        owner: GenerationRequest | None = None,
    ) -> int:
        """See TokenBuffer.append."""
        at = keys.GenerationKeys(generation_id)
        identity: list[Any] = ["", "", "", ""]
        if not entries:
            raise ValueError("an append needs at least one entry")
        if owner is not None and entries[0].seq == 1:
            encoded = msgspec.json.encode(owner)
            identity = [owner.user_id, owner.conversation_id, owner.pool, encoded]
        arguments: list[Any] = [attempt, keys.QUEUED_TTL_SECONDS, at.channel, *identity, entries[0].seq]
        for entry in entries:
            arguments += [entry.frame, ",".join(map(str, entry.token_ids))]
        answer = await self._valkey.run(_APPEND, [at.state, at.events, at.request], arguments)
        last = int(answer[0])
        if last < 0:
            raise Fenced(generation_id)
        return last

    async def seal(self, generation_id: str, attempt: int | None, outcome: Outcome) -> Outcome:
        """See TokenBuffer.seal."""
        at = keys.GenerationKeys(generation_id)
        arguments = ["" if attempt is None else attempt, msgspec.json.encode(outcome)]
        answer = await self._valkey.run(_SEAL, [at.state], arguments)
        if answer == 0:
            raise UnknownGeneration(generation_id)
        if answer == -1:
            raise Fenced(generation_id)
        return msgspec.json.decode(answer, type=Outcome)

    async def publish_last(self, generation_id: str, frame: bytes) -> None:
        """See TokenBuffer.publish_last. Raises UnknownGeneration, and Fenced when the frame's seq does not follow."""
        at = keys.GenerationKeys(generation_id)
        arguments = [at.channel, frames.seq_of(frame), frame, keys.BUFFER_TTL_SECONDS]
        answer = await self._valkey.run(_PUBLISH_LAST, [at.state, at.events, at.request], arguments)
        if answer == 0:
            raise UnknownGeneration(generation_id)
        if answer == -1:
            raise Fenced(generation_id)

    async def request_cancel(self, generation_id: str) -> LiveState | None:
        """See TokenBuffer.request_cancel."""
        at = keys.GenerationKeys(generation_id)
        return _state_of(await self._valkey.run(_REQUEST_CANCEL, [at.state], list(_STATE_FIELDS)))[0]

    async def live(self, generation_id: str) -> LiveState | None:
        """See TokenBuffer.live."""
        at = keys.GenerationKeys(generation_id)
        return _state_of(await self._valkey.command("HMGET", at.state, *_STATE_FIELDS))[0]

    async def entries(self, generation_id: str, after: int = 0, limit: int = 1000) -> list[BufferEntry]:
        """See TokenBuffer.entries."""
        return _entries_of(await self._range(generation_id, after, limit))

    async def frames(self, generation_id: str, after: int, limit: int = 256) -> list[bytes]:
        """See TokenBuffer.frames."""
        return [row[1][1] for row in await self._range(generation_id, after, limit)]

    async def _range(self, generation_id: str, after: int, limit: int) -> list[Any]:
        at = keys.GenerationKeys(generation_id)
        rows: list[Any] = await self._valkey.command("XRANGE", at.events, f"{after + 1}-0", "+", "COUNT", limit)
        return rows


def _state_of(fields: list[bytes | None]) -> tuple[LiveState | None, bytes | None]:
    """The state in the order of _STATE_FIELDS, and the sealed outcome; None where the buffer knows nothing."""
    user, conversation, pool, attempt, last, cancel, sealed, ended = fields
    if user is None or conversation is None or pool is None:
        return None, None
    state = LiveState(
        user.decode(),
        conversation.decode(),
        pool.decode(),
        attempt=int(attempt or 0),
        last_seq=int(last or 0),
        cancel_requested=cancel is not None,
        sealed=sealed is not None,
        ended=ended is not None,
    )
    return state, sealed


def _entries_of(rows: list[Any]) -> list[BufferEntry]:
    """Rows of XRANGE: id and the flat list `f`, frame, and `t`, token ids, where there are some."""
    found = []
    for ident, fields in rows:
        token_ids = [int(token) for token in fields[3].split(b",")] if len(fields) > 3 else []
        found.append(BufferEntry(int(ident.partition(b"-")[0]), frames.kind_of(fields[1]), fields[1], token_ids))
    return found
