"""What a head counts. Named once, here.

`engine` is the URL of an inference server, `what` an adapter or a whole model, `way` whether its
tensors came in the request, over a process group, in memory of this machine, or were read from
files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

ENGINE_UP = Gauge(
    "tinkercloud_engine_up", "Whether an inference server answered when last asked", ["engine"]
)
ENGINE_LOSSES = Counter("tinkercloud_engine_losses", "Times that one stopped answering", ["engine"])
ENGINE_RESTARTS = Counter(
    "tinkercloud_engine_restarts", "Times that one of this head's own had begun again", ["engine"]
)
ENGINE_REQUESTS = Gauge(
    "tinkercloud_engine_requests",
    "Sampling requests that one works on, or that wait for weights or their turn with it",
    ["engine", "state"],
)
ENGINE_ADAPTERS = Gauge(
    "tinkercloud_engine_adapters", "Adapters that one holds, or is given, for this head", ["engine"]
)
ENGINE_LOST_ADAPTERS = Counter(
    "tinkercloud_engine_lost_adapters", "Adapters that one no longer held when asked", ["engine"]
)
ENGINE_LOAD_SECONDS = Histogram(
    "tinkercloud_engine_load_seconds",
    "How long weights took to be loaded by one",
    ["engine", "what", "way"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
ENGINE_LOAD_FAILURES = Counter(
    "tinkercloud_engine_load_failures",
    "Weights that one refused, or was lost over",
    ["engine", "what", "way"],
)
ENGINE_UNLOADS = Counter("tinkercloud_engine_unloads", "Adapters that one let go", ["engine"])

What = Literal["adapter", "model"]
Way = Literal["request", "group", "shared_memory", "file"]


@contextmanager
def loading(engine: str, what: What, way: Way) -> Iterator[None]:
    """Time what an engine loads in the context, or count it as a failure."""
    began = perf_counter()
    try:
        yield
    except Exception:
        ENGINE_LOAD_FAILURES.labels(engine, what, way).inc()
        raise
    ENGINE_LOAD_SECONDS.labels(engine, what, way).observe(perf_counter() - began)
