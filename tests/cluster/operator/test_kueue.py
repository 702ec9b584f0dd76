"""Sessions whose RayClusters Kueue admits, with real Kueue and KubeRay on simulated nodes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_api.providers.base import Pending
from tinkercloud_api.providers.cluster.session_status import read_session, readiness
from tinkercloud_crds.labels import OPERATOR_FIELD_MANAGER
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.kueue import QUEUES_LABEL, Kueue, a_kueue
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    SOON_SECONDS,
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT, KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until

ONE_SESSION = 3
"""GPUs of a session: two trainers and a sampler."""
URGENT = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "urgent"},
    "value": 1000,
}
FLAVOR: dict[str, Any] = {
    "nodeLabels": {"type": "kwok"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
"""Fields that Kueue adds to admitted pods."""
WRITES_OF_A_REFUSAL = 2
"""Writes for a session that cannot be served: its status and an Event."""


@pytest.fixture(scope="module")
def kueue(
    control_plane: ControlPlane, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path
) -> Iterator[Kueue]:
    install_definitions(control_plane.cluster)
    control_plane.cluster.apply(URGENT)
    kwok.add("kueue-0", gpus=16)
    with a_kueue(control_plane, cluster_folder) as running:
        yield running
        sys.stdout.write(running.manager.log_tail())


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, kueue: Kueue) -> Iterator[str]:
    with cluster.a_namespace("queued", **{QUEUES_LABEL: "yes"}) as name:
        cluster.apply(queued_model(name), *a_volume(name))
        yield name


@pytest.fixture(scope="module")
def operator(cluster: Cluster, namespace: str, cluster_folder: Path) -> Iterator[RunningOperator]:
    kubeconfig = operator_account(cluster, namespace, cluster_folder)
    with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE) as running:
        yield running


@pytest.fixture
def sessions(
    cluster: Cluster, namespace: str, kueue: Kueue, operator: RunningOperator
) -> Iterator[Sessions]:
    """Return the sessions of the namespace, whose queue has quota for one of them."""
    kueue.offer(namespace, gpus=ONE_SESSION, **FLAVOR)
    yield Sessions(cluster, namespace)
    cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=120s")
    sys.stdout.write(operator.program.log_tail())


def queued_model(namespace: str, **spec: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "placement": {**PLACEMENT, "queueName": "gpus"},
        "sessions": {"priorityClassNames": ["urgent"]},
    }
    return a_base_model(namespace, **chosen, **spec)


def ray_cluster(sessions: Sessions, name: str) -> dict[str, Any]:
    return sessions.cluster.get("raycluster", name, sessions.namespace)


def pods(sessions: Sessions, name: str) -> set[str]:
    selector = f"tinkercloud.dev/session={name}"
    found = sessions.cluster.objects("pods", sessions.namespace, selector)
    return {pod["metadata"]["uid"] for pod in found}


def applied_fields(sessions: Sessions, name: str) -> str:
    """Return the fields of a RayCluster that the operator has applied, as text."""
    where = ("raycluster", name, "-n", sessions.namespace, "-o", "json")
    found = json.loads(sessions.cluster.kubectl("get", *where, "--show-managed-fields"))
    entries = [
        entry["fieldsV1"]
        for entry in found["metadata"]["managedFields"]
        if entry["operation"] == "Apply" and entry["manager"] == OPERATOR_FIELD_MANAGER
    ]
    return json.dumps(entries)


def test_a_session_waits_until_another_releases_its_quota(sessions: Sessions) -> None:
    sessions.make_ready("first")

    sessions.make("second")
    sessions.wait_for_reason("second", "Queued")

    waiting = readiness(read_session(sessions.cluster.get("tsess", "second", sessions.namespace)))
    assert sessions.status("second")["phase"] == "Queued"
    assert sessions.condition("second", "QuotaReserved")["status"] == "False"
    assert isinstance(waiting, Pending)
    assert waiting.queue_state == "paused_capacity"
    assert "LocalQueue 'gpus'" in waiting.reason
    assert pods(sessions, "second") == set()
    sessions.delete("first")
    sessions.wait_for("second", "condition=Ready")


@pytest.mark.long
def test_spares_make_room_for_a_session_that_a_resource_quota_keeps_from_the_queue(
    sessions: Sessions, kueue: Kueue
) -> None:
    kueue.offer(sessions.namespace, gpus=2 * ONE_SESSION, **FLAVOR)
    sessions.cluster.apply(queued_model(sessions.namespace, warmSpares=1))

    def spares() -> dict[str, str]:
        """Return the names of spares by uid: one that replaces another may have its name."""
        found = sessions.cluster.objects("tsess", sessions.namespace)
        metadata = [each["metadata"] for each in found if each["spec"].get("role") == "Spare"]
        return {each["uid"]: each["name"] for each in metadata}

    wait_until(lambda: len(spares()) == 1, "a spare", SOON_SECONDS)
    [(spare, name)] = spares().items()
    sessions.wait_for(name, "condition=Ready")
    # Without its Service, a session has no RayCluster, so that Kueue does not know of it.
    used = len(sessions.cluster.objects("services", sessions.namespace))
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "services", "namespace": sessions.namespace},
        "spec": {"hard": {"services": str(used)}},
    }
    sessions.cluster.apply(quota)
    try:
        sessions.make("first", trainer={"replicas": 1})
        sessions.wait_for("first", "condition=Ready")

        assert spare not in spares()
    finally:
        where = ("-n", sessions.namespace)
        sessions.cluster.kubectl("delete", "resourcequota", "services", *where)
        sessions.cluster.apply(queued_model(sessions.namespace))


def test_a_suspended_session_frees_its_quota_and_is_queued_on_resume(sessions: Sessions) -> None:
    sessions.make_ready("first")
    sessions.make("second")
    sessions.wait_for_reason("second", "Queued")

    sessions.make("first", suspend=True)
    sessions.wait_for("second", "condition=Ready")
    sessions.make("first", suspend=False)

    sessions.wait_for_reason("first", "Queued")
    assert sessions.condition("first", "Stalled")["status"] == "False"


@pytest.mark.long
def test_a_queued_session_causes_no_writes_and_the_operator_leaves_suspend_to_kueue(
    sessions: Sessions, operator: RunningOperator
) -> None:
    sessions.make_ready("first")
    sessions.make("second")
    sessions.wait_for_reason("second", "Queued")
    sessions.make("seen-before", baseModel="Unknown/Model")
    sessions.wait_for_reason("seen-before", "BaseModelNotFound")
    before, written = ray_cluster(sessions, "second"), operator.rest()

    sessions.cluster.kubectl(
        "label", "rayclusters,tsess", "--all", "touched=yes", "-n", sessions.namespace
    )
    sessions.make("seen-after", baseModel="Unknown/Model")
    sessions.wait_for_reason("seen-after", "BaseModelNotFound")

    after = ray_cluster(sessions, "second")
    assert operator.rest() - written <= WRITES_OF_A_REFUSAL
    assert after["spec"] == before["spec"]
    assert after["spec"]["suspend"] is True
    applied = applied_fields(sessions, "second")
    assert "f:headGroupSpec" in applied
    assert "f:suspend" not in applied


def test_a_preempted_session_reports_it_and_is_readmitted(sessions: Sessions) -> None:
    sessions.make_ready("first")
    before = pods(sessions, "first")

    sessions.make("pressing", priorityClassName="urgent")
    sessions.wait_for("pressing", "condition=Ready")

    assert sessions.status("first")["phase"] == "Queued"
    assert sessions.reason("first") == "Queued"
    assert "endpoint" not in sessions.status("first")
    assert pods(sessions, "first") == set()
    sessions.delete("pressing")
    sessions.wait_for("first", "condition=Ready")
    assert not pods(sessions, "first") & before


@pytest.mark.long
def test_fields_that_kueue_adds_to_an_admitted_session_are_kept(
    sessions: Sessions, operator: RunningOperator
) -> None:
    sessions.make_ready("first")
    running, written = pods(sessions, "first"), operator.rest()

    sessions.cluster.kubectl("label", "pods", "--all", "touched=yes", "-n", sessions.namespace)
    sessions.make("seen", baseModel="Unknown/Model")
    sessions.wait_for_reason("seen", "BaseModelNotFound")

    head = ray_cluster(sessions, "first")["spec"]["headGroupSpec"]["template"]["spec"]
    assert FLAVOR["tolerations"][0] in head["tolerations"]
    assert operator.rest() - written <= WRITES_OF_A_REFUSAL
    assert pods(sessions, "first") == running


@pytest.mark.long
def test_a_changed_base_model_evicts_no_session(sessions: Sessions) -> None:
    sessions.make_ready("first")
    running = pods(sessions, "first")

    sessions.cluster.apply(queued_model(sessions.namespace, head={"image": "another"}))
    sessions.make("second")
    sessions.wait_for_reason("second", "Queued")

    head = ray_cluster(sessions, "second")["spec"]["headGroupSpec"]["template"]["spec"]
    assert head["containers"][0]["image"] == "another"
    assert sessions.status("first")["phase"] == "Ready"
    assert pods(sessions, "first") == running


@pytest.mark.long
def test_a_deleted_session_leaves_no_workload(sessions: Sessions) -> None:
    sessions.make_ready("first")
    sessions.make("second")
    sessions.wait_for_reason("second", "Queued")

    sessions.delete("first")
    sessions.delete("second")

    sessions.wait_until_nothing_is_left("first")
    sessions.wait_until_nothing_is_left("second")
    wait_until(
        lambda: not sessions.cluster.objects("workloads", sessions.namespace),
        "no Workload is left",
        SOON_SECONDS,
    )
