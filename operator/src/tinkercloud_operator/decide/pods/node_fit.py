"""Whether a pod could run on some node of the cluster if that node were empty.

Autoscalers may add nodes. Existing nodes therefore show what nodes of their kind can hold, and
nothing is concluded about kinds without a node: an autoscaler may grow a GPU pool from zero for a
pending pod.
"""

from collections.abc import Mapping, Sequence

from tinkercloud_crds.pods.placement import NodeRequirement, Placement, Toleration
from tinkercloud_operator.children.pods import GPU_RESOURCE
from tinkercloud_operator.spec.observed import Node
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.resolved import PodRequest, ResolvedSpec

_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes' own taints: a cordoned, starting or lost node may hold pods again later."""
_KARPENTER_LABEL = "karpenter.sh/nodepool"
"""Label of nodes from Karpenter, which creates nodes of the size that a pod needs."""


def never_fits(resolved: ResolvedSpec, nodes: Sequence[Node]) -> str | None:
    """Return why a pod of a session could not run even on an empty node; None if one could.

    Also None if this is unknown: there is no node of the required kind, or GPUs are claimed as
    devices (DRA), which nodes do not count.
    """
    if resolved.devices is not None or any(_KARPENTER_LABEL in node.labels for node in nodes):
        return None
    matching = [(request, _matching_nodes(nodes, request)) for request in resolved.pods]
    if not all(found for _, found in matching):
        return None
    for request, found in matching:
        if any(_has_capacity(node, request) for node in found):
            continue
        return (
            f"no node has the capacity for a {_description(request)}: {len(found)} of {len(nodes)}"
            f" nodes {_node_requirements(request)}, but none of them is large enough"
        )
    return None


def no_matching_node(resolved: ResolvedSpec, nodes: Sequence[Node]) -> str | None:
    """Return which pod of a session matches no current node; None if every pod matches one."""
    for request in resolved.pods:
        if not _matching_nodes(nodes, request):
            return (
                f"none of the {len(nodes)} current nodes {_node_requirements(request)}, as required"
                f" by a {_description(request)}; waiting for a matching node"
            )
    return None


def _description(request: PodRequest) -> str:
    wanted = request.resources
    gpus = ["1 GPU" if request.gpus == 1 else f"{request.gpus} GPUs"] if request.gpus else []
    others = [f"{resource.name} {resource.amount}" for resource in request.extended]
    parts = [f"cpu {wanted.cpu}", f"memory {wanted.memory}", *gpus, *others]
    return f"{request.component} pod ({', '.join(parts)})"


def _node_requirements(request: PodRequest) -> str:
    names = ["GPUs" if name == GPU_RESOURCE else name for name in _devices(request)]
    return f"match the BaseModel's placement{' and have ' if names else ''}{' and '.join(names)}"


def _devices(request: PodRequest) -> dict[str, float]:
    """Return the node-specific resources that a pod requests, keyed as in `Node.devices`."""
    gpus = {GPU_RESOURCE: float(request.gpus)} if request.gpus else {}
    return gpus | {each.name: parse_quantity(each.amount) for each in request.extended}


def _matching_nodes(nodes: Sequence[Node], request: PodRequest) -> list[Node]:
    """Return the nodes that admit such a pod and have its resources, in any amount."""
    wanted, placement = _devices(request), request.placement
    # The admission plugin ExtendedResourceToleration adds these tolerations to pods that request
    # extended resources, including GPUs. Whether it is enabled is not visible; assuming that it is
    # can only miss a pod that never fits.
    added = [
        Toleration(key=name, operator="Exists", effect="NoSchedule")
        for name in wanted
        if "/" in name
    ]
    return [
        node
        for node in nodes
        if _admits(node, placement, [*placement.tolerations, *added])
        and all(node.devices.get(name) for name in wanted)
    ]


def _has_capacity(node: Node, request: PodRequest) -> bool:
    return (
        parse_quantity(request.resources.cpu) <= node.cpu
        and parse_quantity(request.resources.memory) <= node.memory
        and all(amount <= node.devices.get(name, 0) for name, amount in _devices(request).items())
    )


def _admits(node: Node, placement: Placement, tolerations: Sequence[Toleration]) -> bool:
    return (
        all(node.labels.get(key) == value for key, value in placement.node_selector.items())
        and all(_meets(node, requirement) for requirement in placement.node_affinity)
        and all(
            any(_tolerates(toleration, taint) for toleration in tolerations)
            for taint in node.taints
            if taint.get("effect") in {"NoSchedule", "NoExecute"}
            and not taint.get("key", "").startswith(_PASSING_TAINTS)
        )
    )


def _meets(node: Node, requirement: NodeRequirement) -> bool:
    value = node.labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None


def _tolerates(toleration: Toleration, taint: Mapping[str, str]) -> bool:
    is_key = toleration.key is None or toleration.key == taint.get("key")
    is_effect = toleration.effect is None or toleration.effect == taint.get("effect")
    is_value = toleration.operator == "Exists" or (toleration.value or "") == taint.get("value", "")
    return is_key and is_effect and is_value
