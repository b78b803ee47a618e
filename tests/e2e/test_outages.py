"""A store that is away for a while: clear refusals, recovery without a restart, nothing saved is lost."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.client import Event, Service, events, text_of, wait_for

OUTAGE_SECONDS = 10.0


@contextmanager
def frozen(service: Service, process: str) -> Iterator[None]:
    """The process does not answer inside the block, and goes on after it."""
    pid = service.pid(process)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("process", ["valkey", "ministack"])
def test_a_store_away_gives_503_and_recovers(service: Service, process: str) -> None:
    user = service.user()
    conversation = user.conversation()
    user.ask(conversation, "before the outage")
    with frozen(service, process):
        start = time.monotonic()
        with user.send(conversation, "during the outage", clientMessageId="during") as response:
            response.read()
            assert response.status_code == 503, response.text
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "unavailable"
        assert time.monotonic() - start < OUTAGE_SECONDS
        time.sleep(max(0.0, OUTAGE_SECONDS - (time.monotonic() - start)))

    def again() -> list[Event] | None:
        with user.send(conversation, "during the outage", clientMessageId="during") as response:
            return list(events(response)) if response.status_code == 200 else None

    seen = wait_for(again, 30, "the same send succeeds after the outage")
    assert isinstance(seen, list) and seen[-1].kind == "done"
    history = user.messages(conversation)
    assert [message["role"] for message in history] == ["user", "assistant"] * 2
    assert history[0]["content"] == "before the outage"
    assert history[-1]["content"] == text_of(seen)


@pytest.mark.parametrize("process", ["valkey", "ministack"])
def test_a_reply_survives_an_outage_in_its_middle(service: Service, process: str) -> None:
    user = service.user()
    conversation, seen = user.conversation(), []
    message = '/sim {"tokens": 900, "rate": 60}'
    with user.send(conversation, message) as response:
        generation = response.headers["x-generation-id"]
        for event in events(response):
            seen.append(event)
            if sum(one.kind == "delta" for one in seen) == 2:
                break
    with frozen(service, process):
        time.sleep(OUTAGE_SECONDS)
    seen = user.follow_to_the_end(generation, [event for event in seen if event.id], seconds=60)
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].kind == "done" and seen[-1].data["usage"]["outputTokens"] == 900
    wait_for(lambda: user.messages(conversation)[-1]["content"] == text_of(seen), 10, "the reply is saved")
