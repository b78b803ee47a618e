"""vLLM in this process: token ids in, token ids out (docs/adr/0006).

The engine core runs in a child process of its own; this module keeps signals meant for us away from it, and
watches for a core that hangs: sequences run, but no step is reported.
"""

import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from chat.adapters.engines.detokenizer import PieceDetokenizer
from chat.errors import ContextLengthExceeded, EngineFailed
from chat.model import FinishReason, GenerationRequest
from chat.ports import EngineOutput, EngineStatus

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""Sequences run but no step was reported for this long: the core hangs. A long CPU prefill stays below it."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}


class _Stats:
    """The last step's figures; filled by the stat logger that vLLM calls after every step."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_used = 0.0
        self.stepped_at = time.monotonic()


class VllmEngine:
    """Implements `chat.ports.Engine`."""

    def __init__(self, model_path: str, dtype: str, max_model_len: int, kv_cache_gib: int = 1) -> None:
        self._model_path, self._dtype, self._max_model_len = model_path, dtype, max_model_len
        self._kv_cache_gib = kv_cache_gib
        self._engine: Any = None
        self._tokenizer: Any = None
        self._stats = _Stats()
        self._capacity = 0
        self._active: set[str] = set()

    async def start(self) -> None:
        """Load the weights; takes half a minute on a CPU, minutes for large models."""
        _set_environment(self._kv_cache_gib)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self._model_path,
            dtype=self._dtype,
            max_model_len=self._max_model_len,
            enforce_eager=True,
            enable_prefix_caching=True,
        )
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[_stat_logger(self._stats)])
        self._tokenizer = self._engine.get_tokenizer()
        config = self._engine.vllm_config
        self._max_model_len = int(config.model_config.max_model_len)
        self._capacity = int(config.cache_config.kv_cache_size_tokens)
        logger.info("engine ready: %d KV tokens, context %d", self._capacity, self._max_model_len)

    async def stop(self) -> None:
        """End the engine core."""
        if self._engine is not None:
            self._engine.shutdown()

    def detokenizer(self) -> PieceDetokenizer:
        """See Engine.detokenizer."""
        return PieceDetokenizer(self._tokenizer)

    async def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """See Engine.generate."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = self._prompt_ids(request)
        ids = [*prompt, *saved_token_ids]
        room = min(request.max_tokens, self._max_model_len - len(prompt)) - len(saved_token_ids)
        if len(prompt) >= self._max_model_len:
            raise ContextLengthExceeded("The conversation does not fit the model's context.", param="content")
        if room <= 0:
            yield EngineOutput([], FinishReason.LENGTH, prompt_tokens=len(prompt))
            return
        sampling = SamplingParams(
            max_tokens=room,
            temperature=request.temperature,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"{request.generation_id}/{attempt}"
        self._active.add(name)
        self._stats.stepped_at = time.monotonic()
        try:
            async for output in self._engine.generate({"prompt_token_ids": ids}, sampling, name):
                part = output.outputs[0]
                finish = _FINISH.get(part.finish_reason) if part.finish_reason else None
                cached = output.num_cached_tokens or 0
                yield EngineOutput(list(part.token_ids), finish, cached, len(prompt))
        except EngineDeadError as error:
            raise EngineFailed("The model engine died.") from error
        finally:
            self._active.discard(name)

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        plain = [{"role": str(message.role), "content": message.content} for message in request.messages]
        text = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def abort(self, generation_id: str, attempt: int) -> None:
        """See Engine.abort."""
        name = f"{generation_id}/{attempt}"
        if name in self._active:
            await self._engine.abort(name)

    def status(self) -> EngineStatus:
        """See Engine.status."""
        stats, engine = self._stats, self._engine
        silent = time.monotonic() - stats.stepped_at
        hangs = bool(self._active) and silent > HANG_SECONDS
        dead = engine is not None and engine.errored
        idle = not self._active and silent > 0.5
        return EngineStatus(
            kv_capacity_tokens=self._capacity,
            running=0 if idle else stats.running,
            waiting=0 if idle else stats.waiting,
            kv_used_fraction=0.0 if idle else stats.kv_used,
            healthy=engine is not None and not hangs and not dead,
        )


def _stat_logger(stats: _Stats) -> Any:
    """A vLLM stat logger class that fills `stats`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.waiting = scheduler_stats.num_waiting_reqs
                stats.kv_used = scheduler_stats.kv_cache_usage
            stats.stepped_at = time.monotonic()

        def log_engine_initialized(self) -> None:
            pass

    return Recorder


def _set_environment(kv_cache_gib: int) -> None:
    """vLLM reads these when it is imported. Nothing is fetched from a hub at run time."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A forked core would share our signal handlers and event loop.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
