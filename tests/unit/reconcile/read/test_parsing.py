"""Parsing of pods, nodes and quantities, and what the status reports about them."""

from typing import Any

import pytest

from tinkercloud_crds.conditions import Condition, ConditionType, Reason, find
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Node, Pod, PodProblem
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_testing.resources.sessions import (
    GPU_TAINT,
    TRAINERS,
    Json,
    a_base_model,
    a_base_model_manifest,
    a_node,
    a_pod,
    observed,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        (2, 2),
        ("1.5", 1.5),
        ("500m", 0.5),
        ("250u", 0.00025),
        ("100n", 1e-7),
        ("1k", 1e3),
        ("1e3", 1e3),
        ("1E3", 1e3),
        ("2M", 2e6),
        ("1E", 1e18),
        ("1Ki", 1024),
        ("1.5Gi", 1.5 * 2**30),
        ("3Ti", 3 * 2**40),
        ("1Ei", 2.0**60),
    ],
)
def test_quantities_are_parsed_in_kubernetes_format(text: str | int, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GiB", "1x", "1.2.3", "much"])
def test_an_invalid_quantity_is_rejected_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


def a_pod_manifest(*containers: Json, **status: Any) -> Json:
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {"tinkercloud.dev/component": "head"}},
        "status": {"containerStatuses": list(containers), **status},
    }


def a_condition(kind: str, status: str, **others: str) -> Json:
    return {"type": kind, "status": status, **others}


def waiting(reason: str, message: str = "", **others: Any) -> Json:
    return {"name": "head", "state": {"waiting": {"reason": reason, "message": message}}, **others}


def test_a_restart_of_the_head_container_changes_its_incarnation() -> None:
    sidecar = {"name": "mesh-proxy", "ready": True, "restartCount": 7}
    head = {"name": "head", "ready": True, "restartCount": 1}

    assert parsing.pod(a_pod_manifest(sidecar, head)).incarnation == "u-1"


def test_a_running_pod_is_parsed() -> None:
    running = {"name": "head", "started": True, "ready": True, "restartCount": 2, "state": {}}
    conditions = [a_condition("PodScheduled", "True"), a_condition("Ready", "True")]

    pod = parsing.pod(a_pod_manifest(running, conditions=conditions))

    assert pod == Pod("p", "u", "head", True, True, True, False, 2, None)
    assert pod.incarnation == "u-2"


def test_a_pod_without_a_status_is_neither_scheduled_nor_ready() -> None:
    pod = parsing.pod({"metadata": {"name": "p", "uid": "u"}})

    assert pod == Pod("p", "u", "", False, False, False, False, 0, None)


TERMINATED_WITH_MESSAGE = {
    "terminated": {"exitCode": 143, "message": "starting\nno room for 2 ranks\n"}
}
OUT_OF_MEMORY = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        (waiting("ImagePullBackOff", "no such image"), "ImagePullBackOff", "no such image"),
        (waiting("ErrImagePull", "denied"), "ImagePullBackOff", "denied"),
        (waiting("InvalidImageName"), "ImagePullBackOff", "container head"),
        (waiting("CreateContainerConfigError", "secret x"), "ConfigurationError", "secret x"),
        (waiting("CreateContainerError", "no such file"), "ConfigurationError", "no such file"),
        (
            waiting("CrashLoopBackOff", "back-off", lastState={"terminated": {"exitCode": 3}}),
            "CrashLoopBackOff",
            "exit code 3",
        ),
        (
            waiting("CrashLoopBackOff", "back-off", lastState=TERMINATED_WITH_MESSAGE),
            "CrashLoopBackOff",
            "back-off (exit code 143): no room for 2 ranks",
        ),
        (waiting("CrashLoopBackOff", lastState=OUT_OF_MEMORY), "OOMKilled", "exceeded its memory"),
        ({"name": "head", "state": OUT_OF_MEMORY}, "OOMKilled", "container head"),
    ],
)
def test_a_container_problem_has_the_reason_of_its_cause(
    container: Json, reason: str, message: str
) -> None:
    trouble = parsing.pod(a_pod_manifest(container)).problem

    assert trouble is not None
    assert trouble.reason == reason
    assert message in trouble.message


