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

    Decodes from the last border at which the text was whole, so that the cost of a step does not grow with the
    reply; a text that ends in U+FFFD is half a character and waits for the next token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer.feed."""
        self._ids.extend(token_ids)
        return self._advance(final=False)

    def flush(self) -> str:
        """See Detokenizer.flush."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._prefix : self._read], skip_special_tokens=True)
        whole = self._decode(self._ids[self._prefix :], skip_special_tokens=True)
        if whole.endswith(_REPLACEMENT) and not final:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return str(whole[len(before) :]).rstrip(_REPLACEMENT) if final else str(whole[len(before) :])
