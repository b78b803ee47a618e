"""What the whole path adds to the model: direct engine against edge -> streamer -> stores -> worker -> SSE.

Both sides use the same vLLM process in the same run, in turn. Direct is the replica's own HTTP server
(`POST /invocations`, streaming). Writes docs/performance/path.md with a budget of where the milliseconds go.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs" / "performance" / "path.md"
STAGES = [
    ("received", "edge: request head to the streamer"),
    ("opened", "streamer: verify token, read body and conversation"),
    ("saved", "streamer: one DynamoDB transaction"),
    ("enqueued", "streamer: buffer opened, lane entered"),
    ("taken", "dispatcher: picked, booked, handed to the replica"),
    ("claimed", "worker: fence raised, request read"),
    ("first_token", "engine: prompt tokenised, prefill, first token"),
    ("appended", "worker: detokenised, appended and published"),
    ("forwarded", "streamer: first token written to the socket"),
]


@dataclass(frozen=True)
class Run:
    """One reply: seconds to the first token, seconds in all, tokens, and its generation (path only)."""

    first: float
    total: float
    tokens: int
    generation_id: str = ""
    sent_us: int = 0
    first_us: int = 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="replies a side, in turn (default 30)")
    parser.add_argument("--tokens", type=int, default=48, help="length of each reply (default 48)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of 4 simultaneous replies (default 6)")
    parser.add_argument("--local-dir", type=Path, default=ROOT / ".local-bench", help="state of the service")
    parser.add_argument("--port", type=int, default=8190, help="port of the service (default 8190)")
    parser.add_argument("--engine", default="vllm", help="vllm, or simulated to try the script")
    parser.add_argument("--keep", action="store_true", help="leave the service running")
    return parser.parse_args(arguments)


def question() -> str:
    """A prompt that no cache has seen."""
    return f"Write a long story about a lighthouse keeper whose number is {uuid.uuid4().int % 10**8}."


class Direct:
    """The replica's own server."""

    def __init__(self, port: int, system: str, tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._system, self._tokens = system, tokens

    def __call__(self) -> Run:
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question()}]
        body = json.dumps({"messages": messages, "max_tokens": self._tokens, "stream": True})
        start = time.perf_counter()
        self._connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        first, tokens = 0.0, 0
        while line := response.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if event.get("text") and not first:
                first = time.perf_counter() - start
            if usage := event.get("usage"):
                tokens = usage["outputTokens"]
        return Run(first, time.perf_counter() - start, tokens)


