"""Obstacles for a session: its status reports them, and it proceeds once they are removed.

A separate kwok simulates pods that never start: its stages set the status that a kubelet would.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay, a_kuberay_operator
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
from tinkercloud_testing.cluster.image_build.programs import Program, build_folder
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.kube_api.existing import existing_cluster
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT, KwokNodes, a_kwok_controller
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("obstacles-0", gpus=32)
    return cluster


@contextmanager
def a_namespace(
    cluster: Cluster, folder: Path, **base_model: Any
) -> Iterator[tuple[Sessions, RunningOperator]]:
    """Create a namespace with a BaseModel and run an operator for it."""
    with cluster.a_namespace("obstacles") as namespace:
        cluster.apply(a_base_model(namespace, **base_model), *a_volume(namespace))
        kubeconfig = operator_account(cluster, namespace, folder)
        with an_operator(kubeconfig, namespace, folder, **PATIENCE) as operator:
            yield Sessions(cluster, namespace), operator
            cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=90s")
            sys.stdout.write(operator.program.log_tail())


@pytest.fixture
def sessions(definitions: Cluster, cluster_folder: Path) -> Iterator[Sessions]:
    with a_namespace(definitions, cluster_folder) as (made, _):
        yield made


def a_quota(namespace: str, **most: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "quota", "namespace": namespace},
        "spec": {"hard": {name.replace("_", "."): amount for name, amount in most.items()}},
    }


@pytest.mark.long
def test_a_session_waits_for_an_exhausted_quota(sessions: Sessions) -> None:
    sessions.cluster.apply(a_quota(sessions.namespace, pods="3"))

    sessions.make("one")
    sessions.wait_for_reason("one", "NamespaceQuotaExceeded")

    message = sessions.condition("one", "Ready")["message"]
    assert "exceeded quota: quota" in message
    assert "limited: pods=3" in message
    assert sessions.status("one")["phase"] == "Queued"
    assert sessions.condition("one", "Stalled")["status"] == "False"
    sessions.cluster.apply(a_quota(sessions.namespace, pods="8"))
    sessions.wait_for("one", "condition=Ready")


def test_a_quota_that_is_too_small_even_when_unused_stalls_the_session(sessions: Sessions) -> None:
    sessions.cluster.apply(a_quota(sessions.namespace, requests_cpu="100m"))

    sessions.make("one")
    sessions.wait_for_reason("one", "QuotaTooSmall")

    assert sessions.status("one")["phase"] == "Failed"
    assert sessions.condition("one", "Stalled")["status"] == "True"
    sessions.cluster.apply(a_quota(sessions.namespace, requests_cpu="64"))
    sessions.wait_for("one", "condition=Ready")


def test_an_owner_at_the_session_limit_gets_another_after_deleting_one(
    definitions: Cluster, cluster_folder: Path
) -> None:
    limits = {"maxSessionsPerOwner": 1}
    with a_namespace(definitions, cluster_folder, limits=limits) as (sessions, _):
        sessions.make_ready("first")
        sessions.make_ready("of-another", owner="grace")

        sessions.make("second")
        sessions.wait_for_reason("second", "QuotaExceeded")
        message = sessions.condition("second", "Ready")["message"]
        phase = sessions.status("second")["phase"]
        sessions.delete("first")
        sessions.wait_for("second", "condition=Ready")

        assert phase == "Queued"
        assert "the limit is 1" in message
        assert "number 1 in the owner's queue" in message


@pytest.mark.parametrize(
    "component",
    [
        "head",
        pytest.param("trainer", marks=pytest.mark.long),
        pytest.param("sampler", marks=pytest.mark.long),
    ],
)
def test_lost_pods_are_replaced(sessions: Sessions, component: str) -> None:
    sessions.make_ready("one")
    selector = f"tinkercloud.dev/session=one,tinkercloud.dev/component={component}"
    where = ("-n", sessions.namespace, "-l", selector)
    before = sessions.cluster.kubectl("get", "pods", *where, "-o", "name").split()

    sessions.cluster.kubectl("delete", "pods", *where, "--wait=true")

    def are_replaced() -> bool:
        now = sessions.cluster.kubectl("get", "pods", *where, "-o", "name").split()
        return len(now) == len(before) and not set(now) & set(before)

    wait_until(are_replaced, f"other pods for {before}", SOON_SECONDS)
    sessions.wait_for("one", "condition=Ready")


ILL = {"type": "ill"}
FATES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "no-image": (
        "ImagePullBackOff",
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
    ),
    "crashing": (
        "CrashLoopBackOff",
        {
            "restartCount": 5,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
        },
    ),
    "out-of-memory": (
        "OOMKilled",
        {
            "restartCount": 2,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        },
    ),
    "misconfigured": (
        "ConfigurationError",
        {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no such key"}}},
    ),
}
"""The expected reason in the status of each session, and the state of its containers."""


@pytest.fixture(scope="module")
def ill_node(definitions: Cluster, cluster_folder: Path) -> Iterator[None]:
    """Simulate a node on which the pods of each session fail in their own way."""
    built = build_folder("kwok")
    stages = [
        built / "share" / "kwok" / name for name in ("node-initialize.yaml", "pod-delete.yaml")
    ]
    stages += [a_stage(cluster_folder, session) for session in FATES]
    command = (
        str(built / "bin" / "kwok"),
        *(f"--config={stage}" for stage in stages),
        f"--kubeconfig={definitions.kubeconfig}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=ill",
    )
    environment = {"KWOK_WORKDIR": str(cluster_folder / "kwok-ill")}
    log = cluster_folder / "kwok-ill.log"
    program = Program("kwok-ill", command, log, lambda: True, environment)
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "ill-0",
            "annotations": {"kwok.x-k8s.io/node": "ill"},
            "labels": {"kubernetes.io/hostname": "ill-0", **ILL},
        },
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "effect": "NoSchedule"}]},
    }
    capacity = {"cpu": "256", "memory": "2Ti", "pods": "200", "nvidia.com/gpu": "100"}
    try:
        program.start()
        definitions.apply(node)
        status = {"capacity": capacity, "allocatable": capacity}
        definitions.patch_status("node", "ill-0", status)
        definitions.wait_for("node/ill-0", "condition=Ready")
        yield
        definitions.delete("node", "ill-0")
    finally:
        program.kill()


def a_stage(folder: Path, session: str) -> Path:
    """Write a stage that sets the container states of a session's scheduled pods."""
    _, fate = FATES[session]
    container = json.dumps({"ready": False, "restartCount": 0, "image": "", **fate})[1:]
    listed = "{{ range .spec.containers }}\n- {name: {{ .name | Quote }}, " + container
    stage = {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": session},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {
                "matchLabels": {"tinkercloud.dev/session": session},
                "matchExpressions": [
                    {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"},
                    {"key": ".status.containerStatuses", "operator": "DoesNotExist"},
                ],
            },
            "next": {
                "statusTemplate": f"phase: Pending\ncontainerStatuses:\n{listed}\n{{{{ end }}}}"
            },
        },
    }
    path = folder / f"stage-{session}.yaml"
    path.write_text(json.dumps(stage))
    return path


