"""The supervisor keeps processes alive, and `make up` and `make down` say what happens. Starts a simulated service."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stacks.local import backends
from stacks.local.backends import ROOT, Command, free_port, is_free
from stacks.local.options import Options, OptionsError
from stacks.local.supervisor import Failure, Process, Supervisor

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def wait_for(check: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


class Watched(Supervisor):
    """A supervisor of processes of a test's choice."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Options(directory))
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def add(self, name: str, argv: list[str], after: Callable[[], None] | None = None) -> Process:
        self._add(Process(name, Command(argv, environment(), ROOT), after))
        return self.processes[-1]

    def pid(self, name: str) -> int:
        return int((self.options.local_dir / "run" / f"{name}.pid").read_text())

    def step(self) -> None:
        self._keep_alive()
        time.sleep(0.02)

    def stop(self) -> None:
        self._stop_all()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.stop()


def test_a_killed_process_runs_again_within_two_seconds(watched: Watched) -> None:
    steps: list[str] = []
    watched.add("one", SLEEPER, lambda: steps.append("after"))
    for _ in range(3):
        before = watched.pid("one")
        os.kill(before, signal.SIGKILL)
        start = time.monotonic()
        while watched.pid("one") == before or not alive(watched.pid("one")):
            watched.step()
            assert time.monotonic() - start < 2
    wait_for(lambda: len(steps) == 3, 2, "the step after each new start ran")


def test_what_ends_at_once_is_started_with_pauses_of_less_than_two_seconds(watched: Watched) -> None:
    process = watched.add("bad", [sys.executable, "-c", "raise SystemExit(3)"])
    end = time.monotonic() + 5
    while time.monotonic() < end:
        watched.step()
    assert 3 <= process.restarts <= 20
    assert process.pause < 2
    assert any("bad ended (3)" in line for line in watched.said)


def test_one_that_ends_does_not_hold_up_the_others(watched: Watched) -> None:
    def slow() -> None:
        time.sleep(5)

    watched.add("one", SLEEPER, slow)
    watched.add("two", SLEEPER)
    os.kill(watched.pid("one"), signal.SIGKILL)
    wait_for(lambda: not alive(watched.pid("one")), 5, "it is dead")
    watched.step()
    before = watched.pid("two")
    os.kill(before, signal.SIGKILL)
    start = time.monotonic()
    while watched.pid("two") == before:
        watched.step()
        assert time.monotonic() - start < 2


def test_children_of_a_killed_process_do_not_stay(watched: Watched, tmp_path: Path) -> None:
    note = tmp_path / "child"
    parent = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(f'{child.pid}\\n')\n"
        "time.sleep(600)"
    )
    watched.add("parent", [sys.executable, "-c", parent, str(note)])
    wait_for(lambda: note.exists() and note.read_text().endswith("\n"), 5, "the child runs")
    child = int(note.read_text())
    os.kill(watched.pid("parent"), signal.SIGKILL)
    wait_for(lambda: (watched.step(), not alive(child))[1], 5, "the child ends")


def test_a_failed_step_shows_the_end_of_its_log(watched: Watched) -> None:
    with pytest.raises(Failure, match="it went wrong"):
        watched._run_once("step", [sys.executable, "-c", "raise SystemExit('it went wrong')"])


def test_ports_stay_and_are_given_up_when_taken(tmp_path: Path) -> None:
    options = Options(tmp_path, port=free_port(), replicas=2)
    first = options.ports()
    assert len(set(first.values())) == len(options.process_names()) == len(first)
    assert Options(tmp_path, port=options.port, replicas=2).ports() == first
    more = Options(tmp_path, port=options.port, replicas=3)
    assert more.ports().items() > first.items()
    taken = first["streamer-0"]
    server = subprocess.Popen([sys.executable, "-m", "http.server", str(taken), "--bind", "127.0.0.1"])
    try:
        wait_for(lambda: not is_free(taken), 10, "something else listens")
        options.give_up_taken_ports(wait_seconds=0)
        renewed = more.ports()
        assert renewed["streamer-0"] != taken
        assert {name for name in renewed if renewed[name] != first.get(name, renewed[name])} == {"streamer-0"}
        with pytest.raises(OptionsError, match=f"PORT={taken}"):
            Options(tmp_path, port=taken).give_up_taken_ports(wait_seconds=0)
    finally:
        server.terminate()
        server.wait(10)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"engine": "gpt"}, "ENGINE=gpt"),
        ({"port": 0}, "PORT=0"),
        ({"streamers": 0}, "STREAMERS=0"),
        ({"small_replicas": -1}, "SMALL_REPLICAS=-1"),
        ({"engine": "openai"}, "OPENAI_BASE_URL"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, given: dict, names: str) -> None:
    with pytest.raises(OptionsError, match=re.escape(names)):
        Options(tmp_path, **given).check()


def up(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stacks.local.up", "--local-dir", str(directory), "--engine", "simulated", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


def test_up_twice_a_killed_supervisor_and_down(tmp_path: Path) -> None:
    """The whole service. What runs again, what stays, and what is left at the end."""
    port = ("--port", str(free_port()))
    try:
        first = up(tmp_path, *port)
        assert first.returncode == 0, first.stdout + first.stderr
        assert first.stdout.strip().endswith(f"http://127.0.0.1:{port[1]}")
        names = {path.stem: int(path.read_text()) for path in (tmp_path / "run").glob("*.pid")}
        assert names.keys() == {"valkey", "ministack", "edge", "streamer-0", "dispatcher-0", "worker-large-0"}
        assert all(map(alive, names.values()))

        again = up(tmp_path, *port)
        assert again.returncode == 0 and "already running" in again.stdout

        supervisor = int((tmp_path / "supervisor.pid").read_text())
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, names.values())), 30, "its children end with it")
        third = up(tmp_path, *port)
        assert third.returncode == 0, third.stdout + third.stderr

        other = up(tmp_path, *port, "--streamers", "2")
        assert other.returncode == 0 and "other options" in other.stdout
        names = {path.stem: int(path.read_text()) for path in (tmp_path / "run").glob("*.pid")}
        assert "streamer-1" in names
    finally:
        stopped = up(tmp_path, "--down")
    assert stopped.returncode == 0
    assert not any(map(alive, names.values()))
    assert not list((tmp_path / "run").glob("*.pid"))
    assert "nothing runs" in up(tmp_path, "--down").stdout


def test_up_names_what_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ends at once: `make up` fails and shows the end of its log."""
    supervisor = Watched(tmp_path)
    supervisor.add("streamer-0", [sys.executable, "-c", "raise SystemExit('no such setting')"])
    wait_for(lambda: supervisor.processes[0].running.poll() is not None, 10, "it ended")
    with pytest.raises(Failure, match=r"(?s)streamer-0 ended at once.*no such setting"):
        supervisor._wait_until_ready(time.monotonic())
    supervisor.stop()


def test_valkey_keeps_its_data_over_a_kill(tmp_path: Path) -> None:
    import redis

    port = free_port()
    for turn in range(2):
        process = backends.start(backends.valkey_command(tmp_path, port), tmp_path / "log")
        backends.assign_slots(port)
        client = redis.Redis(port=port)
        if turn:
            assert client.get("key") == b"value"
        client.set("key", "value")
        process.kill()
        process.wait(10)
