"""The real engine with the real model, below the service: exact continuation, stops, half characters, its processes.

Greedy and float32, since bfloat16 is not bit-exact from one batch to another (docs/adr/0006). The engine lives in
another environment: engine_scenario.py drives it there, once, and the tests look at what happened.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "model" / "smollm2-135m-instruct"
PYTHON = ROOT / ".cache" / "venv" / "vllm" / "bin" / "python"
TOKENS, CONTEXT = 64, 512


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.e2e.engine_scenario", MODEL],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("RESULT "):
                yield process, json.loads(line[7:])
                return
        pytest.fail(f"the engine did not come to an end:\n{log.read_text()[-4000:]}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def found(scenario: tuple["subprocess.Popen[str]", dict[str, Any]]) -> dict[str, Any]:
    return scenario[1]


def test_it_speaks(found: dict[str, Any]) -> None:
    print(f"\nengine up in {found['start']:.0f} s, {found['capacity']} KV tokens")
    assert found["capacity"] > 10_000
    assert len(found["whole"]) == TOKENS
    assert found["text"].isascii() and len(found["text"].split()) > 20, found["text"]


@pytest.mark.parametrize("split", ["1", "7", "31", str(TOKENS - 1)])
def test_a_continuation_equals_the_uninterrupted_reply(found: dict[str, Any], split: str) -> None:
    assert found["continued"][split] == found["whole"]


def test_a_batch_equals_the_lone_reply(found: dict[str, Any]) -> None:
    assert found["together"] == [found["whole"]] * 4


def test_saved_tokens_at_the_cap_end_at_once(found: dict[str, Any]) -> None:
    assert found["at the cap"] == [[[], "length"]]


def test_a_stop_frees_the_blocks_within_one_step(found: dict[str, Any]) -> None:
    for stop in found["stops"]:
        print(", ".join(f"{name} {value}" for name, value in stop.items()))
        assert stop["finish"] == "cancelled"
        assert stop["used_before"] > 0 and stop["running_before"] == 1
        assert stop["used_after"] == 0 and stop["running_after"] == 0
        # The step that runs when the stop comes ends first; one more reports what it freed.
        assert stop["free"] < 2 * stop["longest_step"] + 0.05


def test_a_stop_on_the_way_into_the_engine_is_not_lost(found: dict[str, Any]) -> None:
    for tokens, finish in found["early stops"]:
        assert finish == "cancelled" and tokens <= 2


def test_a_reader_that_leaves_frees_the_blocks(found: dict[str, Any]) -> None:
    assert found["leaver"]["used"] == 0


def test_half_characters_wait_in_every_split(found: dict[str, Any]) -> None:
    assert found["emoji"]["splits"] and all(found["emoji"]["splits"])
    assert "\ufffd" not in found["emoji"]["text"]


def test_prompts_at_the_limit_of_the_context(found: dict[str, Any]) -> None:
    (below, made, finish), at, over = found["limits"]
    assert (below, made) == (CONTEXT - 1, 1) and finish in ("stop", "length")
    assert at == [CONTEXT, 0, "refused"] and over == [CONTEXT + 1, 0, "refused"]


def test_signals_of_the_group_do_not_reach_the_engine(found: dict[str, Any]) -> None:
    assert found["after group signal"] == 8


def test_the_engine_dies_with_its_replica(scenario: tuple["subprocess.Popen[str]", dict[str, Any]]) -> None:
    """Last, since it kills the replica: no child may go on filling memory and a core."""
    process, found = scenario
    session = os.getsid(process.pid)
    assert found["children"] and all(alive(pid) for pid in found["children"])
    os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while left := members(session):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def members(session: int) -> list[str]:
    """Command lines of the processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *_, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " ")[:100])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