def test_pods_that_never_start_report_the_reason(
    definitions: Cluster, ill_node: None, cluster_folder: Path
) -> None:
    placement = {**PLACEMENT, "nodeSelector": ILL}
    with a_namespace(definitions, cluster_folder, placement=placement) as (sessions, _):
        for name in FATES:
            sessions.make(name)

        for name, (reason, _) in FATES.items():
            sessions.wait_for_reason(name, reason)

        stalled = {name: sessions.condition(name, "Stalled")["status"] for name in FATES}
        assert stalled == dict.fromkeys(FATES, "True")
        assert "exit code 3" in sessions.condition("crashing", "Ready")["message"]


def on_rack(name: str) -> Mapping[str, Any]:
    """Return the placement of pods on the simulated nodes of one rack."""
    return {**PLACEMENT, "nodeSelector": {**PLACEMENT["nodeSelector"], "rack": name}}


def nodes_of(sessions: Sessions, name: str) -> set[str]:
    pods = sessions.cluster.objects("pods", sessions.namespace, f"tinkercloud.dev/session={name}")
    return {str(pod["spec"].get("nodeName")) for pod in pods}


def test_a_drain_waits_until_a_session_has_moved_to_another_node(
    definitions: Cluster, kwok: KwokNodes, cluster_folder: Path
) -> None:
    rack = secrets.token_hex(4)
    first, second = f"{rack}-0", f"{rack}-1"
    kwok.add(first, labels={"rack": rack})
    with a_namespace(definitions, cluster_folder, placement=on_rack(rack)) as (sessions, _):
        sessions.make_ready("one")
        assert nodes_of(sessions, "one") == {first}
        kwok.add(second, labels={"rack": rack})

        definitions.kubectl("drain", first, "--delete-emptydir-data", "--timeout=240s")

        sessions.wait_for("one", "condition=Ready")
        assert nodes_of(sessions, "one") == {second}


