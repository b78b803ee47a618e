"""The whole service with the real engine and a real model, through the public API only.

Figures (first token, tokens/s) depend on the machine: they are printed against the promises, and `make bench-path`
writes them to docs/performance. What is asserted is what holds on any machine.
"""

import os
import signal
import statistics
import threading
import time

import httpx
import pytest

from tests.e2e.client import Event, Service, User, events, text_of, wait_for
from tests.e2e.conftest import FIGURES

pytestmark = [pytest.mark.vllm, pytest.mark.model_service]

COMMON_ENGLISH = {"the", "a", "of", "and", "to", "is", "in", "that", "it", "you", "for", "with", "are"}


def tell(name: str, value: float, unit: str, goal: str, met: bool) -> None:
    """A figure against its promise."""
    FIGURES.append(f"{name} {value:.2f} {unit} goal {goal} {'met' if met else 'missed'}")


def first_delta(seen: list[Event]) -> Event:
    return next(event for event in seen if event.kind == "delta")


def metric(service: Service, name: str) -> float:
    """A gauge of worker-large-0, summed over its labels."""
    import json

    port = json.loads((service.local_dir / "state" / "ports.json").read_text())["worker-large-0"]
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith(name) and not line.startswith("#")]
    assert lines, f"{name} is not among the metrics:\n{text}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def speed(seen: list[Event]) -> float:
    """Tokens a second between the first and the last delta, from the tokens that `done` counts."""
    deltas = [event for event in seen if event.kind == "delta"]
    return (seen[-1].data["usage"]["outputTokens"] - 1) / (deltas[-1].at - deltas[0].at)


def test_first_token_and_english(vllm_service: Service) -> None:
    user, firsts, texts = vllm_service.user(), [], []
    user.ask(user.conversation(), "Say hello.", maxTokens=8)
    for number in range(20):
        conversation = user.conversation()
        start = time.monotonic()
        seen = user.ask(conversation, f"Write two sentences about the number {number}.", maxTokens=40)
        assert seen[-1].kind == "done", seen[-1]
        firsts.append(first_delta(seen).at - start)
        texts.append(text_of(seen))
    p95 = statistics.quantiles(firsts, n=20)[-1]
    tell("first-token-p50", statistics.median(firsts), "s", "<1.5", statistics.median(firsts) < 1.5)
    tell("first-token-p95", p95, "s", "<1.5", p95 < 1.5)
    words = [word.strip(".,!?").lower() for text in texts for word in text.split()]
    assert sum(word in COMMON_ENGLISH for word in words) / len(words) > 0.15, texts
    assert sum(text.isascii() for text in texts) >= 15, texts


def test_two_replies_at_once(vllm_service: Service) -> None:
    users = [vllm_service.user() for _ in range(2)]
    results: list[list[Event]] = []

    def ask(user: User) -> None:
        question = "Tell a long story about a ship and its crew."
        results.append(user.ask(user.conversation(), question, maxTokens=120))

    threads = [threading.Thread(target=ask, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    speeds = [speed(seen) for seen in results]
    tell("speed-of-each-of-two", min(speeds), "tokens/s", ">=20", min(speeds) >= 20)
    assert all(seen[-1].kind == "done" for seen in results)


def test_stop_frees_the_blocks_of_the_engine(vllm_service: Service) -> None:
    """The small model may end by itself before the stop arrives: then it is asked again."""
    user = vllm_service.user()
    for _ in range(8):
        conversation, seen = user.conversation(), []
        with user.send(conversation, "Count from one to a thousand in words.", maxTokens=400) as response:
            generation = response.headers["x-generation-id"]
            for event in events(response):
                seen.append(event)
                if event.kind == "started":
                    user.http.post(f"/v1/generations/{generation}/cancel")
        if seen[-1].kind == "done" and seen[-1].data["status"] == "CANCELLED":
            break
    assert seen[-1].kind == "done" and seen[-1].data["status"] == "CANCELLED"
    wait_for(lambda: metric(vllm_service, "worker_kv_used_fraction") == 0, 10, "blocks are free")
    wait_for(lambda: metric(vllm_service, "worker_running") == 0, 10, "nothing runs")
    reply = user.messages(conversation)[-1]
    assert (reply["status"], reply["content"]) == ("CANCELLED", text_of(seen))


def test_the_next_turn_has_the_context(vllm_service: Service) -> None:
    """That a model of 135M parameters repeats a name is luck; that it was told is not: the prompt holds both turns."""
    user = vllm_service.user()
    conversation = user.conversation()
    first = user.ask(conversation, "My name is Mikan. Please greet me by my name.", maxTokens=30)
    second = user.ask(conversation, "What is my name?", maxTokens=30)
    told = first[-1].data["usage"]
    assert second[-1].data["usage"]["inputTokens"] > told["inputTokens"] + told["outputTokens"]
    recalled = "Mikan" in text_of(second)
    tell("name-recalled", float(recalled), "of 1", "1", recalled)


@pytest.mark.parametrize("after_deltas", [1, 4])
def test_a_killed_workers_reply_goes_on_as_if_nothing_happened(exact_vllm_service: Service, after_deltas: int) -> None:
    """float32 and temperature 0: the continued reply equals the uninterrupted one, token for token."""
    user, question = exact_vllm_service.user(), "Write a poem about the sea and the wind."
    uninterrupted = user.ask(user.conversation(), question, maxTokens=100)
    conversation, seen = user.conversation(), []
    killed = exact_vllm_service.pid("worker-large-0")
    with user.send(conversation, question, maxTokens=100) as response:
        generation = response.headers["x-generation-id"]
        for event in events(response):
            if event.id is not None:
                seen.append(event)
            if sum(event.kind == "delta" for event in seen) == after_deltas and event.kind == "delta":
                os.kill(killed, signal.SIGKILL)
    seen = user.follow_to_the_end(generation, seen, seconds=300)
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].kind == "done", seen[-1]
    assert text_of(seen) == text_of(uninterrupted) == user.messages(conversation)[-1]["content"]
    assert seen[-1].data["usage"]["outputTokens"] == uninterrupted[-1].data["usage"]["outputTokens"]
