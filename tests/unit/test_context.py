"""The prompt of a turn: what fits, what counts as said, and the reply cap at the border of the context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.adapters.tokenizer import ByteCounter
from chat.errors import ContextLengthExceeded
from chat.model import Message, MessageStatus, Role, StoredMessage
from chat.settings import ModelSpec
from chat.usecases.context import ContextBuilder, on_the_path
from chat.usecases.turns import title_of

COUNTER = ByteCounter()


def said(
    seq: int,
    role: Role,
    content: str,
    *,
    parent: str | None = None,
    status: MessageStatus = MessageStatus.COMPLETED,
) -> StoredMessage:
    message = Message(
        f"msg_{seq}", "conv_1", seq, role, content, status, None, parent, None, "2026-01-01T00:00:00.000Z"
    )
    return StoredMessage(message, COUNTER.count(content))


def model(context_tokens: int) -> ModelSpec:
    return ModelSpec("m", "large", context_tokens, ["free"], 0, 0)


def builder(budget: int = 6000, system: str = "Be brief.") -> ContextBuilder:
    return ContextBuilder(COUNTER, system, budget)


def test_the_prompt_is_system_then_history_then_question() -> None:
    history = [
        said(3, Role.USER, "and now?"),
        said(2, Role.ASSISTANT, "hi", parent="msg_1"),
        said(1, Role.USER, "hello"),
    ]
    found = builder().build(history, model(8000), 100)
    assert [(one.role, one.content) for one in found.messages] == [
        (Role.SYSTEM, "Be brief."),
        (Role.USER, "hello"),
        (Role.ASSISTANT, "hi"),
        (Role.USER, "and now?"),
    ]
    assert found.max_tokens == 100


@given(st.lists(st.text(max_size=300), min_size=1, max_size=30), st.integers(50, 2000))
def test_the_count_is_never_below_the_real_prompt_and_within_the_budget(contents: list[str], budget: int) -> None:
    history = [said(len(contents) - place, Role.USER, text) for place, text in enumerate(contents)]
    found = builder(budget).build(history, model(100_000), 10)
    alone = builder(budget).build(history[:1], model(100_000), 10)
    assert found.prompt_tokens >= COUNTER.prompt(found.messages)
    assert found.prompt_tokens <= max(budget, alone.prompt_tokens)
    assert found.messages[-1].content == contents[0]


@pytest.mark.parametrize(("room", "expected"), [(99, 99), (100, 100), (101, 100)])
def test_the_reply_cap_is_clamped_at_the_border_of_the_context(room: int, expected: int) -> None:
    question = [said(1, Role.USER, "hello")]
    prompt = builder().build(question, model(10_000), 100).prompt_tokens
    assert builder().build(question, model(prompt + room), 100).max_tokens == expected


@pytest.mark.parametrize("room", [-1, 0])
def test_a_question_that_does_not_fit_alone_is_refused(room: int) -> None:
    question = [said(1, Role.USER, "hello")]
    prompt = builder().build(question, model(10_000), 100).prompt_tokens
    with pytest.raises(ContextLengthExceeded) as caught:
        builder().build(question, model(prompt + room), 100)
    assert caught.value.param == "content"
    assert builder().build(question, model(prompt + 1), 100).max_tokens == 1


def test_of_several_replies_the_newest_counts_and_nothing_refused_or_empty() -> None:
    history = [
        said(7, Role.ASSISTANT, "", parent="msg_5", status=MessageStatus.STREAMING),
        said(6, Role.ASSISTANT, "x", parent="msg_5", status=MessageStatus.REFUSED),
        said(5, Role.USER, "third"),
        said(4, Role.ASSISTANT, "again", parent="msg_1"),
        said(3, Role.ASSISTANT, "", parent="msg_1", status=MessageStatus.FAILED),
        said(2, Role.ASSISTANT, "first try", parent="msg_1"),
        said(1, Role.USER, "first"),
    ]
    assert [one.message.seq for one in on_the_path(history)] == [5, 4, 1]


def test_the_head_of_the_prompt_is_the_same_for_everybody() -> None:
    first = builder().build([said(1, Role.USER, "a")], model(8000), 10).messages[0]
    second = builder().build([said(9, Role.USER, "b" * 500)], model(8000), 10).messages[0]
    assert first == second


def test_a_title_is_the_beginning_of_the_first_message_on_one_line() -> None:
    assert title_of("  What is\n a lane?  ") == "What is a lane?"
    assert len(title_of("word " * 100)) == 60
