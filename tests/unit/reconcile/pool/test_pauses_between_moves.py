"""How long a run stays after its head could not give it to another cluster."""

from datetime import UTC, datetime
from typing import Any

from tinkercloud_operator.decide.pool.pool_facts import pool_facts
from tinkercloud_operator.spec.observed import FailedSave
from tinkercloud_testing.resources.sessions import MODEL_NAME, a_session_manifest

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_placed(name: str, **spec: Any) -> Any:
    """Return a session with what the Kubernetes API sets."""
    made = a_session_manifest(name, **spec)
    made["metadata"] |= {"uid": name, "creationTimestamp": "2026-01-01T11:00:00Z"}
    return made


def pause(attempts: int, *, is_refused: bool = True) -> float | None:
    """Return the seconds until a run is moved again; None if the move continues."""
    cluster = a_placed("a", role="Pool", lora=None) | {"status": {"incarnation": "head"}}
    run = a_placed("run", sharing="Shared", modelId="run:train:0", poolCluster="a")
    facts = pool_facts(
        MODEL_NAME,
        None,
        [cluster, run],
        deleting=frozenset(),
        given_away=frozenset(),
        taken_back=frozenset(),
        failed={("run", "head"): FailedSave("full", attempts, NOW, is_refused)},
        now=NOW,
    )
    [session] = facts.sessions
    return None if session.refusal is None else (session.refusal.until - NOW).total_seconds()


def test_pauses_grow_to_a_quarter_of_an_hour() -> None:
    assert [pause(each) for each in (1, 2, 3, 4, 5, 99)] == [60, 120, 240, 480, 900, 900]


def test_a_head_that_has_not_answered_may_have_given_the_run_away() -> None:
    assert pause(1, is_refused=False) is None
