"""Metrics about all sessions."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from tinkercloud_crds.conditions import SESSION_STEPS, ConditionType
from tinkercloud_crds.times import parse_time
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator import metrics

_STEPS = frozenset({*SESSION_STEPS, ConditionType.READY, ConditionType.SUSPENDED})
"""Conditions whose transitions count as progress or regress."""


def count_sessions(sessions: Iterable[Manifest], now: datetime) -> None:
    """Set the gauges that summarize all sessions.

    Args:
        sessions: all TrainingSessions.
        now: end of the time without progress.
    """
    metrics.SESSIONS.clear()
    metrics.OLDEST_SECONDS.clear()
    gpus = 0
    oldest: dict[str, str] = {}
    for session in sessions:
        status = session.get("status", {})
        phase, since = status.get("phase", "Pending"), max(_steps(session, status))
        metrics.SESSIONS.labels(phase).inc()
        # Timestamps in Kubernetes' format sort lexically.
        oldest[phase] = min(since, oldest.get(phase, since))
        gpus += status.get("gpus", 0)
    metrics.SESSION_GPUS.set(gpus)
    for phase, text in oldest.items():
        since_when = parse_time(text)
        if since_when is not None:
            metrics.OLDEST_SECONDS.labels(phase).set((now - since_when).total_seconds())


def _steps(session: Manifest, status: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield the creation time of a session and the times of its transitions."""
    yield session["metadata"]["creationTimestamp"]
    for condition in status.get("conditions", []):
        if condition["type"] in _STEPS:
            yield condition["lastTransitionTime"]
