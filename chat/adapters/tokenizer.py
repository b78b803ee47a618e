"""Counting tokens with the model's own tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat.model import ChatMessage
from chat.ports import TokenCounter

TOKEN_BYTES = 3
"""Bytes of UTF-8 a token, for the simulated engine (exactly) and unknown tokenizers (on the safe side)."""


def render_plain(messages: Sequence[ChatMessage]) -> str:
    """A prompt as plain text, for engines without a chat template of their own."""
    return "".join(f"<|{message.role}|>\n{message.content}\n" for message in messages) + "<|assistant|>\n"


class ByteCounter:
    """Three bytes a token. Implements `chat.ports.TokenCounter`."""

    def count(self, text: str) -> int:
        """See TokenCounter.count."""
        return -(-len(text.encode("utf-8", "replace")) // TOKEN_BYTES)

    def prompt(self, messages: Sequence[ChatMessage]) -> int:
        """See TokenCounter.prompt."""
        return self.count(render_plain(messages))


class ModelCounter:
    """The tokenizer and chat template of a model folder. Implements `chat.ports.TokenCounter`."""

    def __init__(self, folder: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # slow imports that the byte counter does not need
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            source = template_file.read_text()
        else:
            source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)

    def count(self, text: str) -> int:
        """See TokenCounter.count."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: Sequence[ChatMessage]) -> int:
        """See TokenCounter.prompt."""
        plain = [{"role": str(message.role), "content": message.content} for message in messages]
        return self.count(self._template.render(messages=plain, add_generation_prompt=True))


def token_counter(setting: str) -> TokenCounter:
    """`bytes`, or the folder that has the model's tokenizer.json."""
    return ByteCounter() if setting == "bytes" else ModelCounter(Path(setting))
