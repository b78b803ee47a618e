"""Counting tokens: three bytes a token, or a model folder's own tokenizer and chat template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from chat.adapters.tokenizer import ByteCounter, ModelCounter, render_plain, token_counter
from chat.model import ChatMessage, Role

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
PROMPT = [ChatMessage(Role.SYSTEM, "be brief"), ChatMessage(Role.USER, "good day")]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("abc", 1), ("abcd", 2), ("é", 1), ("😀", 2), ("😀😀😀", 4), ("Việt", 2), ("\ud800", 1)],
)
def test_three_bytes_make_a_token(text: str, tokens: int) -> None:
    assert ByteCounter().count(text) == tokens


def test_a_prompt_counts_as_the_text_that_is_sent_to_the_engine() -> None:
    counter = ByteCounter()
    assert counter.prompt(PROMPT) == counter.count(render_plain(PROMPT))
    assert counter.prompt([]) == counter.count("<|assistant|>\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of whole words."""
    words = ["?", "system", "user", "assistant", "be", "brief", "good", "day"]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_model_folder_counts_with_its_own_tokenizer_and_template(folder: Path, name: str) -> None:
    text = TEMPLATE if name.endswith(".jinja") else json.dumps({"chat_template": TEMPLATE})
    (folder / name).write_text(text)
    counter = token_counter(str(folder))
    assert isinstance(counter, ModelCounter)
    assert counter.count("good day unheard") == 3
    assert counter.prompt(PROMPT) == len(["system", "be", "brief", "user", "good", "day", "assistant"])


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(Exception, match="unsafe"):
        token_counter(str(folder)).prompt(PROMPT)


def test_the_setting_names_the_counter() -> None:
    assert isinstance(token_counter("bytes"), ByteCounter)
