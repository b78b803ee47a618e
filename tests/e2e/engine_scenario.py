"""Runs in the environment that has vLLM: drives the real engine through a scenario, prints what happened as JSON.

Started by test_vllm_engine.py. When it is done it waits to be killed, so that the test sees what becomes of the
engine's child processes.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from chat.model import ChatMessage, GenerationRequest, Role
from chat.ports import EngineOutput

STORY = "Write a long story about a ship and its crew."
EMOJI = "Repeat exactly: 👩‍👩‍👧 Việt ẵ ễ 👋🏽"
TOKENS, CONTEXT = 64, 512


def request(name: str, content: str = STORY, max_tokens: int = TOKENS) -> GenerationRequest:
    messages = [ChatMessage(Role.SYSTEM, "You are a helpful assistant."), ChatMessage(Role.USER, content)]
    return GenerationRequest(name, "ada", "conv", "msg", 2, "plus", "large", "m", messages, max_tokens, 0, 0.0, 0)


Outputs = list[EngineOutput]


class Scenario:
    """Each step notes what it saw in `found`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.found: dict[str, Any] = {}

    async def collect(
        self, asked: GenerationRequest, saved: Sequence[int] = (), attempt: int = 1
    ) -> list[EngineOutput]:
        return [output async for output in self.engine.generate(asked, attempt, saved)]

    async def ids(self, asked: GenerationRequest, saved: Sequence[int] = (), attempt: int = 1) -> list[int]:
        outputs = await self.collect(asked, saved, attempt)
        return [token for output in outputs for token in output.token_ids]

    def text(self, ids: Sequence[int]) -> str:
        detokenizer = self.engine.detokenizer()
        return "".join(detokenizer.feed([one]) for one in ids) + detokenizer.flush()

    async def continuation(self) -> None:
        whole = await self.ids(request("whole"))
        continued = {}
        for split in (1, 7, 31, len(whole) - 1):
            continued[split] = whole[:split] + await self.ids(request(f"split{split}"), whole[:split], 2)
        outputs = await self.collect(request("full"), whole[:TOKENS], 2)
        self.found |= {
            "whole": whole,
            "text": self.text(whole),
            "continued": continued,
            "at the cap": [[output.token_ids, output.finish_reason] for output in outputs],
        }

    async def together(self) -> None:
        names = [f"together{number}" for number in range(4)]
        self.found["together"] = await asyncio.gather(*(self.ids(request(name)) for name in names))

    async def stops(self) -> None:
        """Aborts in the middle: when does the engine report free blocks, and how long is a step?"""
        measured = []
        for number in range(5):
            name, outputs, times = f"stop{number}", list[EngineOutput](), list[float]()
            reading = asyncio.create_task(self._read(request(name, max_tokens=600), outputs, times))
            while len(outputs) < 10 and not reading.done():
                await asyncio.sleep(0.001)
            before, start = self.engine.status(), time.perf_counter()
            await self.engine.abort(name, 1)
            returned = time.perf_counter() - start
            await reading
            while self.engine.status().kv_used_fraction and time.perf_counter() - start < 5:
                await asyncio.sleep(0.0005)
            free = time.perf_counter() - start
            steps = [later - sooner for sooner, later in itertools.pairwise(times)]
            measured.append(
                {
                    "used_before": before.kv_used_fraction,
                    "running_before": before.running,
                    "used_after": self.engine.status().kv_used_fraction,
                    "running_after": self.engine.status().running,
                    "returned": returned,
                    "free": free,
                    "longest_step": max(steps),
                    "finish": outputs[-1].finish_reason,
                }
            )
        self.found["stops"] = measured

    async def _read(self, asked: GenerationRequest, outputs: list[EngineOutput], times: list[float]) -> None:
        async for output in self.engine.generate(asked, 1, []):
            outputs.append(output)
            times.append(time.perf_counter())

    async def stop_on_the_way_in(self) -> None:
        """The stop comes while the request enters the engine."""
        ends = []
        for number, pauses in enumerate((0, 1, 2, 3, 5)):
            reading = asyncio.create_task(self.collect(request(f"early{number}", max_tokens=600)))
            for _ in range(pauses + 1):
                await asyncio.sleep(0)
            await self.engine.abort(f"early{number}", 1)
            outputs = await asyncio.wait_for(reading, 30)
            ends.append([sum(len(output.token_ids) for output in outputs), outputs[-1].finish_reason])
        self.found["early stops"] = ends

    async def reader_leaves(self) -> None:
        outputs = self.engine.generate(request("leaver", max_tokens=600), 1, [])
        await anext(outputs)
        await outputs.aclose()
        start = time.perf_counter()
        while self.engine.status().kv_used_fraction and time.perf_counter() - start < 5:
            await asyncio.sleep(0.001)
        self.found["leaver"] = {"used": self.engine.status().kv_used_fraction}

    async def half_characters(self) -> None:
        ids = await self.ids(request("emoji", EMOJI, 48))
        whole, splits = self.text(ids), []
        for split in range(len(ids) + 1):
            first, second = self.engine.detokenizer(), self.engine.detokenizer()
            said = "".join(first.feed([one]) for one in ids[:split])
            splits.append(
                second.feed(ids[:split]) == said and said + second.feed(ids[split:]) + second.flush() == whole
            )
        self.found["emoji"] = {"text": whole, "splits": splits}

    async def limits(self) -> None:
        """A prompt one token under, at and over the context."""
        from chat.errors import ContextLengthExceeded

        room = self.engine.context_tokens - len(self.engine.prompt_ids(request("x", "")))
        results = []
        for extra in (-1, 0, 1):
            asked = request(f"limit{extra}", " a" * (room + extra), 10)
            prompt = len(self.engine.prompt_ids(asked))
            try:
                outputs = await self.collect(asked)
                made = sum(len(output.token_ids) for output in outputs)
                results.append([prompt, made, outputs[-1].finish_reason])
            except ContextLengthExceeded:
                results.append([prompt, 0, "refused"])
        self.found["limits"] = results

    async def group_signal(self) -> None:
        """SIGTERM to the whole process group reaches us, not the engine."""
        seen = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, seen.set)
        os.killpg(os.getpgid(0), signal.SIGTERM)
        await asyncio.wait_for(seen.wait(), 5)
        self.found["after group signal"] = len(await self.ids(request("after", max_tokens=8)))


async def main(model: str) -> None:
    import multiprocessing

    from chat.adapters.engines.vllm import VllmEngine

    start = time.perf_counter()
    engine = VllmEngine(model, "float32", CONTEXT)
    await engine.start()
    scenario = Scenario(engine)
    scenario.found["start"] = time.perf_counter() - start
    scenario.found["capacity"] = engine.status().kv_capacity_tokens
    for step in (
        scenario.continuation,
        scenario.together,
        scenario.stops,
        scenario.stop_on_the_way_in,
        scenario.reader_leaves,
        scenario.half_characters,
        scenario.limits,
        scenario.group_signal,
    ):
        await step()
    scenario.found["children"] = [child.pid for child in multiprocessing.active_children()]
    sys.stdout.write("RESULT " + json.dumps(scenario.found) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
elif __name__ == "__mp_main__":
    from containers.worker.app import end_with_parent

    end_with_parent()