@pytest.mark.parametrize(
    "container",
    [
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        {"name": "head", "state": {"running": {}}, "lastState": OUT_OF_MEMORY},
        {"name": "head", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}},
    ],
)
def test_a_container_that_makes_progress_has_no_problem(container: Json) -> None:
    assert parsing.pod(a_pod_manifest(container)).problem is None


def test_a_failed_download_is_a_problem_of_its_pod() -> None:
    fetching = waiting("CrashLoopBackOff", "fetch-model ended") | {"name": "fetch-model"}

    trouble = parsing.pod(a_pod_manifest(initContainerStatuses=[fetching])).problem

    assert trouble is not None
    assert trouble.reason is Reason.CRASH_LOOP
    assert "container fetch-model" in trouble.message


def test_a_pod_without_a_node_is_unschedulable() -> None:
    why = a_condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")

    pod = parsing.pod(a_pod_manifest(conditions=[why]))

    assert pod.problem == PodProblem(Reason.UNSCHEDULABLE, "0/3 nodes")
    assert not pod.is_scheduled


FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "8Gi". '
SHORT = "The node was low on resource: memory. "


@pytest.mark.parametrize(
    ("why", "message", "reason", "expected"),
    [
        ("Evicted", FULL, Reason.OUT_OF_DISK, f"Evicted: {FULL.strip()}"),
        ("Evicted", SHORT, Reason.POD_FAILED, f"Evicted: {SHORT.strip()}"),
        ("UnexpectedAdmissionError", "no GPU", Reason.POD_FAILED, "UnexpectedAdmissionError: no"),
    ],
)
def test_a_failed_pod_has_a_problem_regardless_of_its_containers(
    why: str, message: str, reason: Reason, expected: str
) -> None:
    ended = {"phase": "Failed", "reason": why, "message": message}

    trouble = parsing.pod(a_pod_manifest(waiting("PodInitializing"), **ended)).problem

    assert trouble is not None
    assert trouble.reason is reason
    assert trouble.message.startswith(expected)


def test_a_deleted_pod_has_no_problem_regardless_of_its_containers() -> None:
    assert parsing.pod(a_pod_manifest(phase="Failed")).problem is None


def test_a_missing_volume_claim_is_a_configuration_error() -> None:
    message = '0/3 nodes are available: persistentvolumeclaim "modles" not found. not found'
    why = a_condition("PodScheduled", "False", reason="Unschedulable", message=message)

    pod = parsing.pod(a_pod_manifest(conditions=[why]))

    assert pod.problem == PodProblem(Reason.CONFIGURATION_ERROR, message)


def test_a_base_model_of_another_version_parses_to_none() -> None:
    manifest = a_base_model_manifest()
    assert parsing.base_model(manifest) == a_base_model()

    del manifest["spec"]["head"]

    assert parsing.base_model(manifest) is None


def test_the_capacity_of_a_node_is_parsed() -> None:
    manifest = {
        "metadata": {"labels": {"pool": "gpu"}},
        "spec": {"taints": [GPU_TAINT]},
        "status": {
            "allocatable": {
                "cpu": "7910m",
                "memory": "16Gi",
                "pods": "110",
                "nvidia.com/gpu": "4",
                "rdma/hca": "1k",
                "hugepages-2Mi": "5Gi",
            }
        },
    }

    devices = {"nvidia.com/gpu": 4, "rdma/hca": 1000, "hugepages-2Mi": 5 * 2.0**30}
    assert parsing.node(manifest) == Node(
        {"pool": "gpu"}, (GPU_TAINT,), 7.91, 16 * 2.0**30, devices
    )


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "vpc.amazonaws.com/efa"])
@pytest.mark.parametrize("allocatable", [{}, {"nvidia.com/gpu": "0", "vpc.amazonaws.com/efa": "0"}])
def test_temporarily_missing_devices_of_a_node_still_count(name: str, allocatable: Json) -> None:
    # This happens while the device plugin or the driver is upgraded.
    status = {"capacity": {name: "4"}, "allocatable": allocatable}

    assert parsing.node({"metadata": {}, "status": status}).devices[name] == 4


CLUSTER = ChildKey("RayCluster", "one")


def ready_reason(**fields: Any) -> str:
    return ready_condition(**fields).reason


