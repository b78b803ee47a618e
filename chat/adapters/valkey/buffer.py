"""The token buffer: a Valkey stream, a state hash and the request of each generation, in one slot."""

from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio.cluster import RedisCluster

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
        """See TokenBuffer.claim."""
        at = keys.GenerationKeys(generation_id)
        answer = await self._valkey.run(_CLAIM, [at.state, at.events, at.request], [attempt, keys.QUEUED_TTL_SECONDS])
        if answer == 0:
            raise UnknownGeneration(generation_id)
        if answer == -1:
            raise Fenced(generation_id)
        raw = await self._valkey.call(lambda cluster: cluster.get(at.request))
        state, sealed = await self._state(generation_id)
        if raw is None or state is None:
            raise UnknownGeneration(generation_id)
        request = msgspec.json.decode(raw, type=GenerationRequest)
        outcome = msgspec.json.decode(sealed, type=Outcome) if sealed else None
        entries = await self._all_entries(generation_id) if state.last_seq else []
        return Claim(request, state, entries, outcome)

    async def _all_entries(self, generation_id: str) -> list[BufferEntry]:
        found: list[BufferEntry] = []
        while page := await self.entries(generation_id, found[-1].seq if found else 0, _PAGE):
            found += page
            if len(page) < _PAGE:
                break
        return found

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
        if not await self._valkey.run(_REQUEST_CANCEL, [at.state], []):
            return None
        return await self.live(generation_id)

    async def live(self, generation_id: str) -> LiveState | None:
        """See TokenBuffer.live."""
        return (await self._state(generation_id))[0]

    async def _state(self, generation_id: str) -> tuple[LiveState | None, bytes | None]:
        at = keys.GenerationKeys(generation_id)

        async def read(cluster: RedisCluster) -> list[bytes | None]:
            answer: Any = await cluster.hmget(at.state, list(_STATE_FIELDS))
            return list(answer)

        user, conversation, pool, attempt, last, cancel, sealed, ended = await self._valkey.call(read)
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

    async def entries(self, generation_id: str, after: int = 0, limit: int = 1000) -> list[BufferEntry]:
        """See TokenBuffer.entries."""
        found = []
        for seq, fields in await self._range(generation_id, after, limit):
            frame = fields[b"f"]
            tokens = fields.get(b"t", b"")
            token_ids = [int(token) for token in tokens.split(b",")] if tokens else []
            found.append(BufferEntry(seq, frames.kind_of(frame), frame, token_ids))
        return found

    async def frames(self, generation_id: str, after: int, limit: int = 256) -> list[bytes]:
        """See TokenBuffer.frames."""
        return [fields[b"f"] for _, fields in await self._range(generation_id, after, limit)]

    async def _range(self, generation_id: str, after: int, limit: int) -> list[tuple[int, dict[bytes, bytes]]]:
        at = keys.GenerationKeys(generation_id)

        async def read(cluster: RedisCluster) -> list[tuple[int, dict[bytes, bytes]]]:
            rows: Any = await cluster.xrange(at.events, min=f"{after + 1}-0", max="+", count=limit)
            return [(int(row[0].partition(b"-")[0]), row[1]) for row in rows]

        return await self._valkey.call(read)
