"""Appends to many generations through the real token buffer; each delta carries the moment of its append.

Run by bench_fanout: prints one JSON line when everything is open, begins at a line on its standard input, prints
one more when it is through.
"""

import argparse
import asyncio
import gc
import json
import random
import sys
import time

import uvloop

from chat import frames
from chat.adapters.valkey import ValkeyTokenBuffer, connect
from chat.errors import Unavailable
from chat.model import ChatMessage, EventKind, GenerationRequest, Role
from chat.ports import BufferEntry

USER = "bench"
FILLER = " a dozen tokens of an ordinary English reply, more or less"
TOKEN_IDS = [11, 220, 318, 40, 1207, 89, 30112, 7, 512, 96, 4, 1033]
TICK_SECONDS = 0.001


def request_of(generation_id: str) -> GenerationRequest:
    """A generation of the benchmark's user."""
    messages = [ChatMessage(Role.USER, "hello")]
    ids = (generation_id, USER, "conv_bench", "msg_bench")
    return GenerationRequest(*ids, 2, "plus", "large", "sim-large", messages, 2000, 5, 0.7, 0)


class Producer:
    """`rate` deltas a second for each generation, each with a phase of its own."""

    def __init__(self, buffer: ValkeyTokenBuffer, prefix: str, count: int, rate: float) -> None:
        self._buffer, self._interval = buffer, 1 / rate
        self._ids = [f"{prefix}{number}" for number in range(count)]
        self._last = [1] * count
        self._running: dict[int, asyncio.Task[None]] = {}
        self.appended, self.skipped, self.late_ms = 0, 0, 0.0

    async def open(self) -> None:
        """Make the generations known, each with its first event."""
        for start in range(0, len(self._ids), 100):
            await asyncio.gather(*(self._open(one) for one in self._ids[start : start + 100]))

    async def _open(self, generation_id: str) -> None:
        await self._buffer.open(request_of(generation_id))
        frame = frames.durable(1, EventKind.STARTED, {"generationId": generation_id})
        await self._buffer.append(generation_id, 1, [BufferEntry(1, EventKind.STARTED, frame)])

    async def run(self, seconds: float) -> None:
        """Append on schedule. As in a worker, a generation has one append at a time; while it is not answered
        the next ones are skipped and counted."""
        begin = time.monotonic()
        order = list(range(len(self._ids)))
        random.shuffle(order)
        plan = [(place / len(order) * self._interval, number) for place, number in enumerate(order)]
        for turn in range(round(seconds / self._interval)):
            for phase, number in plan:
                due = begin + turn * self._interval + phase
                while (ahead := due - time.monotonic()) > 0:
                    await asyncio.sleep(max(ahead, TICK_SECONDS))
                self.late_ms = max(self.late_ms, -ahead * 1000)
                self._start(number)
        while self._running:
            await asyncio.wait(self._running.values())

    def _start(self, number: int) -> None:
        if number in self._running:
            self.skipped += 1
        else:
            self._running[number] = asyncio.create_task(self._append(number))

    async def _append(self, number: int) -> None:
        seq = self._last[number] + 1
        frame = frames.durable(seq, EventKind.DELTA, {"text": f"@{time.monotonic_ns()}{FILLER}"})
        try:
            self._last[number] = await self._buffer.append(
                self._ids[number], 1, [BufferEntry(seq, EventKind.DELTA, frame, TOKEN_IDS)]
            )
            self.appended += 1
        except Unavailable:
            self.skipped += 1
        finally:
            del self._running[number]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--valkey", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    valkey = connect(options.valkey)
    producer = Producer(ValkeyTokenBuffer(valkey), options.prefix, options.count, options.rate)
    await producer.open()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await producer.run(options.seconds)
    result = {"appended": producer.appended, "skipped": producer.skipped, "lateMs": producer.late_ms}
    print(json.dumps(result), flush=True)
    await valkey.close()


if __name__ == "__main__":
    uvloop.run(main())
