"""From objects of Kubernetes to what is decided by: pods, nodes, quantities, and what fits."""

from typing import Any

import pytest

from tinkercloud_crds.conditions import Condition, ConditionType, Reason, find
from tinkercloud_operator import seen
from tinkercloud_operator.fits import never_fits, without_kin
from tinkercloud_operator.observed import ChildKey, Node, Pod, Trouble
from tinkercloud_operator.quantities import parse_quantity
from tinkercloud_operator.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.sessions import (
    TRAINERS,
    Json,
    a_base_model,
    a_base_model_manifest,
    a_build,
    a_pod,
    observed,
)

CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
STARTING = {
    "key": "node.cloudprovider.kubernetes.io/uninitialized",
    "value": "true",
    "effect": "NoSchedule",
}
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


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
def test_quantities_are_read_as_kubernetes_writes_them(text: str | int, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GiB", "1x", "1.2.3", "much"])
def test_what_is_no_quantity_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
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


def test_a_pod_that_runs_is_seen_as_it_is() -> None:
    running = {"name": "head", "started": True, "ready": True, "restartCount": 2, "state": {}}
    conditions = [a_condition("PodScheduled", "True"), a_condition("Ready", "True")]

    pod = seen.pod(a_pod_manifest(running, conditions=conditions))

    assert pod == Pod("p", "u", "head", True, True, True, False, 2, None)
    assert pod.incarnation == "u-2"


def test_a_pod_nothing_is_known_of_is_not_there_yet() -> None:
    pod = seen.pod({"metadata": {"name": "p", "uid": "u"}})

    assert pod == Pod("p", "u", "", False, False, False, False, 0, None)


LAST_WORDS = {"terminated": {"exitCode": 143, "message": "starting\nno room for 2 ranks\n"}}
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
            waiting("CrashLoopBackOff", "back-off", lastState=LAST_WORDS),
            "CrashLoopBackOff",
            "back-off (exit code 143): no room for 2 ranks",
        ),
        (waiting("CrashLoopBackOff", lastState=OUT_OF_MEMORY), "OOMKilled", "more memory"),
        ({"name": "head", "state": OUT_OF_MEMORY}, "OOMKilled", "container head"),
    ],
)
def test_trouble_of_a_container_is_told_by_its_cause(
    container: Json, reason: str, message: str
) -> None:
    trouble = seen.pod(a_pod_manifest(container)).trouble

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
def test_what_gets_on_is_in_no_trouble(container: Json) -> None:
    assert seen.pod(a_pod_manifest(container)).trouble is None


def test_a_download_that_fails_is_trouble_of_its_pod() -> None:
    fetching = waiting("CrashLoopBackOff", "fetch-model ended") | {"name": "fetch-model"}

    trouble = seen.pod(a_pod_manifest(initContainerStatuses=[fetching])).trouble

    assert trouble is not None
    assert trouble.reason is Reason.CRASH_LOOP
    assert "container fetch-model" in trouble.message


def test_a_pod_without_room_is_unschedulable() -> None:
    why = a_condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")

    pod = seen.pod(a_pod_manifest(conditions=[why]))

    assert pod.trouble == Trouble(Reason.UNSCHEDULABLE, "0/3 nodes")
    assert not pod.is_scheduled


FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "8Gi". '
SHORT = "The node was low on resource: memory. "


@pytest.mark.parametrize(
    ("why", "message", "reason", "told"),
    [
        ("Evicted", FULL, Reason.OUT_OF_DISK, f"Evicted: {FULL.strip()}"),
        ("Evicted", SHORT, Reason.POD_FAILED, f"Evicted: {SHORT.strip()}"),
        ("UnexpectedAdmissionError", "no GPU", Reason.POD_FAILED, "UnexpectedAdmissionError: no"),
    ],
)
def test_a_pod_that_was_ended_for_good_is_in_trouble_whatever_its_containers_say(
    why: str, message: str, reason: Reason, told: str
) -> None:
    ended = {"phase": "Failed", "reason": why, "message": message}

    trouble = seen.pod(a_pod_manifest(waiting("PodInitializing"), **ended)).trouble

    assert trouble is not None
    assert trouble.reason is reason
    assert trouble.message.startswith(told)


