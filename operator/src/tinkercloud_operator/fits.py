"""Whether a pod could ever run: on some node of the cluster, if it were empty."""

from collections.abc import Mapping, Sequence

from tinkercloud_crds.shapes import NodeRequirement, Placement, Toleration
from tinkercloud_operator.observed import Node
from tinkercloud_operator.quantities import parse_quantity
from tinkercloud_operator.shape import PodRequest, Shape

_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes' own: a node that is cordoned, starting or lost will hold pods again."""


def never_fits(shape: Shape, nodes: Sequence[Node]) -> str | None:
    """Return why a pod of a session could not run on any node even if all were empty; or None."""
    allowed = [node for node in nodes if _admits(node, shape.placement)]
    for request in shape.pods:
        if any(_holds(node, request) for node in allowed):
            continue
        wanted = request.resources
        gpus = f", {request.gpus} GPUs" if request.gpus else ""
        return (
            f"no node could ever hold a {request.component} pod (cpu {wanted.cpu}, memory"
            f" {wanted.memory}{gpus}): {len(allowed)} of {len(nodes)} nodes match the BaseModel's"
            " placement, and none of those is large enough"
        )
    return None


def _holds(node: Node, request: PodRequest) -> bool:
    return (
        parse_quantity(request.resources.cpu) <= node.cpu
        and parse_quantity(request.resources.memory) <= node.memory
        and request.gpus <= node.gpus
    )


def _admits(node: Node, placement: Placement) -> bool:
    return (
        all(node.labels.get(key) == value for key, value in placement.node_selector.items())
        and all(_meets(node, requirement) for requirement in placement.node_affinity)
        and all(
            any(_tolerates(toleration, taint) for toleration in placement.tolerations)
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