class WholePath:
    """The whole path, as a client sees it."""

    def __init__(self, port: int, token: str, tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._tokens = tokens

    def __call__(self) -> Run:
        self._connection.request("POST", "/v1/conversations", "{}", self._headers)
        conversation = json.loads(self._connection.getresponse().read())["conversationId"]
        send = {"content": question(), "clientMessageId": uuid.uuid4().hex, "maxTokens": self._tokens}
        path = f"/v1/conversations/{conversation}/messages"
        sent_us, start = time.time_ns() // 1000, time.perf_counter()
        self._connection.request("POST", path, json.dumps(send), self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status} {response.read().decode()}")
        first, first_us, kind, tokens = 0.0, 0, b"", 0
        while line := response.readline():
            if line.startswith(b"event: "):
                kind = line[7:].strip()
            elif line.startswith(b"data: "):
                if kind == b"delta" and not first:
                    first, first_us = time.perf_counter() - start, time.time_ns() // 1000
                elif kind == b"done":
                    tokens = json.loads(line[6:])["usage"]["outputTokens"]
        total = time.perf_counter() - start
        return Run(first, total, tokens, response.headers["X-Generation-Id"], sent_us, first_us)


def at_once(sides: list[Direct] | list[WholePath]) -> float:
    """Tokens a second of all replies together."""
    results: list[Run] = []
    threads = [threading.Thread(target=lambda side=side: results.append(side())) for side in sides]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(run.tokens for run in results) / (time.perf_counter() - start)


def stage_marks(log: Path) -> dict[str, dict[str, int]]:
    """Generation -> stage -> epoch microseconds, from the logs of all processes."""
    marks: dict[str, dict[str, int]] = {}
    for file in sorted(log.glob("*.log")):
        for line in file.read_text(errors="replace").splitlines():
            if '"stage":' in line:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                marks.setdefault(entry["generationId"], {}).setdefault(entry["stage"], entry["atMicros"])
    return marks


def budget(runs: list[Run], marks: dict[str, dict[str, int]]) -> list[tuple[str, float]]:
    """Median milliseconds of each stage."""
    spans: dict[str, list[float]] = {}
    for run in runs:
        seen = marks.get(run.generation_id, {})
        previous = run.sent_us
        for stage, label in STAGES:
            if stage in seen:
                spans.setdefault(label, []).append((seen[stage] - previous) / 1000)
                previous = seen[stage]
        spans.setdefault("edge: back to the client", []).append((run.first_us - previous) / 1000)
    return [(label, statistics.median(values)) for label, values in spans.items()]


def machine() -> str:
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def figure(name: str, value: float, unit: str, goal: str, met: bool) -> str:
    return f"{name} {value:.2f} {unit} goal {goal} {'met' if met else 'missed'}"


def report(direct: list[Run], path: list[Run], rates: tuple[float, float], stages: list[tuple[str, float]]) -> str:
    first_direct = statistics.median(run.first for run in direct) * 1000
    first_path = statistics.median(run.first for run in path) * 1000
    added, ratio, throughput = first_path - first_direct, first_path / first_direct, rates[1] / rates[0]
    figures = [
        figure("added-first-token", added, "ms", "<=8", added <= 8),
        figure("first-token-ratio", ratio, "x", "<=1.1", ratio <= 1.1),
        figure("throughput-at-4", throughput, "x", ">=0.97", throughput >= 0.97),
    ]
    rows = "\n".join(f"| {label} | {value:.2f} |" for label, value in stages)
    text = f"""# What the path adds to the model

`make bench-path`: {len(path)} replies a side, in turn, against the same vLLM process (SmolLM2-135M on the CPU).
Direct is the replica's own HTTP server. Machine: {machine()}.

| | direct | whole path |
| --- | --- | --- |
| first token, median (ms) | {first_direct:.1f} | {first_path:.1f} |
| tokens/s, 4 replies at once | {rates[0]:.1f} | {rates[1]:.1f} |

Where the milliseconds of the path go, medians (the engine's own time is in it):

| stage | ms |
| --- | --- |
{rows}

```
{chr(10).join(figures)}
```
"""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(text)
    return "\n".join(figures)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    make = ["make", "-s", f"LOCAL_DIR={options.local_dir}", f"PORT={options.port}"]
    print(f"starting the service with ENGINE={options.engine} on port {options.port}", flush=True)
    environment = os.environ | {"TRACE_STAGES": "1"}
    subprocess.run([*make, "up", f"ENGINE={options.engine}"], cwd=ROOT, check=True, env=environment)
    try:
        out = subprocess.run(
            [*make, "token", "USER=bench", "PLAN=plus"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        token = out.stdout.split()[-1]
        ports = json.loads((options.local_dir / "state" / "ports.json").read_text())
        worker, system = ports["worker-large-0"], "You are a helpful assistant."
        directs = [Direct(worker, system, options.tokens) for _ in range(4)]
        paths = [WholePath(options.port, token, options.tokens) for _ in range(4)]
        for _ in range(3):
            directs[0](), paths[0]()
        direct: list[Run] = []
        path: list[Run] = []
        for number in range(options.runs):
            direct.append(directs[0]())
            path.append(paths[0]())
            print(
                f"{number + 1}/{options.runs}: direct {direct[-1].first * 1000:.1f} ms, "
                f"path {path[-1].first * 1000:.1f} ms",
                flush=True,
            )
        both = [(at_once(directs), at_once(paths)) for _ in range(options.rounds)]
        rates = statistics.median(a for a, _ in both), statistics.median(b for _, b in both)
        stages = budget(path, stage_marks(options.local_dir / "log"))
        for label, value in stages:
            print(f"  {value:8.2f} ms  {label}")
        print(f"wrote {REPORT.relative_to(ROOT)}")
        print(report(direct, path, rates, stages))
    finally:
        if not options.keep:
            subprocess.run([*make, "down"], cwd=ROOT, check=False)


if __name__ == "__main__":
    main(sys.argv[1:])
