"""Reads metrics in tests."""

from prometheus_client.metrics import MetricWrapperBase


def metric_value(metric: MetricWrapperBase) -> float:
    """Return the value of a counter or gauge, or of one of its labels."""
    [metric_family] = metric.collect()
    return metric_family.samples[0].value
