"""One generation on a replica: engine outputs become events in the token buffer, in order and exactly once."""

import asyncio
import contextlib
import logging
import random
import time

from chat import frames, tracing
from chat.errors import ChatError, EngineFailed, Unavailable
from chat.model import Cost, EventKind, FinishReason, Outcome, ServedBy, Usage
from chat.ports import BufferEntry, Claim, Engine, TokenBuffer

logger = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 1.0
ABORT_SECONDS = 5.0


class Reply:
    """Generates one reply after what the buffer has already.

    The first token is appended at once, later ones together every `flush_seconds`. Every entry of the generation
    stays in memory until the end, so that a buffer that lost some gets them again.
    """

    def __init__(self, engine: Engine, buffer: TokenBuffer, claim: Claim, attempt: int, flush_seconds: float) -> None:
        self.request, self.attempt = claim.request, attempt
        self.handing_over = False
        self.engine_broke = False
        self.first_token_seconds: float | None = None
        self._engine, self._buffer, self._flush_seconds = engine, buffer, flush_seconds
        self._entries = list(claim.entries)
        self._written = len(self._entries)
        self._saved_ids = [token for entry in self._entries for token in entry.token_ids]
        self._text = [frames.data_of(e.frame)["text"] for e in self._entries if e.kind is EventKind.DELTA]
        self._detokenizer = engine.detokenizer()
        self._detokenizer.feed(self._saved_ids)
        self._pending_ids: list[int] = []
        self._pending_text = ""
        self._count = len(self._saved_ids)
        self._prompt_tokens = self.request.prompt_tokens
        self._cached_tokens = 0
        self._finish: FinishReason | None = None
        self._error: dict[str, str] | None = None
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._stopped = False
        self._started_at = time.monotonic()
        self._flushed_at = 0.0

    async def run(self) -> Outcome:
        """Generate to the end. Raises Fenced when a later attempt owns the generation."""
        consumer = asyncio.create_task(self._consume())
        try:
            if not self._entries:
                self._add(EventKind.STARTED, self._started(), [])
                await self._write()
            while not (self._ended.is_set() and not self._pending_ids and not self._pending_text):
                await self._changed.wait()
                self._changed.clear()
                await self._flush()
        finally:
            if not consumer.done():
                consumer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await consumer
        return self._outcome()

    @property
    def unfinished(self) -> bool:
        """Whether another replica should go on with it: this one leaves, or its engine broke, before the end."""
        return self.engine_broke or (self.handing_over and self._finish is FinishReason.CANCELLED)

    @property
    def new_tokens(self) -> int:
        """Tokens of this attempt."""
        return self._count - len(self._saved_ids)

    def cancelled(self) -> Outcome:
        """How it ends when it was cancelled before this attempt began: with what earlier ones made."""
        self._finish = FinishReason.CANCELLED
        return self._outcome()

    async def stop(self, *, handing_over: bool = False) -> None:
        """End it before the engine's next step; what was made is kept."""
        self.handing_over = self.handing_over or handing_over
        self._stopped = True
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._engine.abort(self.request.generation_id, self.attempt)
        except Exception:
            # A broken engine; whoever reads its outputs hears of it too.
            logger.exception("abort failed, generation %s", self.request.generation_id)

    async def _consume(self) -> None:
        if self._stopped:
            self._finish = FinishReason.CANCELLED
            self._ended.set()
            self._changed.set()
            return
        try:
            outputs = self._engine.generate(self.request, self.attempt, self._saved_ids)
            async for output in outputs:
                self._take(output.token_ids)
                self._cached_tokens = output.cached_tokens or self._cached_tokens
                if output.prompt_tokens is not None:
                    self._prompt_tokens = output.prompt_tokens
                if output.output_tokens is not None:
                    self._count = len(self._saved_ids) + output.output_tokens
                if output.finish_reason is not None:
                    self._finish = output.finish_reason
                self._changed.set()
        except ChatError as error:
            self._fail(error)
        except Exception:
            logger.exception("the engine raised, generation %s", self.request.generation_id)
            self._fail(EngineFailed("The model engine failed."))
        finally:
            self.engine_broke = self._finish is FinishReason.ERROR and not self._engine.status().healthy
            self._pending_text += self._detokenizer.flush()
            self._ended.set()
            self._changed.set()

    def _fail(self, error: ChatError) -> None:
        self._finish = FinishReason.ERROR
        self._error = {"type": error.type, "code": error.code, "message": error.message}

    def _take(self, token_ids: list[int]) -> None:
        if token_ids and self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self._started_at
            tracing.mark(self.request.generation_id, "first_token")
        self._pending_ids += token_ids
        self._pending_text += self._detokenizer.feed(token_ids)
        self._count += len(token_ids)

    async def _flush(self) -> None:
        """Write what is pending: the first text at once, later text when its time has come or all is said."""
        left = self._flushed_at + self._flush_seconds - time.monotonic()
        if self._text and left > 0 and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), left)
        if self._pending_text:
            text, ids = self._pending_text, self._pending_ids
            self._pending_text, self._pending_ids = "", []
            first, self._flushed_at = not self._text, time.monotonic()
            self._text.append(text)
            self._add(EventKind.DELTA, {"text": text}, ids)
            await self._write()
            if first:
                tracing.mark(self.request.generation_id, "appended")
        elif self._ended.is_set():
            self._pending_ids = []  # tokens without text, such as the end of sequence

    def _add(self, kind: EventKind, data: dict[str, object], token_ids: list[int]) -> None:
        seq = len(self._entries) + 1
        self._entries.append(BufferEntry(seq, kind, frames.durable(seq, kind, data), token_ids))

    def _started(self) -> dict[str, object]:
        request = self.request
        return {
            "generationId": request.generation_id,
            "messageId": request.message_id,
            "seq": request.reply_seq,
            "model": request.model,
            "servedBy": request.pool,
            "degraded": request.pool == ServedBy.SMALL,
        }

    async def _write(self) -> None:
        """Append until the buffer has every entry; generation goes on while the store is away."""
        pause = 0.05
        while self._written < len(self._entries):
            try:
                last = await self._buffer.append(
                    self.request.generation_id, self.attempt, self._entries[self._written :], self.request
                )
            except Unavailable:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                continue
            self._written = last

    def _outcome(self) -> Outcome:
        finish = self._finish or FinishReason.ERROR
        error = self._error
        if self._finish is None:
            error = {"type": "api_error", "code": "engine_failed", "message": "The model engine ended too early."}
        # A reply that never began costs nothing.
        usage = Usage(self._prompt_tokens, self._count, self._cached_tokens) if self._count else Usage()
        return Outcome(finish, "".join(self._text), usage, Cost(), error)
