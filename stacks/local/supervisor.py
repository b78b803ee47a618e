"""Runs the local stack: starts every process in order, starts again what dies, stops everything in order.

`make up` starts it in the background; its log is `$LOCAL_DIR/log/supervisor.log`. A service's process gets exactly
the environment that its task definition declares, and what its platform adds (address, region, credentials).
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stacks.local import backends
from stacks.local.backends import CREDENTIALS, ROOT, Command
from stacks.local.options import LOCAL_FUNCTIONS, Options

DEV_PYTHON = ROOT / ".cache" / "venv" / "dev" / "bin" / "python"
VLLM_PYTHON = ROOT / ".cache" / "venv" / "vllm" / "bin" / "python"
READY = "ready"
POLL_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.5
STOP_SECONDS = 30.0
START_SECONDS = {"vllm": 600.0, "simulated": 30.0, "openai": 30.0}


@dataclass
class Process:
    """A process that is kept alive. `after` runs after each start of a killed one."""

    name: str
    command: Command
    after: Callable[[], None] | None = None
    running: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    pause: float = 0.0
    restarts: int = field(default=0)


class Supervisor:
    """The processes of one `$LOCAL_DIR`."""

    def __init__(self, options: Options) -> None:
        self.options, self.ports = options, options.ports()
        self.processes: list[Process] = []
        self.stopping = False

    def say(self, text: str) -> None:
        """A line of progress."""
        print(text, flush=True)

    def run(self) -> int:
        """Until SIGTERM. Answers an exit status."""
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda *_: setattr(self, "stopping", True))
        try:
            self._start_all()
            self.say(READY)
            while not self.stopping:
                self._keep_alive()
                time.sleep(POLL_SECONDS)
        except (Failure, TimeoutError) as failure:
            self.say(f"failed: {failure}")
            return 1
        finally:
            self._stop_all()
        return 0

    def _start_all(self) -> None:
        began = time.monotonic()
        local = self.options.local_dir
        ports = self.ports
        slots = lambda: backends.assign_slots(ports["valkey"])  # noqa: E731
        self._add(Process("valkey", backends.valkey_command(local / "valkey", ports["valkey"]), slots))
        command = backends.ministack_command(local / "ministack", ports["ministack"])
        self._add(Process("ministack", command, self._apply_again))
        slots()
        backends.wait_for_ministack(ports["ministack"])
        self.say(f"  {time.monotonic() - began:5.1f} s  Valkey and the AWS emulator answer")
        self._run_once("functions", [str(DEV_PYTHON), "scripts/build_functions.py", "--output", str(LOCAL_FUNCTIONS)])
        self.say(f"  {time.monotonic() - began:5.1f} s  functions are built")
        applied = self._apply_if_changed()
        self.say(f"  {time.monotonic() - began:5.1f} s  the Pulumi program is {'applied' if applied else 'unchanged'}")
        facts = json.loads((local / "state" / "applied.json").read_text())
        for service in facts["services"]:
            for number in range(service["count"]):
                self._add(Process(f"{service['name']}-{number}", self._service(service, number)))
        self._add(Process("edge", self._edge()))
        self._wait_until_ready(began)

    def _add(self, process: Process) -> None:
        self.processes.append(process)
        self._start(process)

    def _start(self, process: Process) -> None:
        log = self.options.local_dir / "log" / f"{process.name}.log"
        process.running = backends.start(process.command, log, ends_with_parent=True)
        process.started_at = time.monotonic()
        run = self.options.local_dir / "run"
        run.mkdir(parents=True, exist_ok=True)
        (run / f"{process.name}.pid").write_text(str(process.running.pid))

    def _keep_alive(self) -> None:
        """Start again what died: at once, and with growing pauses what dies as soon as it starts."""
        now = time.monotonic()
        for process in self.processes:
            if process.running is not None and process.running.poll() is not None:
                status, lived = process.running.returncode, now - process.started_at
                _kill_group(process.running.pid)  # what it left behind, such as its Lambdas
                process.pause = 0.0 if lived > 5 else min(max(process.pause * 2, 0.2), LONGEST_PAUSE_SECONDS)
                process.start_at, process.running = now + process.pause, None
                self.say(f"{process.name} ended ({status}) after {lived:.1f} s, starting it again")
            if process.running is None and now >= process.start_at:
                process.restarts += 1
                self._start(process)
                if process.after is not None:
                    threading.Thread(target=self._after, args=(process.after,), daemon=True).start()

    def _after(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (Failure, TimeoutError) as failure:
            self.say(f"failed: {failure}")

    def _apply_if_changed(self) -> bool:
        """Apply, unless the same program with the same settings was applied and the emulator still has it."""
        stamp = self.options.local_dir / "state" / "applied.sha256"
        digest = _program_digest(self.options)
        if stamp.exists() and stamp.read_text() == digest and self._is_applied():
            return False
        stamp.unlink(missing_ok=True)
        self._apply()
        stamp.write_text(digest)
        return True

    def _is_applied(self) -> bool:
        """Whether the emulator has what was applied."""
        facts_file = self.options.local_dir / "state" / "applied.json"
        if not facts_file.exists():
            return False
        return _answers(json.loads(facts_file.read_text())["apiUrl"] + "/healthz")

    def _apply(self) -> None:
        self._run_once("applier", [str(DEV_PYTHON), "-m", "stacks.local.applier", str(self.options.file)])

    def _apply_again(self) -> None:
        """The emulator keeps its state over a kill, unless it came while that state was being made."""
        backends.wait_for_ministack(self.ports["ministack"])
        if not self._is_applied():
            self._apply()

    def _run_once(self, name: str, argv: list[str]) -> None:
        log = self.options.local_dir / "log" / f"{name}.log"
        environment = _platform() | {"PATH": os.environ.get("PATH", "")}
        for inherited in ("PIP_FIND_LINKS", "SSL_CERT_FILE", "PIP_CERT", "UV_CACHE_DIR"):
            if inherited in os.environ:
                environment[inherited] = os.environ[inherited]
        process = backends.start(Command(argv, environment, ROOT), log)
        if process.wait():
            raise Failure(f"{' '.join(argv[1:])}, see {log}\n{_tail(log)}")

    def _service(self, service: dict[str, Any], number: int) -> Command:
        name = f"{service['name']}-{number}"
        uses_vllm = service["container"] == "worker" and self.options.engine == "vllm"
        python = VLLM_PYTHON if uses_vllm else DEV_PYTHON
        environment = service["environment"] | _platform()
        environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports['ministack']}",
            "HOST": "127.0.0.1",
            "PORT": str(self.ports[name]),
            "REPLICA_NAME": name,
        }
        return Command([str(python), "-m", f"containers.{service['container']}.app"], environment, ROOT)

    def _edge(self) -> Command:
        argv = [str(DEV_PYTHON), "-m", "stacks.local.edge", "--port", str(self.options.port)]
        argv += ["--local-dir", str(self.options.local_dir), "--web", str(ROOT / "web")]
        return Command(argv, _platform(), ROOT)

    def _wait_until_ready(self, began: float) -> None:
        """Every service answers its health check, and a request passes the whole way of the API."""
        probes = {
            name: f"http://127.0.0.1:{port}/healthz"
            for name, port in self.ports.items()
            if any(process.name == name for process in self.processes) and name not in ("valkey", "ministack")
        }
        probes["edge"] = f"http://127.0.0.1:{self.options.port}/healthz"
        end = time.monotonic() + START_SECONDS[self.options.engine]
        if self.options.engine == "vllm":
            self.say("         the model is loaded (half a minute)")
        while probes and not self.stopping:
            for process in self.processes:
                if process.running is not None and process.running.poll() is not None:
                    log = self.options.local_dir / "log" / f"{process.name}.log"
                    raise Failure(f"{process.name} ended at once, see {log}\n{_tail(log)}")
            for name in [name for name, url in probes.items() if _answers(url)]:
                del probes[name]
                self.say(f"  {time.monotonic() - began:5.1f} s  {name} answers")
            if time.monotonic() > end:
                logs = [self.options.local_dir / "log" / f"{name}.log" for name in probes]
                raise Failure("no answer from " + ", ".join(probes) + "\n" + "\n".join(map(_tail, logs)))
            time.sleep(0.05)

    def _stop_all(self) -> None:
        """From the outside in; each gets time to drain."""
        order = ("edge", "streamer", "dispatcher", "worker", "ministack", "valkey")
        for kind in order:
            group = [one for one in self.processes if one.name.startswith(kind) and one.running is not None]
            for process in group:
                if process.running is not None:
                    process.running.terminate()
            end = time.monotonic() + STOP_SECONDS
            for process in group:
                if process.running is not None:
                    try:
                        process.running.wait(max(0.1, end - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        self.say(f"{process.name} did not stop within {STOP_SECONDS:.0f} s and was killed")
                    _kill_group(process.running.pid)
                (self.options.local_dir / "run" / f"{process.name}.pid").unlink(missing_ok=True)


class Failure(Exception):
    """The stack cannot start; the message shows the log's end."""


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _platform() -> dict[str, str]:
    """What ECS or Lambda add to every process."""
    return CREDENTIALS | {
        "PATH": os.environ.get("PATH", ""),
        "HOME": os.environ.get("HOME", "/tmp"),  # noqa: S108
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _program_digest(options: Options) -> str:
    """Changes with whatever the applied stack depends on: program, applier, zips, options, ports."""
    digest = hashlib.sha256(options.file.read_bytes() + json.dumps(options.ports(), sort_keys=True).encode())
    files = [
        ROOT / "chat" / "settings.py",
        ROOT / "chat" / "keys.py",
        *(ROOT / "build" / "functions-local").glob("*.sha256"),
    ]
    files += [ROOT / "stacks" / "local" / name for name in ("options.py", "program.py")]
    files += (ROOT / "stacks").glob("*.yaml")
    for folder in ("infra", "stacks/local/applier"):
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml")]
    for file in sorted(files):
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _tail(log: Path, lines: int = 15) -> str:
    if not log.exists():
        return ""
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", type=Path, help="options.json that `make up` wrote")
    options = Options.read(parser.parse_args(arguments).options)
    shutil.rmtree(options.local_dir / "run", ignore_errors=True)
    sys.exit(Supervisor(options).run())


if __name__ == "__main__":
    main(sys.argv[1:])
