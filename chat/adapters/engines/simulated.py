"""A scripted engine with the arithmetic of the reference replica: continuous batching, prefill, KV accounting.

A user message `/sim {json}` directs the reply (`script_of` reads the keys); other messages get a short
fixed one. Tokens are 3 bytes of UTF-8, so that characters straddle tokens, and the reply is a function of the
prompt alone, so that a continuation after a crash gives the same text.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chat.adapters.engines.detokenizer import ByteDetokenizer, bytes_of, token_of
from chat.adapters.tokenizer import TOKEN_BYTES, render_plain
from chat.errors import EngineFailed
from chat.model import FinishReason, GenerationRequest
from chat.ports import EngineOutput, EngineStatus

FIXED_REPLY = "This is a simulated reply. It is always the same, whatever was asked."
FIXED_SENTENCE = "The quick brown fox jumps over the lazy dog. "
DEFAULT_TOKENS = 40
DEFAULT_RATE = 200.0


@dataclass(frozen=True)
class Script:
    """What a reply will be: its tokens' bytes, and when it stalls or fails.

    `rate` is in tokens a second; None leaves the pace to the batch, with `DEFAULT_RATE` at most.
    """

    reply: bytes
    tokens: int
    rate: float | None
    stall_before: float = 0.0
    stall_at: tuple[int, float] | None = None
    fail_at: int | None = None

    def token(self, index: int) -> int:
        """Token number `index`: the next 3 bytes of the reply repeated for ever."""
        size = len(self.reply)
        start = index * TOKEN_BYTES
        return token_of(bytes(self.reply[(start + offset) % size] for offset in range(self._width(index))))

    def _width(self, index: int) -> int:
        """The last token of a text that is said once may be shorter."""
        if self.tokens * TOKEN_BYTES - len(self.reply) in range(TOKEN_BYTES) and index == self.tokens - 1:
            return len(self.reply) - index * TOKEN_BYTES
        return TOKEN_BYTES


def script_of(request: GenerationRequest) -> Script:
    """Read the directive of the last message.

    `text`: the reply, repeated until `tokens` (default: a fixed sentence, 40 tokens; a given text is said once);
    `rate`: tokens a second; `stall_before`: seconds before the first token; `stall_at`: `[token, seconds]`;
    `fail_at`: the engine raises at that token; `echo`: `"prompt"` replies with the prompt as it arrived here.
    """
    content = request.messages[-1].content if request.messages else ""
    directive = _directive(content) if content.startswith("/sim ") else {"text": FIXED_REPLY}
    echo = directive.get("echo") == "prompt"
    text = render_plain(request.messages) if echo else str(directive.get("text", FIXED_SENTENCE))
    reply = text.encode("utf-8", "replace") or b"."
    once = -(-len(reply) // TOKEN_BYTES)
    tokens = int(directive.get("tokens", once if echo or "text" in directive else DEFAULT_TOKENS))
    stall = directive.get("stall_at")
    return Script(
        reply=reply,
        tokens=max(1, tokens),
        rate=None if directive.get("rate") is None else float(directive["rate"]),
        stall_before=float(directive.get("stall_before", 0)),
        stall_at=(int(stall[0]), float(stall[1])) if stall else None,
        fail_at=None if directive.get("fail_at") is None else int(directive["fail_at"]),
    )


def _directive(content: str) -> dict[str, Any]:
    """The JSON after `/sim `; one that is malformed directs nothing."""
    try:
        parsed = json.loads(content[5:])
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass
class _Sequence:
    """A request in the batch. `ready_at`: prefill or a stall ends; `next` is the index of its next token."""

    script: Script
    limit: int
    kv_tokens: int
    next: int
    ready_at: float
    prefill_until: float
    credit: float = 0.0
    stalled: bool = False
    outputs: asyncio.Queue[EngineOutput | Exception] = field(default_factory=asyncio.Queue)


class SimulatedEngine:
    """Implements `chat.ports.Engine`.

    One loop steps the whole batch: a step takes `base + per_sequence * batch` seconds (18 ms alone, 36 ms at 183)
    and gives each sequence a token. A directive's `rate` replaces that pace for its request, so that tests can be
    quick: a step then gives as many tokens as the rate asks for.
    """

    def __init__(
        self,
        kv_tokens: int,
        step_base_seconds: float,
        step_per_sequence_seconds: float,
        prefill_seconds_per_token: float,
    ) -> None:
        self._kv_tokens = kv_tokens
        self._base, self._per_sequence = step_base_seconds, step_per_sequence_seconds
        self._prefill = prefill_seconds_per_token
        self._batch: dict[str, _Sequence] = {}
        self._loop: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    async def start(self) -> None:
        """Begin stepping."""
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End stepping; running sequences fail."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def detokenizer(self) -> ByteDetokenizer:
        """See Engine.detokenizer."""
        return ByteDetokenizer()

    async def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """See Engine.generate."""
        script, now = script_of(request), time.monotonic()
        limit = min(script.tokens, request.max_tokens)
        prefill = self._prefill * (request.prompt_tokens + len(saved_token_ids))
        stall = 0.0 if saved_token_ids else script.stall_before
        sequence = _Sequence(
            script,
            limit,
            request.prompt_tokens + limit,
            len(saved_token_ids),
            now + prefill + stall,
            now + prefill,
            stalled=script.stall_at is not None and len(saved_token_ids) > script.stall_at[0],
        )
        name = f"{request.generation_id}/{attempt}"
        self._batch[name] = sequence
        self._work.set()
        try:
            while True:
                output = await sequence.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._batch.pop(name, None)

    async def abort(self, generation_id: str, attempt: int) -> None:
        """See Engine.abort."""
        sequence = self._batch.pop(f"{generation_id}/{attempt}", None)
        if sequence is not None:
            sequence.outputs.put_nowait(EngineOutput([], FinishReason.CANCELLED))

    def status(self) -> EngineStatus:
        """See Engine.status."""
        used = sum(sequence.kv_tokens for sequence in self._batch.values())
        alive = self._loop is not None and not self._loop.done()
        return EngineStatus(self._kv_tokens, len(self._batch), 0, min(1.0, used / self._kv_tokens), alive)

    async def _run(self) -> None:
        last = time.monotonic()
        while True:
            if not self._batch:
                self._work.clear()
                await self._work.wait()
                last = time.monotonic()
            await asyncio.sleep(self._base + self._per_sequence * len(self._batch))
            now = time.monotonic()
            for name, sequence in list(self._batch.items()):
                if now >= sequence.ready_at:
                    self._step(name, sequence, max(0.0, now - max(last, sequence.ready_at)), now)
            last = now

    def _step(self, name: str, sequence: _Sequence, elapsed: float, now: float) -> None:
        """Give one sequence what the elapsed time is worth at its rate."""
        script = sequence.script
        if not sequence.next and not sequence.credit:
            sequence.credit = 1.0  # the first token comes with the first step
        elif script.rate is None:
            sequence.credit += min(1.0, elapsed * DEFAULT_RATE)
        else:
            sequence.credit += elapsed * script.rate
        token_ids: list[int] = []
        finish = None
        while sequence.credit >= 1 and finish is None:
            if script.fail_at is not None and sequence.next >= script.fail_at:
                self._emit(sequence, token_ids, None)
                sequence.outputs.put_nowait(EngineFailed("The simulated engine was told to fail."))
                self._batch.pop(name, None)
                return
            if script.stall_at and not sequence.stalled and sequence.next >= script.stall_at[0]:
                sequence.stalled, sequence.credit = True, 0.0
                sequence.ready_at = now + script.stall_at[1]
                break
            if sequence.next < sequence.limit:
                token_ids.append(script.token(sequence.next))
                sequence.next += 1
                sequence.credit -= 1
            if sequence.next >= sequence.limit:
                finish = FinishReason.STOP if sequence.limit == script.tokens else FinishReason.LENGTH
        self._emit(sequence, token_ids, finish)
        if finish is not None:
            self._batch.pop(name, None)

    @staticmethod
    def _emit(sequence: _Sequence, token_ids: list[int], finish: FinishReason | None) -> None:
        if token_ids or finish is not None:
            sequence.outputs.put_nowait(EngineOutput(token_ids, finish))


__all__ = ["SimulatedEngine", "bytes_of", "script_of"]
