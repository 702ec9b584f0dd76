"""The slots of clusters whose heads have measured how many models fit."""

from datetime import UTC, datetime
from typing import Any

from tinkercloud_operator.decide.pool_facts import pool_facts
from tinkercloud_testing.sessions import MODEL_NAME, a_session_manifest

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_session(name: str, **spec: Any) -> Any:
    """Return a session with what the Kubernetes API sets."""
    made = a_session_manifest(name, **spec)
    made["metadata"] |= {"uid": name, "creationTimestamp": "2026-01-01T11:00:00Z"}
    return made


def a_cluster(name: str) -> Any:
    """Return a cluster whose head has the name as its incarnation."""
    return a_session(name, role="Pool", lora=None) | {"status": {"incarnation": name}}


def a_sampler(name: str, cluster: str, **status: Any) -> Any:
    placed = a_session(name, role="Sampler", sharing="Shared", lora=None, poolCluster=cluster)
    return placed | {"status": status}


def most_sessions(*sessions: Any, measured: dict[str, int]) -> dict[str, int | None]:
    """Return how many sessions fit on each cluster."""
    facts = pool_facts(
        MODEL_NAME,
        None,
        sessions,
        deleting=frozenset(),
        given_away=frozenset(),
        taken_back=frozenset(),
        keeping=frozenset(),
        failed={},
        now=NOW,
        measured=measured,
    )
    return {each.name: each.most_sessions for each in facts.clusters}


def test_samplers_take_none_of_the_memory_until_they_have_finished() -> None:
    sessions = [
        a_cluster("a"),
        a_sampler("one", "a"),
        a_sampler("two", "a"),
        a_sampler("finished", "a", finishedTime="2026-01-01T11:30:00Z"),
    ]

    assert most_sessions(*sessions, measured={"a": 4}) == {"a": 6}


def test_a_head_that_has_measured_nothing_is_taken_to_be_like_the_smallest_other() -> None:
    clusters = [a_cluster("a"), a_cluster("b"), a_cluster("new")]

    assert most_sessions(*clusters, measured={"a": 4, "b": 3}) == {"a": 4, "b": 3, "new": 3}
    assert most_sessions(*clusters, measured={}) == {"a": None, "b": None, "new": None}
