"""vLLM in this process: token ids in, token ids out (docs/adr/0006).

The engine core runs in a child process of its own. Signals meant for us are kept away from it, so that a drain can
finish its replies, and it is watched for a hang: requests run, but no step is reported.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from chat.adapters.engines.detokenizer import PieceDetokenizer
from chat.errors import ContextLengthExceeded, EngineFailed
from chat.model import FinishReason, GenerationRequest
from chat.ports import EngineOutput, EngineStatus

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""Requests run but no step was reported for this long: the core hangs. A long CPU prefill stays below it."""

ABORT_RETRY_SECONDS = 0.005
"""An abort that overtakes its request on the way into the engine finds nothing; it is said again."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}


class _Stats:
    """The last step's figures; filled by the stat logger that vLLM calls after every step."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_used = 0.0
        self.stepped_at = time.monotonic()


class VllmEngine:
    """Implements `chat.ports.Engine`.

    `dtype`: bfloat16, float32, or auto for what is quick on this machine. `kv_cache_gib` is for the CPU only; a
    GPU's cache is what its memory leaves.
    """

    def __init__(
        self, model_path: str, dtype: str, max_model_len: int, kv_cache_gib: int = 1, tensor_parallel_size: int = 1
    ) -> None:
        self._model_path, self._dtype, self._max_model_len = model_path, dtype, max_model_len
        self._kv_cache_gib, self._tensor_parallel_size = kv_cache_gib, tensor_parallel_size
        self._engine: Any = None
        self._tokenizer: Any = None
        self._stats = _Stats()
        self._capacity = 0
        self._active: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Load the weights; takes half a minute on a CPU, minutes for large models. Blocks the loop meanwhile."""
        _set_environment(self._kv_cache_gib)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self._model_path,
            dtype=_dtype_here() if self._dtype == "auto" else self._dtype,
            max_model_len=self._max_model_len,
            tensor_parallel_size=self._tensor_parallel_size,
            # Compiled graphs are worth their minutes on a GPU only.
            enforce_eager=current_platform.is_cpu(),
            enable_prefix_caching=True,
        )
        with _signals_held_back():
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[_stat_logger(self._stats)])
        self._tokenizer = self._engine.get_tokenizer()
        config = self._engine.vllm_config
        self._max_model_len = int(config.model_config.max_model_len)
        self._capacity = int(config.cache_config.kv_cache_size_tokens)
        logger.info("engine ready: %d KV tokens, context %d", self._capacity, self._max_model_len)

    async def stop(self) -> None:
        """End the engine core; nothing in it is worth a wait, and a hung one would not answer."""
        if self._engine is not None:
            for child in multiprocessing.active_children():
                child.kill()
            self._engine.shutdown(timeout=0)

    def detokenizer(self) -> PieceDetokenizer:
        """See Engine.detokenizer."""
        return PieceDetokenizer(self._tokenizer)

    async def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """See Engine.generate."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = self.prompt_ids(request)
        if len(prompt) >= self._max_model_len:
            raise ContextLengthExceeded("The conversation does not fit the model's context.", param="content")
        room = min(request.max_tokens, self._max_model_len - len(prompt)) - len(saved_token_ids)
        if room <= 0:
            yield EngineOutput([], FinishReason.LENGTH, prompt_tokens=len(prompt))
            return
        name = f"{request.generation_id}/{attempt}"
        outputs = self._engine.generate(
            {"prompt_token_ids": [*prompt, *saved_token_ids]}, _sampling(request, room), name
        )
        if not self._active:
            self._stats.stepped_at = time.monotonic()  # the watch for a hang begins with the first of a batch
        ended = self._active[name] = asyncio.Event()
        try:
            async for output in outputs:
                part = output.outputs[0]
                finish = _FINISH.get(part.finish_reason, FinishReason.ERROR) if part.finish_reason else None
                yield EngineOutput(list(part.token_ids), finish, output.num_cached_tokens or 0, len(prompt))
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed("The model engine died.") from error
        finally:
            self._active.pop(name, None)
            ended.set()
            await outputs.aclose()  # whoever stops reading early aborts the request, now rather than some time

    @property
    def context_tokens(self) -> int:
        """Prompt and reply together; known after the start, which may find that less fits."""
        return self._max_model_len

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """The prompt with the model's chat template."""
        plain = [{"role": str(message.role), "content": message.content} for message in request.messages]
        text = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def abort(self, generation_id: str, attempt: int) -> None:
        """See Engine.abort. Returns when its reader has seen the end."""
        name = f"{generation_id}/{attempt}"
        while (ended := self._active.get(name)) is not None:
            await self._engine.abort(name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ABORT_RETRY_SECONDS)

    def status(self) -> EngineStatus:
        """See Engine.status."""
        stats, engine = self._stats, self._engine
        hangs = bool(self._active) and time.monotonic() - stats.stepped_at > HANG_SECONDS
        dead = engine is not None and engine.errored
        return EngineStatus(
            kv_capacity_tokens=self._capacity,
            running=stats.running,
            waiting=stats.waiting,
            kv_used_fraction=stats.kv_used,
            healthy=engine is not None and not hangs and not dead,
        )


def _dtype_here() -> str:
    """What is quick on this machine: bfloat16, but float32 on x86 processors that cannot multiply bfloat16.

    There a prompt takes four times as long in bfloat16, and a batch as long as its replies one after the other.
    """
    import torch
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu():
        return "auto"
    slow = current_platform.get_cpu_architecture() is CpuArchEnum.X86 and not torch.cpu._is_avx512_bf16_supported()
    return "float32" if slow else "bfloat16"


def _sampling(request: GenerationRequest, room: int) -> Any:
    """vLLM adds the model's own stop tokens by itself; text is decoded here, so that half characters can wait."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=room,
        temperature=request.temperature,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
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


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started inside never get SIGTERM or SIGINT: the mask is theirs for life.

    A supervisor or a terminal may signal the whole process group; the core would drop every reply at once.
    """
    # Starting Python's tracker of shared memory would unblock the signals again: it starts before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
