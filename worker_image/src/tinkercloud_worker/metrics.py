"""Prometheus metrics of a head.

Labels: `request` is the last part of a request's path, or `sample`; `engine` is the URL of an
inference server, `what` is an adapter or a full model, and `way` is how its tensors were
transferred: in the request, over a process group, or by files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

REQUEST_WAIT_SECONDS = Histogram(
    "tinkercloud_request_wait_seconds",
    "Time from the acceptance of a request until it is the first of its run, in seconds",
    ["request"],
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
REQUEST_SECONDS = Histogram(
    "tinkercloud_request_seconds",
    "Time from then to its result, with its wait for the engine, in seconds",
    ["request"],
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
OWNER_WAIT_SECONDS = Counter(
    "tinkercloud_owner_wait_seconds",
    "Time that passes and optimizer steps of an owner waited for the engine, in seconds",
    ["owner"],
)
OWNER_REQUESTS = Counter(
    "tinkercloud_owner_requests",
    "Number of passes and optimizer steps of an owner that the engine has started",
    ["owner"],
)
RUN_LOSS = Gauge(
    "tinkercloud_run_loss",
    "Loss of the last step of a training run in this head; NaN if it was refused because of that",
    ["owner", "run"],
)
MAX_RUNS = 200
"""Runs of a head with series of their own."""
FIRST_TOKEN_SECONDS = Histogram(
    "tinkercloud_first_token_seconds",
    "Time to the first token of a chat or completion request, in seconds; own sampler only",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)

ENGINE_UP = Gauge(
    "tinkercloud_engine_up",
    "Whether the inference server responded to the last request or health check (1 or 0)",
    ["engine"],
)
ENGINE_LOSSES = Counter(
    "tinkercloud_engine_losses",
    "Number of times that the inference server stopped responding",
    ["engine"],
)
ENGINE_RESTARTS = Counter(
    "tinkercloud_engine_restarts",
    "Detected restarts of an inference server that belongs to this head",
    ["engine"],
)
ENGINE_REQUESTS = Gauge(
    "tinkercloud_engine_requests",
    "Sampling requests that run on the inference server, or wait for it or for weights",
    ["engine", "state"],
)
ENGINE_ADAPTERS = Gauge(
    "tinkercloud_engine_adapters",
    "Adapters of this head that the inference server has loaded or is loading",
    ["engine"],
)
ENGINE_LOST_ADAPTERS = Counter(
    "tinkercloud_engine_lost_adapters",
    "Adapters that were missing on the inference server when a request needed them",
    ["engine"],
)
ENGINE_LOAD_SECONDS = Histogram(
    "tinkercloud_engine_load_seconds",
    "Time to load weights into the inference server, in seconds",
    ["engine", "what", "way"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
ENGINE_LOAD_FAILURES = Counter(
    "tinkercloud_engine_load_failures",
    "Failed attempts to load weights into the inference server",
    ["engine", "what", "way"],
)
ENGINE_UNLOADS = Counter(
    "tinkercloud_engine_unloads", "Adapters unloaded from the inference server", ["engine"]
)

AUTOSAVES = Counter("tinkercloud_autosaves", "Automatic checkpoints that were written")
AUTOSAVE_FAILURES = Counter(
    "tinkercloud_autosave_failures",
    "Automatic checkpoints that could not be written; each is tried again",
)
AUTOSAVE_FAILING = Gauge(
    "tinkercloud_autosave_failing_models", "Models whose last automatic save failed"
)
AUTOSAVE_SECONDS = Histogram(
    "tinkercloud_autosave_seconds",
    "Time to copy and write an automatic checkpoint, in seconds; training continues meanwhile",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)

JOURNAL_BYTES = Counter(
    "tinkercloud_journal_bytes", "Bytes of requests that were added to journals"
)
JOURNALS_DEGRADED = Gauge(
    "tinkercloud_degraded_models",
    "Models that would not survive the end of this head, although they should",
)
SNAPSHOTS = Counter("tinkercloud_snapshots", "Snapshots of models that replaced a journal")
SNAPSHOT_FAILURES = Counter(
    "tinkercloud_snapshot_failures", "Snapshots that could not be written; each is tried again"
)
SNAPSHOT_SECONDS = Histogram(
    "tinkercloud_snapshot_seconds",
    "Time to write a snapshot, in seconds; training continues meanwhile",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
SNAPSHOT_PAUSE_SECONDS = Histogram(
    "tinkercloud_snapshot_pause_seconds",
    "Time that a model's requests wait while it is copied for a snapshot, in seconds",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)


def count_engine_wait(owner: str, seconds: float, started: int) -> None:
    """Count how long passes and steps have waited for the engine, and how many start now."""
    OWNER_WAIT_SECONDS.labels(owner).inc(seconds)
    OWNER_REQUESTS.labels(owner).inc(started)


What = Literal["adapter", "model"]
Way = Literal["request", "group", "file"]


@contextmanager
def loading(engine: str, what: What, way: Way) -> Iterator[None]:
    """Record the duration of a load in the context, or count its failure."""
    began = perf_counter()
    try:
        yield
    except Exception:
        ENGINE_LOAD_FAILURES.labels(engine, what, way).inc()
        raise
    ENGINE_LOAD_SECONDS.labels(engine, what, way).observe(perf_counter() - began)
