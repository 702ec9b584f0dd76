"""A session gets no new head while one of an earlier RayCluster may still be saving."""

from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason, find, timestamp
from tinkercloud_operator.decide.read.parsing import pod
from tinkercloud_operator.decide.session.actions import Apply, Plan
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.spec.observed import Observed, Pod
from tinkercloud_testing.resources.session_world import SETTINGS, a_world
from tinkercloud_testing.resources.sessions import (
    NOON,
    TRAINERS,
    Json,
    a_base_model,
    a_pod,
    a_session,
    a_session_manifest,
    observed,
)

LOOK = "the operator reconciles"
GRACE = timedelta(seconds=155)
SESSIONS = {
    "a dedicated session": a_session(),
    "a cluster of a pool": a_session(role="Pool", owner=labels.POOL_OWNER, lora=None),
    "a spare": a_session(role="Spare", owner=labels.POOL_OWNER, lora=None),
}


def with_head(head: Pod, **fields: Any) -> Observed:
    """Return a session whose RayCluster is gone, with one pod."""
    base_model = a_base_model(trainer=TRAINERS)
    return observed(pods=(head,), base_model=base_model, has_finalizer=True, **fields)


def ending_head(**fields: Any) -> Pod:
    return a_pod(is_ready=False, is_terminating=True, due=NOON + GRACE, **fields)


def starts_pods(plan: Plan) -> bool:
    applied = [each.manifest["kind"] for each in plan.actions if isinstance(each, Apply)]
    return "RayCluster" in applied


def reason(plan: Plan) -> str:
    assert plan.status is not None
    ready = find(plan.status.conditions, ConditionType.READY)
    assert ready is not None
    return ready.reason


@pytest.mark.parametrize("kind", SESSIONS)
def test_a_head_that_may_be_saving_is_waited_for(kind: str) -> None:
    waiting = reconcile(with_head(ending_head(), spec=SESSIONS[kind]), SETTINGS)

    assert not starts_pods(waiting)
    assert reason(waiting) == Reason.HEAD_TERMINATING
    assert waiting.status is not None
    assert "one-head is still running" in (waiting.status.message or "")
    assert timestamp(NOON + GRACE + timedelta(minutes=1)) in (waiting.status.message or "")
    stalled = find(waiting.status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert stalled.status == "False"


@pytest.mark.parametrize("kind", SESSIONS)
def test_a_session_gets_new_pods_once_its_old_head_has_ended(kind: str) -> None:
    trainer = a_pod("trainer", is_terminating=True)

    assert starts_pods(reconcile(with_head(trainer, spec=SESSIONS[kind]), SETTINGS))


def test_a_head_that_never_started_has_nothing_to_save() -> None:
    assert starts_pods(reconcile(with_head(ending_head(is_started=False)), SETTINGS))


def test_a_head_on_a_lost_node_does_not_block_the_session_forever() -> None:
    end = NOON + GRACE + timedelta(minutes=1)
    before = reconcile(with_head(ending_head(), now=end - timedelta(seconds=1)), SETTINGS)
    after = reconcile(with_head(ending_head(), now=end), SETTINGS)

    assert not starts_pods(before)
    assert before.requeue_after_seconds == 1
    assert starts_pods(after)
    assert reason(after) == Reason.DELETION_STUCK


def test_a_session_whose_ray_cluster_is_deleted_resumes_after_its_head() -> None:
    world = a_world("workers", "it settles", "the RayCluster is deleted")
    first = world.pods["head-0"].uid

    world.happen(LOOK, LOOK)
    waits = find(world.status.conditions, ConditionType.CLUSTER_PROVISIONED)
    world.happen("it settles")

    assert waits is not None
    assert (waits.status, waits.reason) == ("False", Reason.HEAD_TERMINATING)
    assert world.status.phase == "Ready"
    assert world.pods["head-0"].uid != first


def test_a_container_that_ends_before_the_head_does_not_hide_it() -> None:
    statuses = [
        {"name": "head", "started": True, "ready": False, "restartCount": 0},
        {"name": "mesh-proxy", "started": False, "ready": False, "restartCount": 0},
    ]
    metadata = {"name": "one-head", "uid": "a", "labels": {labels.COMPONENT_LABEL: "head"}}

    assert pod({"metadata": metadata, "status": {"containerStatuses": statuses}}).is_started


# Clusters that serve sessions, and are deleted themselves.


def watched_head(cluster: str, **metadata: Any) -> Json:
    """Return the pod of the head of a cluster whose RayCluster is gone."""
    owner = {"kind": "RayCluster", "name": cluster, "uid": "uid-of-a-ray-cluster"}
    return {
        "metadata": {
            "name": f"{cluster}-head",
            "uid": "uid-of-head",
            "resourceVersion": "5",
            "labels": {labels.SESSION_LABEL: cluster, labels.COMPONENT_LABEL: "head"},
            "ownerReferences": [owner],
            **metadata,
        },
        "spec": {},
        "status": {"containerStatuses": [{"name": "head", "started": True, "ready": False}]},
    }


def test_nobody_waits_for_a_head_that_no_raycluster_owns() -> None:
    watched = Watched()
    session = a_session_manifest("one", sharing="Shared", poolCluster="pool-tiny-0")
    session["metadata"] |= {
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": timestamp(NOON),
    }
    watched.note("TrainingSession", session)
    watched.note("Pod", watched_head("pool-tiny-0", ownerReferences=[]))

    assert watched.ending_heads(session["spec"]["baseModel"], NOON) == {}


def test_the_running_head_of_a_deleted_cluster_is_known_until_it_is_gone() -> None:
    watched = Watched()
    session = a_session_manifest("one", sharing="Shared", poolCluster="pool-tiny-0")
    session["metadata"] |= {
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": timestamp(NOON),
    }
    model_name = session["spec"]["baseModel"]
    watched.note("TrainingSession", session)
    watched.note("Pod", watched_head("pool-tiny-0"))

    known = watched.ending_heads(model_name, NOON)
    watched.note("Pod", watched_head("pool-tiny-0", resourceVersion="6"), is_gone=True)

    assert known.keys() == {"pool-tiny-0"}
    assert watched.ending_heads(model_name, NOON) == {}
