"""Following thousands of replies through one streamer process: CPU an event, delay, memory a connection.

Starts Valkey, one streamer (`python -m containers.streamer.app`), a producer that appends through the real token
buffer, and clients on raw sockets; then the same for a naive streamer (one blocking XREAD a client) at a size that
it can bear, and for ours at that size. DynamoDB is not needed to follow. Writes docs/performance/fanout.md.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from bench_path import figure, machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stacks.local import backends  # noqa: E402 - the path comes first
from stacks.local.issuer import Issuer  # noqa: E402

REPORT = ROOT / "docs" / "performance" / "fanout.md"
ISSUER, AUDIENCE, USER = "https://issuer.bench", "bench", "bench"
GOAL_CPU_US, GOAL_P99_MS, GOAL_KB = 40.0, 15.0, 64.0
SETTLE_SECONDS = 2.0
QUIET = 0.2
"""Share of one core that other work may take for the figures to be about the streamer."""


@dataclass(frozen=True)
class Result:
    """One run. CPU shares are of one core, over the time in which events were produced."""

    name: str
    connections: int
    seconds: float
    received: int
    expected: int
    skipped: int
    faults: int
    cpu_us: float
    kb: float
    p50: float
    p99: float
    p999: float
    shares: dict[str, float]
    late_ms: float


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000, help="followed generations (default 2000)")
    parser.add_argument("--naive-connections", type=int, default=500, help="for the naive streamer; 0: none")
    parser.add_argument("--seconds", type=float, default=10, help="length of each run (default 10)")
    parser.add_argument("--rate", type=float, default=4, help="events a second a generation (default 4)")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for a quiet machine (default 120)")
    parser.add_argument("--keep-report", action="store_true", help="do not write docs/performance/fanout.md")
    return parser.parse_args(arguments)


class Bench:
    """The processes that all runs share."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._options, self._directory = options, directory
        self._started: list[subprocess.Popen] = []
        self._issuer = Issuer(ISSUER, AUDIENCE)
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        port = backends.free_port()
        self._valkey = backends.start(
            backends.valkey_command(directory / "valkey", port), directory / "valkey.log", ends_with_parent=True
        )
        self._started.append(self._valkey)
        backends.assign_slots(port)
        self._valkey_url = f"redis://127.0.0.1:{port}"

    def stop(self) -> None:
        """End everything."""
        for process in self._started:
            process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, words: list[str], **options: object) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, **options)  # type: ignore[call-overload]
        self._started.append(process)
        return process

    def ours(self, port: int) -> subprocess.Popen:
        """The streamer, as its container starts it. Nothing listens where DynamoDB should be."""
        model = {
            "id": "sim-large",
            "pool": "large",
            "contextTokens": 8192,
            "plans": ["free", "plus"],
            "usdPerMillionInput": 0,
            "usdPerMillionOutput": 0,
        }
        plan = {"name": "plus", "priority": 0, "replyCap": 2000}
        environment = self._environment | backends.CREDENTIALS
        environment |= {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
            "ENVIRONMENT": "bench",
            "CONVERSATIONS_TABLE": "none",
            "GENERATIONS_TABLE": "none",
            "ACCOUNTS_TABLE": "none",
            "LEDGER_TABLE": "none",
            "CONTENT_BUCKET": "none",
            "VALKEY_URL": self._valkey_url,
            "OIDC_ISSUER": ISSUER,
            "OIDC_AUDIENCE": AUDIENCE,
            "JWKS_URL": self._issuer.url,
            "MODELS": json.dumps([model]),
            "PLANS": json.dumps([plan]),
            "DRAIN_SECONDS": "2",
            "HOST": "127.0.0.1",
            "PORT": str(port),
        }
        return self._start(["-m", "containers.streamer.app"], env=environment, stderr=self._log("streamer"))

    def naive(self, port: int) -> subprocess.Popen:
        """One blocking XREAD a client."""
        words = ["-m", "scripts.fanout.naive", "--valkey", self._valkey_url, "--port", str(port)]
        words += ["--issuer", ISSUER, "--audience", AUDIENCE, "--jwks", self._issuer.url]
        return self._start(words, env=self._environment, stderr=self._log("naive"))

    def _log(self, name: str) -> int:
        return os.open(self._directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _part(self, module: str, *words: str) -> subprocess.Popen:
        return self._start(
            ["-m", f"scripts.fanout.{module}", *words],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def measure(self, name: str, server: Callable[[int], subprocess.Popen], connections: int) -> Result:
        """Start a streamer, let clients follow, produce, and take the figures."""
        options, prefix, port = self._options, f"{name.replace(' ', '-')}-{connections}-", backends.free_port()
        streamer = server(port)
        wait_for(f"http://127.0.0.1:{port}/healthz")
        empty_bytes = psutil.Process(streamer.pid).memory_info().rss
        common = ["--prefix", prefix, "--count", str(connections)]
        schedule = ["--rate", str(options.rate), "--seconds", str(options.seconds)]
        producer = self._part("producer", "--valkey", self._valkey_url, *common, *schedule)
        line_of(producer)
        print(f"{name}: {connections} generations are open, connecting the clients", flush=True)
        clients = self._part("clients", "--port", str(port), *common, "--token", self._issuer.token(USER, 3600))
        line_of(clients)
        time.sleep(SETTLE_SECONDS)
        print(f"{name}: connected, producing for {options.seconds:g} s", flush=True)
        watched = {"streamer": streamer, "valkey": self._valkey, "producer": producer, "clients": clients}
        before, start = {key: cpu_of(one) for key, one in watched.items()} | {"busy": busy()}, time.monotonic()
        tell(producer, "go")
        made = line_of(producer)
        tell(clients, str(made["appended"]))
        got = line_of(clients)
        took = time.monotonic() - start
        spent = {key: cpu_of(one) - before[key] for key, one in watched.items()}
        spent["everything else"] = busy() - before["busy"] - sum(spent.values())
        full_bytes = psutil.Process(streamer.pid).memory_info().rss
        for process in (clients, producer, streamer):
            process.terminate()
            process.wait(10)
            self._started.remove(process)
        received = int(got["received"])
        result = Result(
            name,
            connections,
            took,
            received,
            made["appended"],
            made["skipped"],
            int(got["outOfOrder"] + got["closed"]),
            spent["streamer"] / max(received, 1) * 1e6,
            (full_bytes - empty_bytes) / connections / 1024,
            got.get("p50", float("inf")),
            got.get("p99", float("inf")),
            got.get("p999", float("inf")),
            {key: max(0.0, value) / took for key, value in spent.items()},
            made["lateMs"],
        )
        print(
            f"{name}: {received} of {made['appended']} events, {result.cpu_us:.1f} us an event, "
            f"p50 {result.p50:.1f} ms, p99 {result.p99:.1f} ms, {result.kb:.1f} KB a connection; "
            + ", ".join(f"{key} {share:.0%}" for key, share in result.shares.items()),
            flush=True,
        )
        return result


def wait_for(url: str, seconds: float = 20) -> None:
    """Until a server answers. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own address
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"{url} does not answer") from error
            time.sleep(0.05)


def line_of(process: subprocess.Popen) -> dict:
    """The next JSON line of a part. Ends the benchmark when the part has ended."""
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise SystemExit(f"a part of the benchmark ended early: {process.args[2]}")
    return json.loads(line)


def tell(process: subprocess.Popen, line: str) -> None:
    """One line to a part."""
    if process.stdin:
        process.stdin.write(line + "\n")
        process.stdin.flush()


def cpu_of(process: subprocess.Popen) -> float:
    """CPU seconds so far, user and system."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def busy() -> float:
    """CPU seconds that the whole machine has spent."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def wait_until_quiet(seconds: float) -> None:
    """Until nothing else takes much of the machine, or the time is over: the figures then say what else ran."""
    end = time.monotonic() + seconds
    while True:
        before, start = busy(), time.monotonic()
        time.sleep(3)
        share = (busy() - before) / (time.monotonic() - start)
        if share < QUIET:
            return
        if time.monotonic() > end:
            print(f"other work takes {share:.0%} of a core; measuring all the same", flush=True)
            return
        print(f"other work takes {share:.0%} of a core, waiting", flush=True)


def report(results: list[Result], rate: float) -> tuple[str, str]:
    """The Markdown text, and the figures."""
    ours = results[0]
    figures = "\n".join(
        [
            figure("cpu-per-event", ours.cpu_us, "us", f"<={GOAL_CPU_US:g}", ours.cpu_us <= GOAL_CPU_US),
            figure("append-to-socket-p99", ours.p99, "ms", f"<={GOAL_P99_MS:g}", ours.p99 <= GOAL_P99_MS),
            figure("memory-per-connection", ours.kb, "KB", f"<={GOAL_KB:g}", ours.kb <= GOAL_KB),
        ]
    )
    heads = [f"{one.name}, {one.connections}" for one in results]
    lines = {
        "events received / appended": [f"{one.received} / {one.expected}" for one in results],
        "skipped, the append before was not answered": [str(one.skipped) for one in results],
        "out of order or closed": [str(one.faults) for one in results],
        "streamer CPU an event (us)": [f"{one.cpu_us:.1f}" for one in results],
        "append to socket, p50 (ms)": [f"{one.p50:.1f}" for one in results],
        "append to socket, p99 (ms)": [f"{one.p99:.1f}" for one in results],
        "append to socket, p99.9 (ms)": [f"{one.p999:.1f}" for one in results],
        "memory a connection (KB)": [f"{one.kb:.1f}" for one in results],
        "producer behind its schedule, most (ms)": [f"{one.late_ms:.1f}" for one in results],
    }
    for key in results[0].shares:
        lines[f"CPU of {key} (% of a core)"] = [f"{one.shares[key] * 100:.0f}" for one in results]
    rows = "\n".join(f"| {name} | {' | '.join(values)} |" for name, values in lines.items())
    total, other = sum(ours.shares.values()), ours.shares["everything else"]
    verdict = "The figures are the streamer's own."
    if other > QUIET or ours.skipped:
        verdict = (
            "That is no quiet machine: delays are mostly waits for a core, and CPU times are longer for the sharing.\n"
            "Measure again when nothing else runs."
        )
    text = f"""# Following many replies through one streamer

`make bench-fanout`: every connection follows a generation of its own at {rate:g} events a second, for
{ours.seconds:.0f} s. Machine: {machine()}; Valkey, streamer, producer and clients share it.

| | {" | ".join(heads)} |
| --- |{" --- |" * len(heads)}
{rows}

- **CPU an event**: user and system time of the streamer's process while events flow, divided by the events that the
  clients received. Keep-alives, marks of followed generations and the server's own timers are in it.
- **Append to socket**: from the producer's call of `TokenBuffer.append` to the client's read of its socket. The
  script in Valkey, the publish, the streamer, and the clients' own turn on the CPU are in it.
- **Memory a connection**: growth of the streamer's resident memory from before the first connection to the end of
  the run, divided by the connections. The kernel's socket buffers are not in it.
- **naive** reads the stream with one blocking `XREAD` a client, each on its own connection to Valkey, behind the
  same HTTP server. It is measured at {results[-1].connections} connections, where it still keeps up.

In the first run the machine's {os.cpu_count()} cores were {total / (os.cpu_count() or 1):.0%} busy, with other work at
{other:.0%} of a core. {verdict}

```
{figures}
```
"""
    return text, figures


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-fanout-") as directory:
        bench = Bench(Path(directory), options)
        try:
            wait_until_quiet(options.wait)
            results = [bench.measure("streamer", bench.ours, options.connections)]
            if options.naive_connections:
                results.append(bench.measure("streamer", bench.ours, options.naive_connections))
                results.append(bench.measure("naive", bench.naive, options.naive_connections))
        finally:
            bench.stop()
    text, figures = report(results, options.rate)
    if not options.keep_report:
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(text)
        print(f"wrote {REPORT.relative_to(ROOT)}")
    print(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
