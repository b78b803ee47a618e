"""Whole characters only, whatever the borders of tokens and of calls are."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chat.adapters.engines.detokenizer import ByteDetokenizer, PieceDetokenizer, bytes_of, token_of

SENTENCES = [
    "Xin chào! Tôi đang học tiếng Việt, rất vui được gặp bạn. Chữ ẵ, ự, ễ.",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumbs 🇻🇳",
    "e\u0301 n\u0303 a\u0308\u0304 combining, ก็ Thai, हिन्दी",
    "日本語と中文、한국어. Mixed ascii tail.",
    "",
]
TEXT = st.one_of(st.sampled_from(SENTENCES), st.text(st.characters(exclude_categories=["Cs"]), max_size=60))


@cache
def tokenizer() -> Tokenizer:
    """A small byte-level BPE, of the kind that SmolLM2, Llama 3 and Qwen have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made


def cut(ids: list[int], borders: list[int]) -> list[list[int]]:
    at = sorted({border % (len(ids) + 1) for border in borders})
    return [ids[start:end] for start, end in zip([0, *at], [*at, len(ids)], strict=True)]


def byte_tokens(text: str) -> list[int]:
    raw = text.encode()
    return [token_of(raw[start : start + 3]) for start in range(0, len(raw), 3)]


def whole(text: str) -> str:
    return text.rstrip("\ufffd")


@given(st.binary(min_size=1, max_size=3))
def test_a_byte_token_keeps_its_bytes(piece: bytes) -> None:
    assert bytes_of(token_of(piece)) == piece


@given(TEXT, st.lists(st.integers(0, 200), max_size=8))
def test_byte_tokens_give_their_text(text: str, borders: list[int]) -> None:
    detokenizer = ByteDetokenizer()
    pieces = [detokenizer.feed(part) for part in cut(byte_tokens(text), borders)]
    assert "".join(pieces) + detokenizer.flush() == text


def test_half_a_character_at_the_end_is_dropped() -> None:
    detokenizer = ByteDetokenizer()
    assert detokenizer.feed(byte_tokens("ab👋")[:1]) == "ab"
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(TEXT, st.lists(st.integers(0, 200), max_size=8))
def test_pieces_give_the_full_decode(text: str, borders: list[int]) -> None:
    ids = tokenizer().encode(text).ids
    detokenizer = PieceDetokenizer(tokenizer())
    pieces = [detokenizer.feed(part) for part in cut(ids, borders)]
    assert "".join(pieces) + detokenizer.flush() == whole(tokenizer().decode(ids))
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 399), max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_any_tokens_give_the_full_decode(ids: list[int], borders: list[int]) -> None:
    """A model may say anything, half characters and special tokens too."""
    ids = [one % tokenizer().get_vocab_size() for one in ids]
    detokenizer = PieceDetokenizer(tokenizer())
    said = "".join(detokenizer.feed(part) for part in cut(ids, borders)) + detokenizer.flush()
    assert whole(said) == whole(tokenizer().decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("text", SENTENCES)
def test_a_continuation_says_exactly_the_rest(text: str) -> None:
    """The saved tokens are fed at once, also when they end inside a character; only what follows is said."""
    ids = tokenizer().encode(text).ids
    for split in range(len(ids) + 1):
        first, second = PieceDetokenizer(tokenizer()), PieceDetokenizer(tokenizer())
        said = "".join(first.feed([one]) for one in ids[:split])
        assert second.feed(ids[:split]) == said
        assert said + second.feed(ids[split:]) + second.flush() == text
