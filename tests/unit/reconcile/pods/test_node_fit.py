"""Whether nodes have the capacity for a session's pods, and which nodes are missing."""

from typing import Any

import pytest

from tinkercloud_operator.decide.pods.node_fit import never_fits, no_matching_node
from tinkercloud_operator.spec.observed import Node
from tinkercloud_testing.resources.sessions import (
    GPU_TAINT,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
    a_node,
)

CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
STARTING = {
    "key": "node.cloudprovider.kubernetes.io/uninitialized",
    "value": "true",
    "effect": "NoSchedule",
}


def never_fits_message(node: Node, **placement: Any) -> str | None:
    resolved = a_build(a_base_model(trainer=TRAINERS, placement=placement)).resolved
    return never_fits(resolved, [node])


def missing_message(node: Node, **placement: Any) -> str | None:
    resolved = a_build(a_base_model(trainer=TRAINERS, placement=placement)).resolved
    return no_matching_node(resolved, [node])


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
def test_a_pod_fits_if_a_node_has_the_capacity(node: Node, placement: Json) -> None:
    assert never_fits_message(node, **placement) is None
    assert missing_message(node, **placement) is None


@pytest.mark.parametrize("node", [a_node(gpus=3), a_node(cpu=0.5), a_node(memory=2.0**30)])
def test_a_pod_never_fits_if_no_matching_node_has_the_capacity(node: Node) -> None:
    reason = never_fits_message(node)

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
def test_a_pod_waits_if_no_current_node_matches(node: Node, placement: Json) -> None:
    assert never_fits_message(node, **placement) is None
    missing = missing_message(node, **placement)
    assert missing is not None
    assert "none of the 1 current nodes" in missing


def test_a_large_head_waits_while_gpu_nodes_are_still_to_be_added() -> None:
    # New nodes may be larger.
    assert never_fits_message(a_node(gpus=0, cpu=0.5)) is None


def test_with_karpenter_larger_nodes_may_be_added() -> None:
    small = a_node(gpus=3, labels={"pool": "gpu", "karpenter.sh/nodepool": "default"})

    assert never_fits_message(small) is None


CPU_NODE = a_node(gpus=0)
"""A node for the head, which has no tolerations."""


def test_pods_with_gpus_tolerate_the_taint_of_gpu_nodes() -> None:
    resolved = a_build(a_base_model(trainer=TRAINERS)).resolved
    too_small, large_enough = (a_node(gpus=gpus, taints=(GPU_TAINT,)) for gpus in (3, 4))

    assert no_matching_node(resolved, [CPU_NODE, large_enough]) is None
    assert never_fits(resolved, [CPU_NODE, large_enough]) is None
    assert "no node has the capacity for a trainer pod" in str(
        never_fits(resolved, [CPU_NODE, too_small])
    )


@pytest.mark.parametrize("taint", [{"key": "team"}, {"effect": "NoExecute"}])
def test_no_other_taint_is_tolerated_by_default(taint: Json) -> None:
    resolved = a_build(a_base_model(trainer=TRAINERS)).resolved
    node = a_node(taints=({**GPU_TAINT, **taint},))

    assert "as required by a trainer pod (cpu 1, memory 4Gi, 4 GPUs)" in str(
        no_matching_node(resolved, [CPU_NODE, node])
    )


def test_each_role_is_matched_against_its_own_placement() -> None:
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
RDMA_DEVICES = {RDMA: 2, PAGES: 2.0**30}


def with_extended(node: Node) -> tuple[str | None, str | None]:
    """Return both results for trainers with extended resources on a node."""
    trainer = {**TRAINERS, "extendedResources": EXTENDED}
    resolved = a_build(a_base_model(trainer=trainer)).resolved
    nodes = [CPU_NODE, node]
    return never_fits(resolved, nodes), no_matching_node(resolved, nodes)


@pytest.mark.parametrize(
    "taints",
    [(), (GPU_TAINT,), (GPU_TAINT, {**GPU_TAINT, "key": RDMA}), ({**GPU_TAINT, "key": RDMA},)],
)
def test_a_pod_fits_a_node_with_its_extended_resources(taints: tuple[Json, ...]) -> None:
    assert with_extended(a_node(others=RDMA_DEVICES, taints=taints)) == (None, None)


@pytest.mark.parametrize("fewer", [{RDMA: 1}, {PAGES: 2.0**30 - 2**21}])
def test_a_pod_never_fits_where_nodes_have_fewer_extended_resources(fewer: Json) -> None:
    never, missing = with_extended(a_node(others=RDMA_DEVICES | fewer))

    assert never == (
        "no node has the capacity for a trainer pod (cpu 1, memory 4Gi, 4 GPUs, rdma/hca 2,"
        " hugepages-2Mi 1024Mi): 1 of 2 nodes match the BaseModel's placement and have GPUs and"
        " rdma/hca and hugepages-2Mi, but none of them is large enough"
    )
    assert missing is None


@pytest.mark.parametrize("none", [{RDMA: 0}, {PAGES: 0}])
def test_a_pod_waits_for_nodes_with_its_extended_resources(none: Json) -> None:
    # An autoscaler may grow a pool of such nodes from zero.
    never, missing = with_extended(a_node(others=RDMA_DEVICES | none))

    assert never is None
    assert "none of the 2 current nodes match the BaseModel's placement and have GPUs" in str(
        missing
    )


def test_huge_pages_add_no_toleration() -> None:
    never, missing = with_extended(
        a_node(others=RDMA_DEVICES, taints=({**GPU_TAINT, "key": PAGES},))
    )

    assert never is None
    assert missing is not None
