"""The order in which sessions that compete for devices get their pods: pure.

Without it, two sessions could each get half of the GPUs there are, and wait for the other half for
ever. So at most one of those that compete has pods without nodes: the oldest. What becomes free is
kept by its pods, so that smaller sessions don't overtake it; and since it has pods, nodes that are
made on demand are made for it. Who is admitted by Kueue, or placed by another scheduler, is left to
those.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType
from tinkercloud_crds.placement import RolePlacement
from tinkercloud_crds.shapes import SamplerShape, TrainerShape
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.children.pods import GPU_RESOURCE
from tinkercloud_operator.observed import Manifest

_PLACED = {
    ConditionType.ACCEPTED: "False",
    ConditionType.CLUSTER_PROVISIONED: "True",
    ConditionType.STALLED: "True",
    ConditionType.SUSPENDED: "True",
}
"""Conditions, with their status, of sessions that don't wait for nodes now."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices that one role's pods take of nodes with certain labels."""

    devices: frozenset[str]
    node_selector: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a session competes for."""

    priority: str | None
    """Its PriorityClass: of sessions with different ones, Kubernetes preempts the lower."""
    demands: tuple[Demand, ...]


def claim(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> Claim | None:
    """Return what a session competes for; None if others decide, or if it takes no devices."""
    placement = base_model.placement
    if spec.queue_name or placement.queue_name or placement.scheduler_name:
        return None
    trainer, sampler = base_model.trainer, base_model.sampler
    roles: list[tuple[TrainerShape | SamplerShape, RolePlacement | None]] = []
    if spec.role == "Trainer" and trainer.replicas:
        roles.append((trainer, trainer.placement))
    if sampler.backend == "sglang":
        is_inside = sampler.colocated and bool(roles)
        roles.append((sampler, trainer.placement if is_inside else sampler.placement))
    demands = tuple(
        Demand(devices, placement.of_role(role).node_selector)
        for shape, role in roles
        if (devices := _devices(shape))
    )
    if not demands:
        return None
    return Claim(spec.priority_class_name or placement.priority_class_name, demands)


def _devices(shape: TrainerShape | SamplerShape) -> frozenset[str]:
    gpus = [GPU_RESOURCE] if shape.gpus_per_replica else []
    return frozenset([*gpus, *(resource.name for resource in shape.extended_resources)])


def compete(one: Claim, other: Claim) -> bool:
    """Whether two sessions may want the same devices, and neither preempts the other."""
    return one.priority == other.priority and any(
        here.devices & there.devices and _may_be_same(here.node_selector, there.node_selector)
        for here in one.demands
        for there in other.demands
    )


def _may_be_same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether a node may have both sets of labels."""
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def waits_for_nodes(session: Manifest) -> bool:
    """Whether a session has, or is to have, pods that are without nodes, by its last status."""
    status = session.get("status", {})
    if "deletionTimestamp" in session["metadata"] or session["spec"].get("suspend"):
        return False
    if status.get("finishedTime") is not None:
        return False
    conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if conditions.get(ConditionType.SUSPENDED) == "Unknown":
        return False
    is_held_back = conditions.get(ConditionType.QUOTA_RESERVED) == "False"
    if is_held_back and status.get("rayCluster") is not None:
        return False
    return all(conditions.get(kind) != placed for kind, placed in _PLACED.items())


def turn_message(ahead: list[Manifest]) -> str:
    """Return why a session waits for these, oldest first."""
    first = ahead[0]
    why = str(first.get("status", {}).get("message", "")).strip()
    others = f" ({len(ahead)} sessions are ahead)" if len(ahead) > 1 else ""
    return (
        f"waits for its turn{others}: TrainingSession {first['metadata']['name']} came first, and"
        " does not have all of its nodes yet" + (f": {why}" if why else "")
    )
