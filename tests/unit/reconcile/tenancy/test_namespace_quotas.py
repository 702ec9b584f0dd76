"""Sessions that a ResourceQuota of the namespace rejects, with and without a queue of Kueue."""

from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.quota_fields import Amounts
from tinkercloud_operator.decide.pool.spare_facts import is_short
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.decide.tenancy.quota_claims import claimant
from tinkercloud_testing.resources.session_world import RAY_CLUSTER, SETTINGS
from tinkercloud_testing.resources.sessions import Json, a_base_model, a_session_manifest, observed

USED_UP = (
    'pods "one-head" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=4,'
    " used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8"
)
TOO_SMALL = USED_UP.replace("gpu=4", "gpu=16")
QUEUES = {"without a queue": {}, "with a queue": {"queueName": "gpus"}}


def rejected(why: str, placement: Json) -> dict[str, Any]:
    """Return a session for which the API server refuses to create an object, the RayCluster say."""
    return {"base_model": a_base_model(placement=placement), "apply_error": f"403 {why}"}


def with_rejected_pods(why: str, placement: Json) -> dict[str, Any]:
    """Return a session whose pods KubeRay can't create; Kueue has admitted it if it has a queue."""
    queue = {labels.QUEUE_LABEL: placement["queueName"]} if placement else {}
    cluster: Json = {
        "metadata": {"name": "one", "labels": queue},
        "spec": {"suspend": False},
        "status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": why}]},
    }
    return {"base_model": a_base_model(placement=placement), "children": {RAY_CLUSTER: cluster}}


def reconciled(**session: Any) -> Json:
    """Return the TrainingSession with the status that the operator writes."""
    status = reconcile(observed(**session), SETTINGS).status
    assert status is not None
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {**a_session_manifest("one"), "status": written}


def ready(session: Json) -> Json:
    found: Json = next(each for each in session["status"]["conditions"] if each["type"] == "Ready")
    return found


@pytest.mark.parametrize("placement", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("how", [rejected, with_rejected_pods])
def test_spares_make_room_for_a_session_that_a_used_up_quota_rejects(
    how: Any, placement: Json
) -> None:
    session = reconciled(**how(USED_UP, placement))

    assert is_short(session)
    assert ready(session)["reason"] == "NamespaceQuotaExceeded"
    assert USED_UP in ready(session)["message"]
    assert session["status"]["phase"] == "Queued"


@pytest.mark.parametrize(
    ("requested", "makes_room"),
    [
        ("pods=1,requests.memory=8Gi", True),
        ("count/pods=1", True),
        ("services=1", True),
        ("count/rayclusters.ray.io=1", True),
        ("persistentvolumeclaims=1", False),
        ("gold.storageclass.storage.k8s.io/requests.storage=1Gi", False),
        ("requests.storage=1Gi", False),
        ("pods=1,count/jobs.batch=1", False),
    ],
)
def test_spares_make_room_only_for_what_they_hold(requested: str, makes_room: bool) -> None:
    message = f"exceeded quota: team, requested: {requested}, used: {requested}, limited: pods=1"

    assert is_short(reconciled(**rejected(message, {}))) == makes_room


@pytest.mark.parametrize("placement", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("how", [rejected, with_rejected_pods])
def test_spares_stay_if_the_quota_could_never_hold_the_session(how: Any, placement: Json) -> None:
    session = reconciled(**how(TOO_SMALL, placement))

    assert not is_short(session)
    assert ready(session)["reason"] == "QuotaTooSmall"


@pytest.mark.parametrize("placement", QUEUES.values(), ids=QUEUES)
def test_spares_stay_while_a_session_waits_for_a_limit_of_its_tenant(placement: Json) -> None:
    waits = "tenant 'research' uses 1 of 1 sessions"
    session = reconciled(base_model=a_base_model(placement=placement), quota_message=waits)

    assert not is_short(session)
    assert ready(session)["reason"] == "QuotaExceeded"


@pytest.mark.parametrize("placement", QUEUES.values(), ids=QUEUES)
def test_a_session_that_the_namespace_rejects_keeps_its_place_in_the_limit_of_its_tenant(
    placement: Json,
) -> None:
    session = reconciled(**rejected(USED_UP, placement))
    session["metadata"]["creationTimestamp"] = "2026-01-01T12:00:00Z"

    # What a restarted operator reads from the status: it has admitted nothing itself.
    found = claimant(
        session, Amounts(sessions=1), has_cluster=False, is_admitted=False, is_rejected=False
    )

    assert found is not None
    assert found.held == Amounts(sessions=1)
    assert not found.waits
