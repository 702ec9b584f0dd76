"""Whether a pod could ever run: on some node of the cluster, if it were empty.

Nodes may be made on demand. So a node tells what those of its kind can hold, and nothing is said of
kinds of which there is none: a pool of GPU nodes that shrinks to nothing is made again for a pod
that waits.
"""

from collections.abc import Mapping, Sequence

from tinkercloud_crds.placement import NodeRequirement, Placement, Toleration
from tinkercloud_operator.children.pods import GPU_RESOURCE
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.resolved import PodRequest, ResolvedSpec
from tinkercloud_operator.spec.snapshot import Node

_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes' own: a node that is cordoned, starting or lost will hold pods again."""
_KARPENTER_LABEL = "karpenter.sh/nodepool"
"""Label of nodes that Karpenter makes, of whatever size a pod needs."""


def never_fits(resolved: ResolvedSpec, nodes: Sequence[Node]) -> str | None:
    """Return why a pod of a session could not run on any node even if all were empty; or None.

    None also where that can't be told: nodes of a kind that a pod wants are not there, or not
    known, since nodes don't count GPUs that are claimed as devices.
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
    """Return which pod of a session wants nodes of a kind of which there is none now; or None."""
    for request in resolved.pods:
        if not _matching_nodes(nodes, request):
            return (
                f"none of the {len(nodes)} current nodes {_node_requirements(request)}, as required by"
                f" a {_description(request)}; waiting for a node"
            )
    return None


def _description(request: PodRequest) -> str:
    wanted = request.resources
    gpus = [f"{request.gpus} GPUs"] if request.gpus else []
    others = [f"{resource.name} {resource.amount}" for resource in request.extended]
    parts = [f"cpu {wanted.cpu}", f"memory {wanted.memory}", *gpus, *others]
    return f"{request.component} pod ({', '.join(parts)})"


def _node_requirements(request: PodRequest) -> str:
    names = ["GPUs" if name == GPU_RESOURCE else name for name in _devices(request)]
    return f"match the BaseModel's placement{' and have ' if names else ''}{' and '.join(names)}"


def _devices(request: PodRequest) -> dict[str, float]:
    """Return what a pod asks for that only some nodes have, as `Node.devices` counts it."""
    gpus = {GPU_RESOURCE: float(request.gpus)} if request.gpus else {}
    return gpus | {each.name: parse_quantity(each.amount) for each in request.extended}


def _matching_nodes(nodes: Sequence[Node], request: PodRequest) -> list[Node]:
    """Return the nodes that take such a pod, and have what it asks for, however much."""
    wanted, placement = _devices(request), request.placement
    # What the admission plugin ExtendedResourceToleration adds to pods that ask for extended
    # resources, GPUs among them. Whether it is on can't be seen; where it is not, such a pod is not
    # said never to fit.
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
