"""Counts of all sessions, for the metrics."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from tinkercloud_crds.conditions import SESSION_STEPS, ConditionType
from tinkercloud_crds.times import parse_time
from tinkercloud_operator import metrics
from tinkercloud_operator.spec.snapshot import Manifest

_STEPS = frozenset({*SESSION_STEPS, ConditionType.READY, ConditionType.SUSPENDED})
"""Conditions that change when a session makes a step, onwards or back."""


def count_sessions(sessions: Iterable[Manifest], now: datetime) -> None:
    """Set the gauges that are about all sessions.

    Args:
        sessions: all TrainingSessions.
        now: for how long each has made no step is counted up to then.
    """
    metrics.SESSIONS.clear()
    metrics.OLDEST_SECONDS.clear()
    gpus = 0
    oldest: dict[str, str] = {}
    for session in sessions:
        status = session.get("status", {})
        phase, since = status.get("phase", "Pending"), max(_steps(session, status))
        metrics.SESSIONS.labels(phase).inc()
        # Kubernetes' times sort as they are written.
        oldest[phase] = min(since, oldest.get(phase, since))
        gpus += status.get("gpus", 0)
    metrics.SESSION_GPUS.set(gpus)
    for phase, text in oldest.items():
        since_when = parse_time(text)
        if since_when is not None:
            metrics.OLDEST_SECONDS.labels(phase).set((now - since_when).total_seconds())


def _steps(session: Manifest, status: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield when a session was made, and when each of its steps was."""
    yield session["metadata"]["creationTimestamp"]
    for condition in status.get("conditions", []):
        if condition["type"] in _STEPS:
            yield condition["lastTransitionTime"]
