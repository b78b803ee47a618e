"""Many clients on raw sockets, each following one generation.

Run by bench_fanout: prints one JSON line when all have their first event, and another with what was received when
a line with the expected number of deltas comes in. Exits when its standard input ends.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from array import array

import uvloop

AT_ONCE = 50
DEADLINE_SECONDS = 30.0


class Tally:
    """What all clients received: nanoseconds from append to socket, and faults in the order of ids."""

    def __init__(self) -> None:
        self.delays = array("q")
        self.out_of_order = 0
        self.closed = 0

    def report(self) -> dict[str, float]:
        """Milliseconds and counts."""
        ordered = sorted(self.delays)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
        found = {name: ordered[int(share * (len(ordered) - 1))] / 1e6 for name, share in shares.items() if ordered}
        return found | {"received": len(ordered), "outOfOrder": self.out_of_order, "closed": self.closed}


class Client(asyncio.Protocol):
    """One follower. The parsing is as little as tells delays and order."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._kept = b""
        self._last = 0
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._kept:
            data = self._kept + data
        place = data.find(b"\nid: ")
        while place >= 0:
            end = data.find(b"\n\n", place + 1)
            if end < 0:
                break
            seq = int(data[place + 5 : data.index(b"\n", place + 1)])
            self._tally.out_of_order += seq != self._last + 1
            self._last = seq
            mark = data.find(b"@", place, end)
            if mark >= 0:
                self._tally.delays.append(now - int(data[mark + 1 : data.index(b" ", mark)]))
            elif not self.began.done():
                self.began.set_result(None)
            place = data.find(b"\nid: ", end)
        self._kept = data[place:] if place >= 0 else b""
        if not self.began.done() and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.began.set_exception(RuntimeError(data[:300].decode("latin-1")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.closed += 1
        if not self.began.done():
            self.began.set_exception(RuntimeError(f"closed before its first event: {exc}"))


async def connect(options: argparse.Namespace, tally: Tally) -> None:
    """All clients, some at once, each until its first event."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        lines = [
            f"GET /v1/generations/{options.prefix}{number}/stream HTTP/1.1",
            "Host: bench",
            f"Authorization: Bearer {options.token}",
        ]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode()
        async with limit:
            loop = asyncio.get_running_loop()
            _, client = await loop.create_connection(lambda: Client(request, tally), "127.0.0.1", options.port)
            async with asyncio.timeout(DEADLINE_SECONDS):
                await client.began

    await asyncio.gather(*(one(number) for number in range(options.count)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--token", required=True)
    options = parser.parse_args()
    tally = Tally()
    await connect(options, tally)
    gc.freeze()
    print(json.dumps({"connected": options.count}), flush=True)
    expected = int(await asyncio.to_thread(sys.stdin.readline) or 0)
    end = time.monotonic() + DEADLINE_SECONDS
    while len(tally.delays) < expected and time.monotonic() < end:
        await asyncio.sleep(0.01)
    print(json.dumps(tally.report()), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    uvloop.run(main())
