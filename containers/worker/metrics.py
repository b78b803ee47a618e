"""What a replica counts, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chat.model import Outcome
from chat.ports import Engine
from containers.worker.reply import Reply

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12)


class Metrics:
    """A registry of one replica."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._running = Gauge("worker_running", "Sequences in the batch", registry=self._registry)
        self._waiting = Gauge("worker_waiting", "Sequences the engine holds back", registry=self._registry)
        self._used = Gauge("worker_kv_used_fraction", "KV cache in use, 0 to 1", registry=self._registry)
        self._capacity = Gauge("worker_kv_capacity_tokens", "KV cache size", registry=self._registry)
        self._replies = Counter("worker_replies", "Ended replies", ["reason"], registry=self._registry)
        self._tokens = Counter("worker_output_tokens", "Generated tokens", registry=self._registry)
        self._first = Histogram(
            "worker_first_token_seconds",
            "From the claim to the first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def replied(self, reply: Reply, outcome: Outcome) -> None:
        """Count an ended reply."""
        self._replies.labels("handed_over" if reply.unfinished else outcome.finish_reason).inc()
        self._tokens.inc(max(0, reply.new_tokens))
        if reply.first_token_seconds is not None:
            self._first.observe(reply.first_token_seconds)

    def text(self) -> bytes:
        """The exposition."""
        status = self._engine.status()
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        self._used.set(status.kv_used_fraction)
        self._capacity.set(status.kv_capacity_tokens)
        return generate_latest(self._registry)
