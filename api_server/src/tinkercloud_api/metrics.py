"""What the API server counts. Named once, here; the dashboards and rules of the chart use these.

Gauges are of one replica unless they say otherwise.
"""

from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from tinkercloud_protocol.futures import QueueState

HTTP_REQUESTS = Counter(
    "tinkercloud_http_requests",
    "Requests that ended; status is `aborted` where the client hung up before the answer began",
    ["route", "status"],
)
HTTP_SECONDS = Histogram(
    "tinkercloud_http_request_seconds",
    "From a request's headers to the end of its answer; long polls are held on purpose",
    ["route"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
LONG_POLLS = Gauge("tinkercloud_long_polls", "Requests that wait for a result")
WAITING_RUNS = Gauge(
    "tinkercloud_waiting_runs", "Runs that this replica finds or makes a head for", ["queue_state"]
)
PROXY_REQUESTS = Gauge("tinkercloud_proxy_requests_in_flight", "Requests that heads are working on")
PROXY_BYTES = Counter(
    "tinkercloud_proxy_bytes", "Bytes of bodies that were forwarded", ["direction"]
)
PROXY_ERRORS = Counter(
    "tinkercloud_proxy_errors", "Requests that a head did not answer to the end", ["reason"]
)
CATALOG_ERRORS = Counter(
    "tinkercloud_catalog_errors", "Statements that the catalog's database did not answer"
)
CLIENT_SESSIONS = Gauge(
    "tinkercloud_client_sessions",
    "SDK sessions with a recent heartbeat, by the catalog: the same for every replica",
)
HOUSEKEEPING_ERRORS = Counter(
    "tinkercloud_housekeeping_errors", "Rounds of housekeeping that failed"
)

Direction = Literal["to_head", "from_head"]
ProxyError = Literal["unreachable", "replaced", "broke_off"]

# A series that is not there before its first error can't be seen to rise.
for _direction in get_args(Direction):
    PROXY_BYTES.labels(_direction)
for _reason in get_args(ProxyError):
    PROXY_ERRORS.labels(_reason)
QUEUE_STATES: tuple[QueueState, ...] = get_args(QueueState)
