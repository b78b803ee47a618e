"""`make up` and `make down`: start the supervisor in the background and say what happens; stop it."""

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from stacks.local.backends import ROOT
from stacks.local.options import ENGINES, Options, OptionsError
from stacks.local.supervisor import READY


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--down", action="store_true", help="stop instead")
    parser.add_argument("--local-dir", type=Path, default=Path(".local"), help="state of the service")
    parser.add_argument("--port", type=int, default=8080, help="where it answers")
    parser.add_argument("--engine", default="vllm", help=f"one of {', '.join(ENGINES)}")
    for name, default in (("streamers", 1), ("dispatchers", 1), ("replicas", 1), ("small-replicas", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"number of processes (default {default})")
    parser.add_argument(
        "--dtype", default="auto", help="of the weights: auto (what this processor is quick at), bfloat16, float32"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature, 0 is greedy")
    return parser.parse_args(arguments)


def options_of(given: argparse.Namespace) -> Options:
    """Options from arguments; a provider's key comes by the environment, so that no process list shows it."""
    options = Options(
        local_dir=given.local_dir.resolve(),
        port=given.port,
        engine=given.engine,
        streamers=given.streamers,
        dispatchers=given.dispatchers,
        replicas=given.replicas,
        small_replicas=given.small_replicas,
        dtype=given.dtype,
        temperature=given.temperature,
        trace_stages=os.environ.get("TRACE_STAGES", "") not in ("", "0"),
        openai_base_url=os.environ.get("OPENAI_BASE_URL", ""),
        openai_api_key=os.environ.get("OPENAI_API_KEY", ""),
        openai_model=os.environ.get("OPENAI_MODEL", ""),
    )
    options.check()
    return options


def running(local_dir: Path) -> int | None:
    """The supervisor's process id, if it lives."""
    file = local_dir / "supervisor.pid"
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int(file.read_text())
        os.kill(pid, 0)
        if "stacks.local.supervisor" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
            return pid
    return None


def up(options: Options) -> None:
    """Start, unless the same already runs; other options start it anew."""
    if running(options.local_dir) is not None:
        if options.file.exists() and Options.read(options.file) == options:
            print(f"already running at http://127.0.0.1:{options.port} (`make down` stops it)")
            return
        print("running with other options, starting anew")
        down(options.local_dir)
    options.give_up_taken_ports()
    options.write()
    log = options.local_dir / "log" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stacks.local.supervisor", str(options.file)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (options.local_dir / "supervisor.pid").write_text(str(process.pid))
    print(f"starting, ENGINE={options.engine}; logs are in {options.local_dir / 'log'}", flush=True)
    follow(log, began, process)
    print(f"http://127.0.0.1:{options.port}")


@contextlib.contextmanager
def alone(local_dir: Path) -> Iterator[None]:
    """One start at a time; another waits for it."""
    local_dir.mkdir(parents=True, exist_ok=True)
    with (local_dir / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def follow(log: Path, place: int, process: subprocess.Popen[bytes]) -> None:
    """Print the supervisor's lines until it is ready."""
    with log.open() as lines:
        lines.seek(place)
        while True:
            line = lines.readline()
            if line.strip() == READY:
                return
            if line:
                print(line, end="", flush=True)
            elif process.poll() is not None:
                sys.exit("it did not start, see above")
            else:
                time.sleep(0.05)


def down(local_dir: Path) -> None:
    """Stop, and wait until everything has."""
    pid = running(local_dir)
    if pid is None:
        print("nothing runs")
        return
    print("stopping (running replies are drained)", flush=True)
    os.kill(pid, signal.SIGTERM)
    while running(local_dir) is not None:
        time.sleep(0.05)
    (local_dir / "supervisor.pid").unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    given = parse(arguments)
    local_dir = given.local_dir.resolve()
    try:
        if given.down:
            down(local_dir)
        else:
            options = options_of(given)
            with alone(local_dir):
                try:
                    up(options)
                except KeyboardInterrupt:
                    down(local_dir)
                    sys.exit(130)
    except OptionsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
