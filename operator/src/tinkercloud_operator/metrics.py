"""What the operator counts. Named once, here; the dashboards and rules of the chart use these."""

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("tinkercloud_reconcile", "Sessions looked at", ["result"])
RECONCILE_SECONDS = Histogram(
    "tinkercloud_reconcile_seconds",
    "From looking at a session to the last write that followed",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
API_REQUESTS = Counter(
    "tinkercloud_api_requests", "Requests to the Kubernetes API server", ["verb", "code"]
)
SESSIONS = Gauge("tinkercloud_sessions", "TrainingSessions", ["phase"])
SESSION_GPUS = Gauge("tinkercloud_session_gpus", "GPUs that sessions with pods ask for")
READY_SECONDS = Histogram(
    "tinkercloud_session_ready_seconds",
    "From the creation of a session to its first Ready",
    buckets=(1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
QUEUE_DEPTH = Gauge("tinkercloud_queue_depth", "Sessions waiting to be looked at")
IS_LEADER = Gauge("tinkercloud_is_leader", "Whether this replica holds the Lease")
OLDEST_SECONDS = Gauge(
    "tinkercloud_session_oldest_seconds",
    "How long the session of a phase that has waited longest has made no step",
    ["phase"],
)
RESTARTS = Counter(
    "tinkercloud_session_restarts", "Head processes that ended without having been asked to"
)
SAVES_FAILED = Counter(
    "tinkercloud_saves_failed", "Times a head was asked to save what it holds and did not", ["what"]
)
DEFINITIONS_OUTDATED = Gauge(
    "tinkercloud_definitions_outdated",
    "Whether the served definition of a kind lacks fields that the operator needs",
    ["kind"],
)
