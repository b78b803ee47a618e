"""The prompt of a turn: system prompt and the newest turns that fit, from stored token counts.

The head (system prompt) is the same bytes for everybody, so that the engine's prefix cache is reused.
"""

from collections.abc import Sequence

import msgspec

from chat.errors import ContextLengthExceeded
from chat.model import ChatMessage, MessageStatus, Role, StoredMessage
from chat.ports import TokenCounter
from chat.settings import ModelSpec

_LEFT_OUT = (MessageStatus.STREAMING, MessageStatus.REFUSED)


class Context(msgspec.Struct, frozen=True):
    """A prompt in tokens, and the reply cap that the model's context leaves."""

    messages: list[ChatMessage]
    prompt_tokens: int
    max_tokens: int


class ContextBuilder:
    """Builds prompts for one system prompt and budget (tokens of prompt)."""

    def __init__(self, counter: TokenCounter, system_prompt: str, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._system = ChatMessage(Role.SYSTEM, system_prompt)
        probe = ChatMessage(Role.ASSISTANT, "x")
        one, two = counter.prompt([self._system, probe]), counter.prompt([self._system, probe, probe])
        self._system_tokens = counter.prompt([self._system])
        # Some templates add less for the first message; the larger figure is on the safe side.
        self._overhead = max(two - one, one - self._system_tokens) - counter.count("x")

    def build(self, newest_first: Sequence[StoredMessage], model: ModelSpec, reply_tokens: int) -> Context:
        """A prompt that ends with the first of the given messages, the user's.

        Raises ContextLengthExceeded(param=content) when that one does not fit even alone.
        """
        question, *older = newest_first
        used = self._system_tokens + self._cost(question)
        if used >= model.context_tokens:
            raise ContextLengthExceeded(
                f"The message has about {question.tokens} tokens; with the system prompt it must stay under the "
                f"{model.context_tokens} tokens of {model.id}.",
                param="content",
            )
        room = min(self._budget_tokens, model.context_tokens - reply_tokens)
        chosen = [question]
        for message in on_the_path(older):
            if used + self._cost(message) > room:
                break
            used += self._cost(message)
            chosen.append(message)
        spoken = [ChatMessage(one.message.role, one.message.content) for one in reversed(chosen)]
        max_tokens = max(1, min(reply_tokens, model.context_tokens - used))
        return Context([self._system, *spoken], used, max_tokens)

    def _cost(self, message: StoredMessage) -> int:
        return message.tokens + self._overhead


def on_the_path(newest_first: Sequence[StoredMessage]) -> list[StoredMessage]:
    """What counts as said: of several replies to one message the newest; nothing refused, running or empty."""
    path, answered = [], set()
    for stored in newest_first:
        message = stored.message
        if message.status in _LEFT_OUT or not message.content:
            continue
        if message.role is Role.ASSISTANT:
            if message.parent_id in answered:
                continue
            answered.add(message.parent_id)
        path.append(stored)
    return path
