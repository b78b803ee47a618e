"""A dispatcher: `python -m containers.dispatcher.app`. Any number run, none leads."""

import asyncio
import time

from chat import tracing
from chat.adapters import dynamo
from chat.adapters.valkey import ValkeyLanes, ValkeyTokenBuffer, ValkeyWakeups, connect
from chat.catalogue import Catalogue
from chat.errors import NotFound
from chat.settings import DispatcherSettings
from chat.usecases.cancel import CancelGeneration
from chat.usecases.finish_turn import FinishTurn
from containers.common.asgi import Json, Receive, Scope, Send
from containers.common.process import run, serving, stop_event
from containers.dispatcher.loops import PoolLoops
from containers.dispatcher.metrics import Metrics

STUCK_SECONDS = 5.0
"""A loop that has not gone round for so long is broken, and the process is not healthy."""


class DispatcherHttp:
    """`GET /healthz` and `GET /metrics`."""

    def __init__(self, pools: list[PoolLoops], metrics: Metrics) -> None:
        self._pools, self._metrics = pools, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        json = Json(send)
        if scope["path"] == "/healthz":
            now = time.monotonic()
            stuck = [loops.pool for loops in self._pools if now - loops.progressed_at > STUCK_SECONDS]
            await json.answer(503 if stuck else 200, {"status": "stuck" if stuck else "ok", "stuck": stuck})
        elif scope["path"] == "/metrics":
            await json.raw(200, self._metrics.text(), "text/plain; version=0.0.4")
        else:
            await json.error(NotFound("There is nothing here; see /healthz and /metrics."))


async def main() -> int:
    """Dispatch until told to stop. Nothing needs draining: whatever was popped was booked in the same script."""
    settings = DispatcherSettings.load()
    tracing.enable(settings.trace_stages)
    stopping = stop_event()
    valkey = connect(settings.valkey_url, settings.valkey_password)
    async with dynamo.connect(settings) as stores:
        buffer = ValkeyTokenBuffer(valkey)
        lanes = ValkeyLanes(valkey, settings.plans, int(settings.silent_seconds * 1000))
        wakeups, metrics = ValkeyWakeups(valkey), Metrics()
        finish = FinishTurn(buffer, stores.generations, lanes, Catalogue(settings.models, settings.plans))
        cancel = CancelGeneration(buffer, stores.generations, lanes, finish)
        pools = [PoolLoops(pool, settings, lanes, wakeups, finish, cancel, metrics) for pool in settings.pools]
        async with serving(DispatcherHttp(pools, metrics), settings.host, settings.port):
            loops = [asyncio.create_task(pool.run()) for pool in pools]
            told = asyncio.create_task(stopping.wait())
            done, _ = await asyncio.wait([*loops, told], return_when=asyncio.FIRST_COMPLETED)
            for task in loops:
                task.cancel()
            results = await asyncio.gather(*loops, return_exceptions=True)
        await wakeups.close()
        await valkey.close()
    faults = [result for result in results if isinstance(result, Exception)]
    if faults and told not in done:
        raise faults[0]
    return 0


if __name__ == "__main__":
    run(main)
