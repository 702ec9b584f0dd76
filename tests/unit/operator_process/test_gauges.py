"""Metrics about all sessions."""

from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds.conditions import timestamp
from tinkercloud_operator import metrics
from tinkercloud_operator.run.gauges import count_sessions
from tinkercloud_testing.resources.sessions import NOON, Json, a_session_manifest
from tinkercloud_testing.serving.metrics import metric_value


def a_session(phase: str | None, made: float = 0, **conditions: float) -> Json:
    """Return a session with an age in minutes at noon and the given transitions."""
    manifest = a_session_manifest()
    manifest["metadata"]["creationTimestamp"] = minutes_ago(made)
    if phase is not None:
        changes = [
            {"type": kind, "status": "False", "lastTransitionTime": minutes_ago(minutes)}
            for kind, minutes in conditions.items()
        ]
        manifest["status"] = {"phase": phase, "conditions": changes, "gpus": 2}
    return manifest


def minutes_ago(minutes: float) -> str:
    return timestamp(NOON - timedelta(minutes=minutes))


def exported(gauge: Any) -> dict[str, float]:
    [family] = gauge.collect()
    return {sample.labels["phase"]: sample.value for sample in family.samples}


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    count_sessions((), NOON)


def test_the_longest_wait_of_each_phase_is_exported() -> None:
    sessions = [
        a_session("Loading", made=100, Ready=90, HeadReady=20),
        a_session("Loading", made=100, Ready=90, HeadReady=50),
        a_session("Ready", made=1000, Ready=900),
    ]

    count_sessions(sessions, NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Loading": 50 * 60, "Ready": 900 * 60}
    assert exported(metrics.SESSIONS) == {"Loading": 2, "Ready": 1}
    assert metric_value(metrics.SESSION_GPUS) == 6


def test_a_session_without_a_status_waits_since_its_creation() -> None:
    count_sessions([a_session(None, made=30)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Pending": 30 * 60}


def test_a_resumed_session_waits_since_its_resume() -> None:
    count_sessions([a_session("Loading", made=9000, Ready=8000, Suspended=3)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Loading": 3 * 60}


def test_toggling_stalled_does_not_count_as_progress() -> None:
    count_sessions([a_session("Failed", made=60, Ready=60, Stalled=1, Reconciling=1)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Failed": 60 * 60}


def test_a_phase_without_sessions_is_not_exported() -> None:
    count_sessions([a_session("Loading", Ready=1)], NOON)

    count_sessions([], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {}
    assert metric_value(metrics.SESSION_GPUS) == 0
