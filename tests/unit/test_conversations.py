"""Deleting, and pages of history that a Lambda can answer with."""

from typing import Any

import pytest

from chat.errors import NotFound, Unavailable
from chat.model import Message, MessageStatus, Role, StoredMessage
from chat.usecases.conversations import PAGE_BYTES, DeleteConversation, ListMessages


class Store:
    """Remembers what was done; `sizes` are the lengths of the contents, oldest first."""

    def __init__(self, *sizes: int, running: str | None = None) -> None:
        self.sizes, self.running, self.done = sizes, running, []

    async def messages(self, user: str, ident: str, before: int | None, limit: int) -> Any:
        seqs = [seq for seq in range(len(self.sizes), 0, -1) if before is None or seq < before][:limit]
        found = [
            StoredMessage(
                Message(
                    f"msg_{seq}", ident, seq, Role.USER, "\0" * self.sizes[seq - 1], MessageStatus.COMPLETED,
                    None, None, None, "",
                ), 1,
            )
            for seq in seqs
        ]  # fmt: skip
        return found, seqs[-1] if seqs and seqs[-1] > 1 else None

    async def delete(self, user: str, ident: str) -> str | None:
        self.done.append("delete")
        return self.running

    async def purge(self, ident: str) -> bool:
        self.done.append("purge")
        return True


@pytest.mark.parametrize("sizes", [(100_000,) * 40, (1,) * 40, (900_000, 1, 900_000, 1), ()])
async def test_pages_hold_what_an_answer_can_and_miss_nothing(sizes: tuple[int, ...]) -> None:
    use_case = ListMessages(Store(*sizes))  # type: ignore[arg-type]
    found: list[int] = []
    before: int | None = None
    while True:
        page = await use_case("ada", "conv_1", before, 100)
        found += [message.seq for message in page.data]
        # NUL is six bytes of JSON; one message alone is given whatever its size.
        assert len(page.data) <= 1 or sum(6 * len(message.content) for message in page.data) <= PAGE_BYTES
        before = page.next_before
        if before is None:
            break
    assert found == list(range(len(sizes), 0, -1))


@pytest.mark.parametrize("fault", [None, NotFound("gone"), Unavailable("away")])
async def test_deleting_marks_stops_and_purges_whatever_becomes_of_the_stop(fault: Exception | None) -> None:
    store = Store(running="gen_1")

    async def cancel(user: str, generation: str) -> None:
        store.done.append(f"stop {generation}")
        if fault:
            raise fault

    await DeleteConversation(store, cancel)("ada", "conv_1")  # type: ignore[arg-type]
    assert store.done == ["delete", "stop gen_1", "purge"]
