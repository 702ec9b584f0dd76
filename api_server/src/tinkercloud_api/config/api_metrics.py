"""Prometheus metrics of the API server, which the chart's dashboards and rules use.

Gauges describe one replica unless stated otherwise.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from tinkercloud_protocol.wire.future_responses import QueueState

HTTP_REQUESTS = Counter(
    "tinkercloud_http_requests",
    "Completed HTTP requests; status is `aborted` if the client disconnected before a response",
    ["route", "status"],
)
HTTP_SECONDS = Histogram(
    "tinkercloud_http_request_seconds",
    "Duration of HTTP requests, including the response body; long polls are slow by design",
    ["route"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
LONG_POLLS = Gauge("tinkercloud_long_polls", "Requests that are waiting for a head or a result")
WAITING_RUNS = Gauge(
    "tinkercloud_waiting_runs",
    "Training runs for which this replica is waiting for a session head",
    ["queue_state"],
)
PROXY_REQUESTS = Gauge(
    "tinkercloud_proxy_requests_in_flight",
    "Forwarded requests that session heads have not completed",
    ["owner"],
)
PROXY_BYTES = Counter(
    "tinkercloud_proxy_bytes", "Bytes of forwarded request and response bodies", ["direction"]
)
PROXY_ERRORS = Counter(
    "tinkercloud_proxy_errors",
    "Forwarded requests that failed in the session head or on the way to it",
    ["reason"],
)
CATALOG_ERRORS = Counter(
    "tinkercloud_catalog_errors",
    "Catalog statements that failed because the database did not respond",
)
CLIENT_SESSIONS = Gauge(
    "tinkercloud_client_sessions",
    "SDK sessions with a recent heartbeat, according to the catalog (the same on every replica)",
)
USAGE_TOKENS = Counter(
    "tinkercloud_usage_tokens",
    "Tokens that session heads have processed, as far as this replica has recorded them",
    ["owner", "kind"],
)
USAGE_ENGINE_SECONDS = Counter(
    "tinkercloud_usage_engine_seconds",
    "Seconds in which session heads have computed, as far as this replica has recorded them",
    ["owner"],
)
HOUSEKEEPING_ERRORS = Counter("tinkercloud_housekeeping_errors", "Failed housekeeping tasks")

Direction = Literal["to_head", "from_head"]
ProxyError = Literal["unreachable", "replaced", "broke_off"]

# Initialize the series: an increase from a missing series is not visible to `rate`.
for _direction in get_args(Direction):
    PROXY_BYTES.labels(_direction)
for _reason in get_args(ProxyError):
    PROXY_ERRORS.labels(_reason)
_QUEUE_STATES: tuple[QueueState, ...] = get_args(QueueState)

OTHER_OWNERS = "(other owners)"
MAX_OWNERS = 200
"""Owners with series of their own."""
_owners: set[str] = set()


def measure(
    long_polls: Callable[[], int], waiting_runs: Callable[[], Mapping[QueueState, int]]
) -> None:
    """Compute gauges when Prometheus scrapes them.

    Args:
        long_polls: returns the number of waiting requests.
        waiting_runs: returns the number of runs that wait for a head, by state.
    """
    LONG_POLLS.set_function(long_polls)
    for state in _QUEUE_STATES:
        WAITING_RUNS.labels(state).set_function(partial(_count, waiting_runs, state))


def _count(waiting_runs: Callable[[], Mapping[QueueState, int]], state: QueueState) -> int:
    return waiting_runs().get(state, 0)


def forwarding(owner: str) -> AbstractContextManager[None]:
    """Count a forwarded request of an owner as in flight within the context."""
    return PROXY_REQUESTS.labels(_label_of(owner)).track_inprogress()


def count_usage(owner: str, amounts: Mapping[str, float]) -> None:
    """Count usage that was recorded.

    Args:
        owner: who has used it. Owners after the first 200 are counted together.
        amounts: what has been added, by name: `engine_seconds`, or a kind of tokens that ends in
            `_tokens`.
    """
    label = _label_of(owner)
    for name, amount in amounts.items():
        if name == "engine_seconds":
            USAGE_ENGINE_SECONDS.labels(label).inc(amount)
        else:
            USAGE_TOKENS.labels(label, name.removesuffix("_tokens")).inc(amount)


def _label_of(owner: str) -> str:
    if len(_owners) < MAX_OWNERS:
        _owners.add(owner)
    return owner if owner in _owners else OTHER_OWNERS