def test_a_pod_that_was_deleted_is_in_no_trouble_however_its_containers_ended() -> None:
    assert seen.pod(a_pod_manifest(phase="Failed")).trouble is None


def test_a_claim_that_does_not_exist_is_no_matter_of_room() -> None:
    message = '0/3 nodes are available: persistentvolumeclaim "modles" not found. not found'
    why = a_condition("PodScheduled", "False", reason="Unschedulable", message=message)

    pod = seen.pod(a_pod_manifest(conditions=[why]))

    assert pod.trouble == Trouble(Reason.CONFIGURATION_ERROR, message)


def test_a_base_model_of_another_version_is_none() -> None:
    manifest = a_base_model_manifest()
    assert seen.base_model(manifest) == a_base_model()

    del manifest["spec"]["head"]

    assert seen.base_model(manifest) is None


def a_node(gpus: int = 8, cpu: float = 64, others: Json | None = None, **fields: Any) -> Node:
    values: Json = {"labels": {"pool": "gpu"}, "taints": (), "memory": 512 * 2.0**30}
    devices = {"nvidia.com/gpu": gpus, **(others or {})}
    return Node(cpu=cpu, devices=devices, **values | fields)


def test_a_node_is_seen_by_what_it_can_hold() -> None:
    manifest = {
        "metadata": {"labels": {"pool": "gpu"}},
        "spec": {"taints": [TAINT]},
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
    assert seen.node(manifest) == Node({"pool": "gpu"}, (TAINT,), 7.91, 16 * 2.0**30, devices)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "vpc.amazonaws.com/efa"])
@pytest.mark.parametrize("allocatable", [{}, {"nvidia.com/gpu": "0", "vpc.amazonaws.com/efa": "0"}])
def test_a_node_whose_devices_are_away_for_now_still_has_them(name: str, allocatable: Json) -> None:
    # As while the device plugin, or the driver, is upgraded.
    status = {"capacity": {name: "4"}, "allocatable": allocatable}

    assert seen.node({"metadata": {}, "status": status}).devices[name] == 4


def why_never(node: Node, **placement: Any) -> str | None:
    shape = a_build(a_base_model(trainer=TRAINERS, placement=placement)).shape
    return never_fits(shape, [node])


def what_is_missing(node: Node, **placement: Any) -> str | None:
    shape = a_build(a_base_model(trainer=TRAINERS, placement=placement)).shape
    return without_kin(shape, [node])


REQUIREMENT = {"key": "pool", "values": ["gpu", "big"]}


@pytest.mark.parametrize(
    ("node", "placement"),
    [
        (a_node(), {}),
        (a_node(gpus=4), {"nodeSelector": {"pool": "gpu"}}),
        (a_node(), {"nodeAffinity": [{**REQUIREMENT, "operator": "In"}]}),
        (a_node(), {"nodeAffinity": [{"key": "spot", "operator": "DoesNotExist"}]}),
        (a_node(), {"nodeAffinity": [{"key": "pool", "operator": "Exists"}]}),
        (a_node(), {"nodeAffinity": [{"key": "pool", "operator": "NotIn", "values": ["x"]}]}),
        (a_node(taints=(TAINT,)), {"tolerations": [{"operator": "Exists"}]}),
        (
            a_node(taints=(TAINT,)),
            {"tolerations": [{"key": "nvidia.com/gpu", "value": "present"}]},
        ),
        (a_node(taints=({**TAINT, "effect": "PreferNoSchedule"},)), {}),
        (a_node(taints=(CORDONED, STARTING)), {}),
    ],
)
def test_a_pod_fits_where_a_node_could_hold_it(node: Node, placement: Json) -> None:
    assert why_never(node, **placement) is None
    assert what_is_missing(node, **placement) is None


