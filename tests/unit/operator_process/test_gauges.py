"""What the operator exports of all sessions, and of what has gone wrong with them."""

from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds.conditions import timestamp
from tinkercloud_operator import metrics
from tinkercloud_operator.run.gauges import count_sessions
from tinkercloud_testing.sessions import NOON, Json, a_session_manifest


def a_session(phase: str | None, made: float = 0, **conditions: float) -> Json:
    """Return a session that was made so many minutes before noon, as its conditions changed."""
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


def test_the_session_of_a_phase_that_has_waited_longest_is_exported() -> None:
    sessions = [
        a_session("Loading", made=100, Ready=90, HeadReady=20),
        a_session("Loading", made=100, Ready=90, HeadReady=50),
        a_session("Ready", made=1000, Ready=900),
    ]

    count_sessions(sessions, NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Loading": 50 * 60, "Ready": 900 * 60}
    assert exported(metrics.SESSIONS) == {"Loading": 2, "Ready": 1}
    assert metrics.SESSION_GPUS._value.get() == 6


def test_a_session_whose_status_is_empty_waits_since_it_was_made() -> None:
    count_sessions([a_session(None, made=30)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Pending": 30 * 60}


def test_a_session_that_was_resumed_waits_since_then() -> None:
    count_sessions([a_session("Loading", made=9000, Ready=8000, Suspended=3)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Loading": 3 * 60}


def test_a_session_that_is_stalled_now_and_then_has_made_no_step_by_that() -> None:
    count_sessions([a_session("Failed", made=60, Ready=60, Stalled=1, Reconciling=1)], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {"Failed": 60 * 60}


def test_a_phase_that_no_session_is_in_any_more_is_not_exported() -> None:
    count_sessions([a_session("Loading", Ready=1)], NOON)

    count_sessions([], NOON)

    assert exported(metrics.OLDEST_SECONDS) == {}
    assert metrics.SESSION_GPUS._value.get() == 0
