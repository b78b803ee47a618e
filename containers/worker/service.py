"""A replica's wiring."""

from chat import tracing
from chat.adapters import dynamo
from chat.adapters.engines import make_engine
from chat.adapters.valkey import ValkeyLanes, ValkeyTokenBuffer, ValkeyWakeups, connect
from chat.catalogue import Catalogue
from chat.settings import WorkerSettings
from chat.usecases.finish_turn import FinishTurn
from containers.common.process import serving, stop_event
from containers.worker.http import WorkerHttp
from containers.worker.metrics import Metrics
from containers.worker.replica import Replica


async def main() -> int:
    """Serve until told to stop (0) or the engine is broken (1, so that the process is replaced)."""
    settings = WorkerSettings.load()
    tracing.enable(settings.trace_stages)
    stopping = stop_event()
    engine = make_engine(settings)
    await engine.start()
    valkey = connect(settings.valkey_url, settings.valkey_password)
    try:
        async with dynamo.connect(settings) as stores:
            buffer, lanes = ValkeyTokenBuffer(valkey), ValkeyLanes(valkey, settings.plans)
            wakeups = ValkeyWakeups(valkey)
            catalogue = Catalogue(settings.models, settings.plans)
            finish = FinishTurn(buffer, stores.generations, lanes, catalogue)
            metrics = Metrics(engine)
            replica = Replica(settings, engine, buffer, lanes, wakeups, finish, metrics)
            http = WorkerHttp(engine, metrics, settings.model, settings.pool, replica.ready)
            async with serving(http, settings.host, settings.port):
                healthy = await replica.run(stopping)
            await wakeups.close()
            await valkey.close()
    finally:
        await engine.stop()
    return 0 if healthy else 1