@pytest.mark.parametrize("node", [a_node(gpus=3), a_node(cpu=0.5), a_node(memory=2.0**30)])
def test_a_pod_that_no_node_of_its_kind_could_hold_never_fits(node: Node) -> None:
    reason = why_never(node)

    assert reason is not None
    assert "no node could ever hold" in reason


@pytest.mark.parametrize(
    ("node", "placement"),
    [
        (a_node(gpus=0), {}),
        (a_node(cpu=0.5), {"nodeSelector": {"pool": "cpu"}}),
        (a_node(), {"nodeAffinity": [{**REQUIREMENT, "operator": "NotIn"}]}),
        (a_node(), {"nodeAffinity": [{"key": "pool", "operator": "DoesNotExist"}]}),
        (a_node(), {"nodeAffinity": [{"key": "zone", "operator": "Exists"}]}),
        (a_node(taints=({**TAINT, "key": "team"},)), {}),
        (a_node(taints=(TAINT,)), {"tolerations": [{"key": "nvidia.com/gpu", "value": "x"}]}),
        (
            a_node(taints=({**TAINT, "key": "team"},)),
            {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
        ),
    ],
)
def test_a_pod_waits_for_nodes_of_a_kind_that_is_not_there_now(node: Node, placement: Json) -> None:
    assert why_never(node, **placement) is None
    missing = what_is_missing(node, **placement)
    assert missing is not None
    assert "none of the 1 nodes there are now" in missing


def test_a_head_too_large_for_the_nodes_there_are_waits_too_while_gpu_nodes_are_to_come() -> None:
    # They may be larger.
    assert why_never(a_node(gpus=0, cpu=0.5)) is None


def test_nodes_of_other_sizes_may_come_where_karpenter_makes_them() -> None:
    small = a_node(gpus=3, labels={"pool": "gpu", "karpenter.sh/nodepool": "default"})

    assert why_never(small) is None


BESIDE_GPUS = a_node(gpus=0)
"""Where a head, which tolerates nothing, can be."""


def test_kubernetes_lets_pods_that_ask_for_gpus_on_nodes_that_keep_others_off() -> None:
    shape = a_build(a_base_model(trainer=TRAINERS)).shape
    too_small, large_enough = (a_node(gpus=gpus, taints=(TAINT,)) for gpus in (3, 4))

    assert without_kin(shape, [BESIDE_GPUS, large_enough]) is None
    assert never_fits(shape, [BESIDE_GPUS, large_enough]) is None
    assert "no node could ever hold a trainer pod" in str(
        never_fits(shape, [BESIDE_GPUS, too_small])
    )


@pytest.mark.parametrize("taint", [{"key": "team"}, {"effect": "NoExecute"}])
def test_kubernetes_adds_no_other_toleration(taint: Json) -> None:
    shape = a_build(a_base_model(trainer=TRAINERS)).shape
    node = a_node(taints=({**TAINT, **taint},))

    assert "a trainer pod (cpu 1, memory 4Gi, 4 GPUs) needs" in str(
        without_kin(shape, [BESIDE_GPUS, node])
    )


RDMA = "rdma/hca"
PAGES = "hugepages-2Mi"
EXTENDED = [{"name": RDMA, "count": 2}, {"name": PAGES, "count": 512}]
OF_RDMA = {RDMA: 2, PAGES: 2.0**30}


def with_extended(node: Node) -> tuple[str | None, str | None]:
    """Return why trainers with extended resources never fit a cluster, and what is missing."""
    trainer = {**TRAINERS, "extendedResources": EXTENDED}
    shape = a_build(a_base_model(trainer=trainer)).shape
    nodes = [BESIDE_GPUS, node]
    return never_fits(shape, nodes), without_kin(shape, nodes)


@pytest.mark.parametrize(
    "taints", [(), (TAINT,), (TAINT, {**TAINT, "key": RDMA}), ({**TAINT, "key": RDMA},)]
)
def test_a_pod_fits_where_its_extended_resources_are(taints: tuple[Json, ...]) -> None:
    assert with_extended(a_node(others=OF_RDMA, taints=taints)) == (None, None)


@pytest.mark.parametrize("fewer", [{RDMA: 1}, {PAGES: 2.0**30 - 2**21}])
def test_a_pod_never_fits_where_nodes_have_fewer_extended_resources(fewer: Json) -> None:
    never, missing = with_extended(a_node(others=OF_RDMA | fewer))

    assert never == (
        "no node could ever hold a trainer pod (cpu 1, memory 4Gi, 4 GPUs, rdma/hca 2,"
        " hugepages-2Mi 1024Mi): 1 of 2 nodes match the BaseModel's placement and have GPUs and"
        " rdma/hca and hugepages-2Mi, and none of those is large enough"
    )
    assert missing is None


@pytest.mark.parametrize("none", [{RDMA: 0}, {PAGES: 0}])
def test_a_pod_waits_for_nodes_with_its_extended_resources(none: Json) -> None:
    # A pool of such nodes that has shrunk to nothing may be made again.
    never, missing = with_extended(a_node(others=OF_RDMA | none))

    assert never is None
    assert "none of the 2 nodes there are now match the BaseModel's placement and have GPUs" in str(
        missing
    )


def test_kubernetes_tolerates_no_taint_of_huge_pages() -> None:
    never, missing = with_extended(a_node(others=OF_RDMA, taints=({**TAINT, "key": PAGES},)))

    assert never is None
    assert missing is not None


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


WITHOUT_ROOM = a_pod(
    "trainer", is_scheduled=False, trouble=Trouble(Reason.UNSCHEDULABLE, "0/1 nodes")
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
    ids=["nodes unknown", "taken", "none large enough", "none with GPUs", "none at all"],
)
def test_waiting_for_room_differs_from_never_fitting(
    nodes: tuple[Node, ...] | None, reason: Reason
) -> None:
    assert ready_reason(pods=(WITHOUT_ROOM,), nodes=nodes) == reason


def test_a_session_says_that_no_node_of_a_kind_it_wants_is_there() -> None:
    ready = ready_condition(pods=(WITHOUT_ROOM,), nodes=(a_node(gpus=0),))

    assert ready.message == (
        "pod one-trainer: 0/1 nodes; none of the 1 nodes there are now match the BaseModel's"
        " placement and have GPUs, as a trainer pod (cpu 1, memory 4Gi, 4 GPUs) needs; it waits for"
        " one"
    )


@pytest.mark.parametrize(
    ("trouble", "phase"), [(Reason.OUT_OF_DISK, "Failed"), (Reason.POD_FAILED, "Provisioning")]
)
def test_why_a_pod_was_ended_is_told_while_another_is_made_in_its_place(
    trouble: Reason, phase: str
) -> None:
    failed = a_pod("trainer", name="lost", trouble=Trouble(trouble, "Evicted: too much"))
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
            Reason.QUOTA_EXCEEDED,
        ),
        (
            QUOTA.format("requests.nvidia.com/gpu=16", "requests.nvidia.com/gpu=0"),
            Reason.QUOTA_TOO_SMALL,
        ),
        ("exceeded quota: of an unknown form", Reason.QUOTA_EXCEEDED),
        ("admission webhook denied the request", Reason.APPLY_FAILED),
    ],
)
def test_a_quota_that_is_used_up_differs_from_one_that_is_too_small(
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
    ids=["a refused child", "no KubeRay", "pods that were refused once"],
)
def test_what_can_not_be_put_right_does_not_end_what_serves(trouble: dict[str, Any]) -> None:
    pods = (a_pod("head"), a_pod("trainer", name="0"), a_pod("trainer", name="1"))

    assert ready_reason(pods=pods, **trouble) == Reason.READY
    assert ready_reason(pods=pods[:2], **trouble) != Reason.READY
