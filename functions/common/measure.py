"""Figures of each request in CloudWatch's embedded metric format: a line of the log, no call."""

from aws_lambda_powertools import Metrics
from aws_lambda_powertools.metrics import MetricUnit

metrics = Metrics(namespace="chat", service="api")


def note(route: str, status: int, seconds: float) -> None:
    """`route` is one of the routes that exist, so that the number of dimensions is bounded."""
    metrics.add_dimension("route", route)
    metrics.add_metric("Latency", MetricUnit.Milliseconds, round(seconds * 1000, 1))
    metrics.add_metric("Refusals", MetricUnit.Count, int(400 <= status < 500))
    metrics.add_metric("Faults", MetricUnit.Count, int(status >= 500))
    metrics.flush_metrics()
