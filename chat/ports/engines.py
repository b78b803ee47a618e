"""Model engines and their tokenizers."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from chat.model import ChatMessage, FinishReason, GenerationRequest


class EngineOutput(msgspec.Struct, frozen=True):
    """A step's tokens. The last output of a generation has a finish reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """of this attempt, where a provider counts otherwise than by the ids given"""


class EngineStatus(msgspec.Struct, frozen=True):
    """Room and load of an engine; `kv_used_fraction` from 0 to 1."""

    kv_capacity_tokens: int
    running: int
    waiting: int
    kv_used_fraction: float
    healthy: bool


class Detokenizer(Protocol):
    """Incremental decoding: emits whole characters only."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; what is half a character is kept back."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end."""
        ...


class Engine(Protocol):
    """A model that continues a prompt."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def detokenizer(self) -> Detokenizer: ...

    def generate(
        self, request: GenerationRequest, attempt: int, saved_token_ids: Sequence[int]
    ) -> AsyncIterator[EngineOutput]:
        """Stream the reply after the saved tokens. Raises EngineFailed when the engine breaks.

        The engine-side request id is `<generation id>/<attempt>`, so that it is used once.
        """
        ...

    async def abort(self, generation_id: str, attempt: int) -> None:
        """End it before the next step and free its blocks; no-op when unknown."""
        ...

    def status(self) -> EngineStatus: ...


class TokenCounter(Protocol):
    """Counts with the model's own tokenizer."""

    def count(self, text: str) -> int: ...

    def prompt(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of a whole prompt with the chat template."""
        ...
