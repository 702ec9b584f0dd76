"""Whether nodes could ever hold a session's pods, and what is not there for them now."""

from typing import Any

import pytest

from tinkercloud_operator.decide.node_fit import never_fits, no_matching_node
from tinkercloud_operator.spec.snapshot import Node
from tinkercloud_testing.sessions import GPU_TAINT, TRAINERS, Json, a_base_model, a_build, a_node

CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
STARTING = {
    "key": "node.cloudprovider.kubernetes.io/uninitialized",
    "value": "true",
    "effect": "NoSchedule",
}


def why_never(node: Node, **placement: Any) -> str | None:
    shape = a_build(a_base_model(trainer=TRAINERS, placement=placement)).resolved
    return never_fits(shape, [node])


def what_is_missing(node: Node, **placement: Any) -> str | None:
    shape = a_build(a_base_model(trainer=TRAINERS, placement=placement)).resolved
    return no_matching_node(shape, [node])


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
        (a_node(taints=(GPU_TAINT,)), {"tolerations": [{"operator": "Exists"}]}),
        (
            a_node(taints=(GPU_TAINT,)),
            {"tolerations": [{"key": "nvidia.com/gpu", "value": "present"}]},
        ),
        (a_node(taints=({**GPU_TAINT, "effect": "PreferNoSchedule"},)), {}),
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
    assert "no node has the capacity for" in reason


@pytest.mark.parametrize(
    ("node", "placement"),
    [
        (a_node(gpus=0), {}),
        (a_node(cpu=0.5), {"nodeSelector": {"pool": "cpu"}}),
        (a_node(), {"nodeAffinity": [{**REQUIREMENT, "operator": "NotIn"}]}),
        (a_node(), {"nodeAffinity": [{"key": "pool", "operator": "DoesNotExist"}]}),
        (a_node(), {"nodeAffinity": [{"key": "zone", "operator": "Exists"}]}),
        (a_node(taints=({**GPU_TAINT, "key": "team"},)), {}),
        (a_node(taints=(GPU_TAINT,)), {"tolerations": [{"key": "nvidia.com/gpu", "value": "x"}]}),
        (
            a_node(taints=({**GPU_TAINT, "key": "team"},)),
            {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]},
        ),
    ],
)
def test_a_pod_waits_for_nodes_of_a_kind_that_is_not_there_now(node: Node, placement: Json) -> None:
    assert why_never(node, **placement) is None
    missing = what_is_missing(node, **placement)
    assert missing is not None
    assert "none of the 1 current nodes" in missing


def test_a_head_too_large_for_the_nodes_there_are_waits_too_while_gpu_nodes_are_to_come() -> None:
    # They may be larger.
    assert why_never(a_node(gpus=0, cpu=0.5)) is None


def test_nodes_of_other_sizes_may_come_where_karpenter_makes_them() -> None:
    small = a_node(gpus=3, labels={"pool": "gpu", "karpenter.sh/nodepool": "default"})

    assert why_never(small) is None


BESIDE_GPUS = a_node(gpus=0)
"""Where a head, which tolerates nothing, can be."""


def test_kubernetes_lets_pods_that_ask_for_gpus_on_nodes_that_keep_others_off() -> None:
    shape = a_build(a_base_model(trainer=TRAINERS)).resolved
    too_small, large_enough = (a_node(gpus=gpus, taints=(GPU_TAINT,)) for gpus in (3, 4))

    assert no_matching_node(shape, [BESIDE_GPUS, large_enough]) is None
    assert never_fits(shape, [BESIDE_GPUS, large_enough]) is None
    assert "no node has the capacity for a trainer pod" in str(
        never_fits(shape, [BESIDE_GPUS, too_small])
    )


@pytest.mark.parametrize("taint", [{"key": "team"}, {"effect": "NoExecute"}])
def test_kubernetes_adds_no_other_toleration(taint: Json) -> None:
    shape = a_build(a_base_model(trainer=TRAINERS)).resolved
    node = a_node(taints=({**GPU_TAINT, **taint},))

    assert "as required by a trainer pod (cpu 1, memory 4Gi, 4 GPUs)" in str(
        no_matching_node(shape, [BESIDE_GPUS, node])
    )


def test_each_role_is_looked_for_among_the_nodes_that_it_may_run_on() -> None:
    cpus = a_node(gpus=0, labels={"pool": "cpu"})
    elsewhere: Json = {"placement": {"nodeSelector": {"pool": "cpu"}}}
    pool = {"nodeSelector": {"pool": "gpu"}}

    def why(head: Json) -> str | None:
        model = a_base_model(trainer=TRAINERS, placement=pool, head={"image": "w", **head})
        return no_matching_node(a_build(model).resolved, [cpus, a_node(taints=(GPU_TAINT,))])

    assert "head pod" in str(why({}))
    assert why(elsewhere) is None


RDMA = "rdma/hca"
PAGES = "hugepages-2Mi"
EXTENDED = [{"name": RDMA, "count": 2}, {"name": PAGES, "count": 512}]
OF_RDMA = {RDMA: 2, PAGES: 2.0**30}


def with_extended(node: Node) -> tuple[str | None, str | None]:
    """Return why trainers with extended resources never fit a cluster, and what is missing."""
    trainer = {**TRAINERS, "extendedResources": EXTENDED}
    shape = a_build(a_base_model(trainer=trainer)).resolved
    nodes = [BESIDE_GPUS, node]
    return never_fits(shape, nodes), no_matching_node(shape, nodes)


@pytest.mark.parametrize(
    "taints",
    [(), (GPU_TAINT,), (GPU_TAINT, {**GPU_TAINT, "key": RDMA}), ({**GPU_TAINT, "key": RDMA},)],
)
def test_a_pod_fits_where_its_extended_resources_are(taints: tuple[Json, ...]) -> None:
    assert with_extended(a_node(others=OF_RDMA, taints=taints)) == (None, None)


@pytest.mark.parametrize("fewer", [{RDMA: 1}, {PAGES: 2.0**30 - 2**21}])
def test_a_pod_never_fits_where_nodes_have_fewer_extended_resources(fewer: Json) -> None:
    never, missing = with_extended(a_node(others=OF_RDMA | fewer))

    assert never == (
        "no node has the capacity for a trainer pod (cpu 1, memory 4Gi, 4 GPUs, rdma/hca 2,"
        " hugepages-2Mi 1024Mi): 1 of 2 nodes match the BaseModel's placement and have GPUs and"
        " rdma/hca and hugepages-2Mi, but none of them is large enough"
    )
    assert missing is None


@pytest.mark.parametrize("none", [{RDMA: 0}, {PAGES: 0}])
def test_a_pod_waits_for_nodes_with_its_extended_resources(none: Json) -> None:
    # A pool of such nodes that has shrunk to nothing may be made again.
    never, missing = with_extended(a_node(others=OF_RDMA | none))

    assert never is None
    assert "none of the 2 current nodes match the BaseModel's placement and have GPUs" in str(
        missing
    )


def test_kubernetes_tolerates_no_taint_of_huge_pages() -> None:
    never, missing = with_extended(a_node(others=OF_RDMA, taints=({**GPU_TAINT, "key": PAGES},)))

    assert never is None
    assert missing is not None