def test_drain_moves_the_sessions_of_a_node_and_waits_until_they_have_left(
    definitions: Cluster, kwok: KwokNodes, cluster_folder: Path
) -> None:
    rack = secrets.token_hex(4)
    first, second = f"{rack}-0", f"{rack}-1"
    kwok.add(first, labels={"rack": rack})
    stays = {"placement": on_rack(rack), "sessions": {"leaveTaints": []}}
    with a_namespace(definitions, cluster_folder, **stays) as (sessions, _):
        sessions.make_ready("one")
        kwok.add(second, labels={"rack": rack})

        arguments = ("drain", first, "--cordon", f"--namespace={sessions.namespace}")
        drained = subprocess.run(
            [sys.executable, "-m", "tinkercloud_api", *arguments, "--timeout=240"],
            env={**os.environ, "KUBECONFIG": str(definitions.kubeconfig)},
            check=False,
            text=True,
            capture_output=True,
        )

        assert drained.returncode == 0, drained.stderr
        assert "one: has left the node" in drained.stdout
        sessions.wait_for("one", "condition=Ready")
        assert nodes_of(sessions, "one") == {second}


def test_a_session_whose_trainer_is_evicted_saves_its_state_and_resumes(
    sessions: Sessions,
) -> None:
    sessions.make_ready("one")
    before = sessions.status("one")
    where = {"tinkercloud.dev/session": "one", "tinkercloud.dev/component": "trainer"}
    selector = ",".join(f"{key}={value}" for key, value in where.items())
    [trainer, _] = sessions.cluster.objects("pods", sessions.namespace, selector)

    # The scheduler sets it on pods that it preempts, before it deletes them.
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    condition = {**target, "lastTransitionTime": "2026-01-01T12:00:00Z"}
    patch = json.dumps({"status": {"conditions": [condition]}})
    options = ("-n", sessions.namespace, "--subresource=status", "--type=strategic")
    sessions.cluster.kubectl("patch", f"pod/{trainer['metadata']['name']}", *options, "-p", patch)

    wait_until(
        lambda: (
            sessions.status("one").get("incarnation") != before["incarnation"]
            and sessions.condition("one", "Ready")["status"] == "True"
        ),
        "one has resumed",
        SOON_SECONDS,
    )
    assert sessions.status("one")["restarts"] == 0


