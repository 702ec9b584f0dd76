"""Conditions of sessions, pools and BaseModels that need somebody, with what to do."""

from datetime import UTC, datetime
from typing import Any

from tinkercloud_api.providers.base import FailingCondition
from tinkercloud_api.providers.cluster.failing_conditions import failing_conditions
from tinkercloud_api.providers.cluster.session_status import (
    TrainingSessionView,
    read_base_model,
    read_session,
)
from tinkercloud_crds.remedies import REMEDIES
from tinkercloud_testing.resources.sessions import a_base_model_manifest, a_session_manifest

ADDED = {"uid": "u", "resourceVersion": "1", "generation": 2, "creationTimestamp": "2026"}


def a_condition(kind: str, status: str, reason: str, message: str, generation: int = 2) -> Any:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": "2026-01-02T02:00:00+02:00",
    }


def a_session(*conditions: Any, **spec: Any) -> TrainingSessionView:
    manifest = a_session_manifest("one", **spec)
    manifest["metadata"].update(ADDED)
    return read_session({**manifest, "status": {"conditions": conditions}})


def test_a_session_that_can_not_start_says_why_since_when_and_what_to_do() -> None:
    session = a_session(
        a_condition("Accepted", "True", "Accepted", "valid"),
        a_condition("ClusterProvisioned", "False", "ImagePullBackOff", "image x is missing"),
        a_condition("Ready", "False", "ImagePullBackOff", "image x is missing"),
        modelId="s:train:0",
    )

    (found,) = failing_conditions([session], [])

    assert found == FailingCondition(
        kind="session",
        name="one",
        owner=session.spec.owner,
        model_id="s:train:0",
        reason="ImagePullBackOff: image x is missing",
        remedy=REMEDIES["ImagePullBackOff"],
        since=datetime(2026, 1, 2, tzinfo=UTC),
    )


def test_sessions_that_start_or_have_changed_since_are_no_problem() -> None:
    starting = a_session(a_condition("Ready", "False", "Provisioning", "pods are created"))
    stale = a_session(a_condition("Ready", "False", "NeverFits", "too large", generation=1))

    assert list(failing_conditions([starting, stale], [])) == []


def test_what_may_name_the_runs_of_others_has_no_owner() -> None:
    failing = a_condition("Ready", "False", "Duplicate", "a has the same modelName")
    manifest = a_base_model_manifest("later")
    manifest["metadata"].update(ADDED)
    model = read_base_model({**manifest, "status": {"conditions": [failing]}})
    pool = a_session(a_condition("Stalled", "True", "NeverFits", "too large"), role="Pool")

    found = list(failing_conditions([pool], [model]))

    assert [(each.kind, each.owner) for each in found] == [("pool", None), ("model", None)]