def ready_condition(**fields: Any) -> Condition:
    cluster: Json = {"metadata": {"name": "one"}, "spec": {}, "status": fields.pop("cluster", {})}
    base_model = a_base_model(trainer=TRAINERS)
    session = observed(base_model=base_model, children={CLUSTER: cluster}, **fields)
    status = reconcile(session, Settings()).status
    ready = find(status.conditions, ConditionType.READY) if status is not None else None
    assert ready is not None
    return ready


UNSCHEDULABLE_POD = a_pod(
    "trainer", is_scheduled=False, problem=PodProblem(Reason.UNSCHEDULABLE, "0/1 nodes")
)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (None, Reason.UNSCHEDULABLE),
        ((a_node(),), Reason.UNSCHEDULABLE),
        ((a_node(gpus=3),), Reason.NEVER_FITS),
        ((a_node(gpus=0),), Reason.UNSCHEDULABLE),
        ((), Reason.UNSCHEDULABLE),
    ],
    ids=["nodes unknown", "occupied", "none large enough", "none with GPUs", "no nodes"],
)
def test_unschedulable_differs_from_never_fits(
    nodes: tuple[Node, ...] | None, reason: Reason
) -> None:
    assert ready_reason(pods=(UNSCHEDULABLE_POD,), nodes=nodes) == reason


def test_the_status_reports_that_no_current_node_matches() -> None:
    ready = ready_condition(pods=(UNSCHEDULABLE_POD,), nodes=(a_node(gpus=0),))

    assert ready.message == (
        "pod one-trainer: 0/1 nodes; none of the 1 current nodes match the BaseModel's placement"
        " and have GPUs, as required by a trainer pod (cpu 1, memory 4Gi, 4 GPUs); waiting for a"
        " matching node"
    )


@pytest.mark.parametrize(
    ("trouble", "phase"), [(Reason.OUT_OF_DISK, "Failed"), (Reason.POD_FAILED, "Provisioning")]
)
def test_the_cause_of_a_failed_pod_is_reported_while_it_is_replaced(
    trouble: Reason, phase: str
) -> None:
    failed = a_pod("trainer", name="lost", problem=PodProblem(trouble, "Evicted: too much"))
    cluster: Json = {"metadata": {"name": "one"}, "spec": {}}
    session = observed(
        base_model=a_base_model(trainer=TRAINERS),
        children={CLUSTER: cluster},
        pods=(a_pod("head"), a_pod("trainer", is_ready=False, is_started=False)),
        failed=failed,
    )

    status = reconcile(session, Settings()).status

    assert status is not None
    assert (status.phase, status.message) == (phase, "pod lost: Evicted: too much")


def failure(message: str) -> Json:
    return {"conditions": [a_condition("ReplicaFailure", "True", message=message)]}


QUOTA = "exceeded quota: q, requested: {0}, used: {1}, limited: requests.nvidia.com/gpu=8"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            QUOTA.format("requests.nvidia.com/gpu=4", "requests.nvidia.com/gpu=8"),
            Reason.NAMESPACE_QUOTA_EXCEEDED,
        ),
        (
            QUOTA.format("requests.nvidia.com/gpu=16", "requests.nvidia.com/gpu=0"),
            Reason.QUOTA_TOO_SMALL,
        ),
        ("exceeded quota: of an unknown form", Reason.NAMESPACE_QUOTA_EXCEEDED),
        ("admission webhook denied the request", Reason.APPLY_FAILED),
    ],
)
def test_an_exhausted_quota_differs_from_one_that_is_too_small(
    message: str, reason: Reason
) -> None:
    assert ready_reason(cluster=failure(message)) == reason
    assert ready_reason(apply_error=f"PATCH /api/v1/services: 403 {message}") == reason


@pytest.mark.parametrize(
    "trouble",
    [
        {"apply_error": "PATCH /poddisruptionbudgets/one: 403 a policy denied the request"},
        {"has_kuberay": False},
        {"cluster": failure("admission webhook denied the request")},
    ],
    ids=["a rejected child", "no KubeRay", "pods that were rejected once"],
)
def test_a_rejected_child_does_not_stop_a_serving_session(trouble: dict[str, Any]) -> None:
    pods = (a_pod("head"), a_pod("trainer", name="0"), a_pod("trainer", name="1"))

    assert ready_reason(pods=pods, **trouble) == Reason.READY
    assert ready_reason(pods=pods[:2], **trouble) != Reason.READY