def test_a_session_leaves_a_node_with_a_spot_notice(
    definitions: Cluster, kwok: KwokNodes, cluster_folder: Path
) -> None:
    kwok.add("spot-0", labels={"rack": "spot"})
    with a_namespace(definitions, cluster_folder, placement=on_rack("spot")) as (sessions, _):
        sessions.make_ready("one")
        kwok.add("spot-1", labels={"rack": "spot"})

        taint = "aws-node-termination-handler/spot-itn=1:NoSchedule"
        definitions.kubectl("taint", "node", "spot-0", taint)

        wait_until(lambda: nodes_of(sessions, "one") == {"spot-1"}, "one has moved", SOON_SECONDS)
        sessions.wait_for("one", "condition=Ready")
        assert sessions.status("one")["restarts"] == 0


def test_a_pod_with_scheduling_gates_is_reported_with_them(sessions: Sessions) -> None:
    sessions.make_ready("one")
    labelled = {"tinkercloud.dev/session": "one", "tinkercloud.dev/component": "trainer"}
    gated = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gated", "namespace": sessions.namespace, "labels": labelled},
        "spec": {
            "schedulingGates": [{"name": "example.org/licence"}],
            "containers": [{"name": "main", "image": "none"}],
        },
    }

    sessions.cluster.apply(gated)

    sessions.wait_for_reason("one", "SchedulingGated")
    assert "pod gated" in sessions.condition("one", "Ready")["message"]
    assert "example.org/licence" in sessions.condition("one", "Ready")["message"]
    sessions.cluster.delete("pod", "gated", sessions.namespace)
    sessions.wait_for("one", "condition=Ready")


def test_a_pod_on_a_node_that_is_not_ready_is_reported_with_it(sessions: Sessions) -> None:
    sessions.make_ready("one")
    where = ("-n", sessions.namespace, "-l", "tinkercloud.dev/component=head")
    pod = sessions.cluster.kubectl("get", "pods", *where, "-o", "name").strip()
    node = sessions.cluster.kubectl("get", "pods", *where, "-o", "jsonpath={..nodeName}").strip()

    # The node lifecycle controller does this to pods of a node without heartbeats. In this cluster
    # it would take an hour, because simulated nodes send no heartbeats.
    patch = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    options = ("-n", sessions.namespace, "--subresource=status", "--type=strategic")
    sessions.cluster.kubectl("patch", pod, *options, f"--patch={patch}")

    sessions.wait_for_reason("one", "NodeNotReady")
    assert f": node {node} is not ready" in sessions.condition("one", "Ready")["message"]


def test_a_suspended_session_keeps_its_secret_and_resumes(sessions: Sessions) -> None:
    sessions.make_ready("one")
    before = sessions.children("one")

    sessions.make("one", suspend=True)
    sessions.wait_for_reason("one", "Suspended")

    wait_until(
        lambda: sessions.children("one") == ["ConfigMap/one-token", "Secret/one-token"],
        "nothing else is left",
        SOON_SECONDS,
    )
    sessions.make("one", suspend=False)
    sessions.wait_for("one", "condition=Ready")
    kinds = [[each.split("/")[0] for each in found] for found in (before, sessions.children("one"))]
    assert kinds[0] == kinds[1]


@pytest.mark.long
@pytest.mark.skipif(existing_cluster() is not None, reason="an existing cluster may have KubeRay")
def test_sessions_progress_once_kuberay_is_installed(cluster_folder: Path) -> None:
    folder = cluster_folder / "without-kuberay"
    with (
        a_control_plane(folder) as plane,
        a_kwok_controller(plane.cluster, folder) as kwok,
    ):
        install_definitions(plane.cluster)
        kwok.add("node-0", gpus=8)
        with a_namespace(plane.cluster, folder) as (sessions, operator):
            process = operator.program.process
            sessions.make("early")
            sessions.wait_for_reason("early", "KubeRayMissing")
            stalled = sessions.condition("early", "Stalled")["status"]

            with a_kuberay_operator(plane.cluster, folder):
                sessions.wait_for("early", "condition=Ready")

            assert stalled == "True"
            assert operator.program.process is process
            assert operator.program.is_running
