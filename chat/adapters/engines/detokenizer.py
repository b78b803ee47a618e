"""Incremental detokenizers: they emit whole characters only, whatever the borders of tokens are."""

import codecs
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


def token_of(piece: bytes) -> int:
    """A token id that carries 1 to 3 bytes: the length in the top byte."""
    return (len(piece) << 24) | int.from_bytes(piece.ljust(3, b"\0"), "big")


def bytes_of(token_id: int) -> bytes:
    """The bytes of `token_of`."""
    return (token_id & 0xFFFFFF).to_bytes(3, "big")[: token_id >> 24]


class ByteDetokenizer:
    """For tokens that are pieces of UTF-8. Implements `chat.ports.Detokenizer`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer.feed."""
        return self._decoder.decode(b"".join(bytes_of(token) for token in token_ids))

    def flush(self) -> str:
        """What was kept back is half a character and is dropped."""
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For a Hugging Face tokenizer. Implements `chat.ports.Detokenizer`.

    Tokens are decoded one by one in a window that begins at the last border at which the text was whole, so that
    a step's cost does not grow with the reply, and what is said after some tokens does not depend on how they were
    grouped: a continuation feeds the saved ones at once. A window that ends in U+FFFD ends in half a character and
    waits for the next token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._heads = 0  # tokens of the window that are said; they are there to give the rest its context
        self._said = ""  # their text

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer.feed."""
        return "".join(self._push(token_id) for token_id in token_ids)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = str(self._decode(self._window, skip_special_tokens=True))
        if text.endswith(_REPLACEMENT):
            return ""
        fresh = text[len(self._said) :]
        self._begin_at_border()
        return fresh

    def _begin_at_border(self) -> None:
        """Keep what was just said as the context of what follows."""
        self._window = self._window[self._heads :]
        self._heads = len(self._window)
        self._said = str(self._decode(self._window, skip_special_tokens=True))

    def flush(self) -> str:
        """What was kept back, without the half character at its end."""
        text = str(self._decode(self._window, skip_special_tokens=True)).rstrip(_REPLACEMENT)
        fresh = text[len(self._said) :]
        self._window, self._heads, self._said = [], 0, ""
        return fresh
