"""What a dispatcher sees of the pools, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from chat.ports import PoolStatus, Swept


class Metrics:
    """A registry of one dispatcher. Gauges describe the pool, whichever dispatcher is asked."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._queued = Gauge("pool_queued", "Requests in a lane", ["pool", "plan"], registry=registry)
        self._replicas = Gauge("pool_replicas", "Replicas that live", ["pool"], registry=registry)
        self._capacity = Gauge("pool_kv_capacity_tokens", "KV cache of all replicas", ["pool"], registry=registry)
        self._booked = Gauge("pool_kv_booked_tokens", "KV cache that is booked", ["pool"], registry=registry)
        self._running = Gauge("pool_running", "Requests at replicas", ["pool"], registry=registry)
        self._dispatched = Counter("dispatcher_dispatched", "Requests given out", ["pool"], registry=registry)
        self._requeued = Counter("dispatcher_requeued", "Requests of dead replicas", ["pool"], registry=registry)

    def observe(self, pool: str, status: PoolStatus) -> None:
        """Note the state of a pool."""
        for plan, queued in status.queued.items():
            self._queued.labels(pool, plan).set(queued)
        self._replicas.labels(pool).set(status.replicas)
        self._capacity.labels(pool).set(status.kv_capacity_tokens)
        self._booked.labels(pool).set(status.kv_booked_tokens)
        self._running.labels(pool).set(status.running)

    def dispatched(self, pool: str, count: int) -> None:
        """Count requests given out."""
        self._dispatched.labels(pool).inc(count)

    def swept(self, pool: str, swept: Swept) -> None:
        """Count what a sweep found."""
        self._requeued.labels(pool).inc(len(swept.requeued))

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
