"""Missed deadlines of other controllers are reported with who is responsible."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tinkercloud_crds.conditions import Condition, ConditionType, Reason, find, timestamp
from tinkercloud_operator.decide.pods.deadlines import (
    DELETION_TIMEOUT,
    KUBERAY_TIMEOUT,
    TERMINATION_TIMEOUT,
)
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_testing.resources.session_world import RAY_CLUSTER, SETTINGS
from tinkercloud_testing.resources.sessions import NOON, Json, a_pod, a_session, observed

MADE: Json = {"creationTimestamp": timestamp(NOON)}
DELETED: Json = {"deletionTimestamp": timestamp(NOON)}
FINALIZERS = ["example.org/audit", "foregroundDeletion"]
SECOND = timedelta(seconds=1)


def a_cluster(status: Json | None = None, **metadata: Any) -> Json:
    return {"metadata": {"name": "one", **metadata}, "spec": {}, "status": status or {}}


def at(now: datetime, cluster: Json | None = None, **fields: Any) -> Observed:
    children = {} if cluster is None else {RAY_CLUSTER: cluster}
    return observed(children=children, now=now, **fields)


def ready(session: Observed) -> Condition:
    status = reconcile(session, SETTINGS).status
    assert status is not None
    condition = find(status.conditions, ConditionType.READY)
    assert condition is not None
    return condition


def test_a_session_reports_kuberay_silent_after_its_timeout() -> None:
    before, after = (
        at(NOON + KUBERAY_TIMEOUT - by, a_cluster(**MADE)) for by in (SECOND, 0 * SECOND)
    )

    assert ready(before).reason == Reason.PROVISIONING
    assert reconcile(before, SETTINGS).requeue_after_seconds == 1
    assert ready(after).reason == Reason.KUBERAY_SILENT
    assert "RayCluster one" in ready(after).message


@pytest.mark.parametrize(
    "fields",
    [
        {"cluster": a_cluster({"observedGeneration": 1}, **MADE)},
        {"cluster": a_cluster(**MADE), "pods": (a_pod(is_ready=False),)},
        {"cluster": a_cluster(**MADE) | {"spec": {"suspend": True}}},
    ],
    ids=["it has seen it", "there are pods", "Kueue holds it back"],
)
def test_kuberay_silent_is_not_reported_if_kuberay_has_reacted_or_has_nothing_to_do(
    fields: Json,
) -> None:
    assert ready(at(NOON + 2 * KUBERAY_TIMEOUT, **fields)).reason != Reason.KUBERAY_SILENT


@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_ray_cluster_stuck_in_deletion_is_reported_with_its_finalizers(
    is_suspended: bool,
) -> None:
    cluster, spec = a_cluster(**DELETED, finalizers=FINALIZERS), a_session(suspend=is_suspended)

    before = ready(at(NOON + DELETION_TIMEOUT - SECOND, cluster, spec=spec))
    after = ready(at(NOON + DELETION_TIMEOUT, cluster, spec=spec))

    assert before.reason != Reason.DELETION_STUCK
    assert after.reason == Reason.DELETION_STUCK
    assert "blocked by finalizers example.org/audit;" in after.message


def test_a_stuck_ray_cluster_of_a_deleted_session_with_the_same_name_is_reported() -> None:
    left = {RAY_CLUSTER: a_cluster(**DELETED, finalizers=FINALIZERS)}

    condition = ready(at(NOON + DELETION_TIMEOUT, predecessors=left))

    assert condition.reason == Reason.DELETION_STUCK
    assert "example.org/audit" in condition.message


def test_foreground_deletion_does_not_count_as_a_blocking_finalizer() -> None:
    cluster = a_cluster(**DELETED, finalizers=["foregroundDeletion"])

    assert ready(at(NOON + 2 * DELETION_TIMEOUT, cluster)).reason != Reason.DELETION_STUCK


@pytest.mark.parametrize(
    ("finalizers", "named"),
    [((), "node gpu-3 has not confirmed its termination"), (("a/b",), "finalizers a/b")],
)
def test_a_pod_stuck_in_termination_is_reported_with_the_cause(
    finalizers: tuple[str, ...], named: str
) -> None:
    pod = a_pod(is_terminating=True, due=NOON, node="gpu-3", finalizers=finalizers)
    session = at(NOON + TERMINATION_TIMEOUT, pods=(pod,), spec=a_session(suspend=True))

    assert ready(session).reason == Reason.DELETION_STUCK
    assert "pod one-head" in ready(session).message
    assert named in ready(session).message
    assert ready(at(NOON, pods=(pod,))).reason != Reason.DELETION_STUCK


def test_a_session_stuck_in_deletion_is_stalled() -> None:
    cluster = a_cluster(**DELETED, finalizers=FINALIZERS)

    status = reconcile(at(NOON + DELETION_TIMEOUT, cluster), SETTINGS).status

    assert status is not None
    stalled = find(status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert stalled.status == "True"


def a_manifest(*conditions: Json, **spec: Any) -> Json:
    labelled = {"tinkercloud.dev/component": "trainer"}
    metadata = {"name": "one-trainer", "uid": "u", "labels": labelled}
    status = {"conditions": list(conditions)}
    return dict(parsing.slim("Pod", {"metadata": metadata, "spec": spec, "status": status}))


def pod_reason(manifest: Json) -> tuple[str, str]:
    condition = ready(at(NOON, a_cluster(), pods=(parsing.pod(manifest),)))
    return condition.reason, condition.message


def test_scheduling_gates_are_reported_with_their_names() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    gates = [{"name": "example.org/topology"}, {"name": "example.org/licence"}]

    reason, message = pod_reason(a_manifest(gated, schedulingGates=gates, containers=[{}]))

    assert reason == Reason.SCHEDULING_GATED
    assert "pod one-trainer" in message
    assert "example.org/topology, example.org/licence" in message


def on_a_node(ready_now: str, containers: str, why: str = "") -> Json:
    scheduled = {"type": "PodScheduled", "status": "True"}
    ready_condition = {"type": "Ready", "status": ready_now, "reason": why}
    return a_manifest(
        scheduled,
        ready_condition,
        {"type": "ContainersReady", "status": containers},
        nodeName="gpu-3",
    )


def test_a_pod_on_a_node_that_is_not_ready_is_reported_with_the_node() -> None:
    reason, message = pod_reason(on_a_node("False", "True"))

    assert reason == Reason.NODE_NOT_READY
    assert "pod one-trainer: node gpu-3 is not ready" in message


@pytest.mark.parametrize(
    "manifest",
    [on_a_node("False", "False"), on_a_node("False", "True", "ReadinessGatesNotReady")],
    ids=["its containers are not ready", "its readiness gates are not"],
)
def test_an_unready_pod_does_not_blame_a_healthy_node(
    manifest: Json,
) -> None:
    assert parsing.pod(manifest).problem is None
