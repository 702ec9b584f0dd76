"""Prometheus metrics of the operator; the chart's dashboards and alerting rules use them."""

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter(
    "tinkercloud_reconcile", "Reconciliations of TrainingSessions, by result", ["result"]
)
RECONCILE_SECONDS = Histogram(
    "tinkercloud_reconcile_seconds",
    "Duration of one reconciliation, including its writes",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
API_REQUESTS = Counter(
    "tinkercloud_api_requests",
    "Requests to the Kubernetes API server, by verb and HTTP status code",
    ["verb", "code"],
)
SESSIONS = Gauge("tinkercloud_sessions", "TrainingSessions, by phase", ["phase"])
SESSION_GPUS = Gauge("tinkercloud_session_gpus", "GPUs requested by the pods of all sessions")
READY_SECONDS = Histogram(
    "tinkercloud_session_ready_seconds",
    "Time from the creation of a session until it is first Ready",
    buckets=(1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
QUEUE_DEPTH = Gauge("tinkercloud_queue_depth", "Sessions waiting to be reconciled")
IS_LEADER = Gauge("tinkercloud_is_leader", "1 if this replica holds the leader Lease, else 0")
OLDEST_SECONDS = Gauge(
    "tinkercloud_session_oldest_seconds",
    "Longest time without progress of any session, by phase",
    ["phase"],
)
RESTARTS = Counter("tinkercloud_session_restarts", "Unexpected exits of head processes")
SAVES_FAILED = Counter(
    "tinkercloud_saves_failed", "Failed save requests to heads, by kind of request", ["what"]
)
DEFINITIONS_OUTDATED = Gauge(
    "tinkercloud_definitions_outdated",
    "1 if the served CRD of a kind lacks fields that the operator needs, else 0",
    ["kind"],
)
