"""The order in which sessions that compete for devices get their pods. Pure.

Without an order, two sessions could each get half of the GPUs and wait forever for the other half.
Therefore at most one of the competing sessions has unscheduled pods at a time. Its pods claim
whatever becomes free, so smaller sessions cannot overtake it, and autoscalers add nodes for it.
Next is the oldest session of the owner who has the fewest, as in pools (`turns.in_turn`). Sessions
that Kueue or another scheduler places are left to those.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from pydantic import ValidationError

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_crds.pods.placement import RolePlacement
from tinkercloud_crds.pods.shapes import SamplerShape, TrainerShape
from tinkercloud_crds.training_session import SERVING_ROLES, TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.children.pods import GPU_RESOURCE
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.read.session_facts import age
from tinkercloud_operator.decide.tenancy.turns import in_turn
from tinkercloud_operator.spec.observed import ChildKey

_PLACED = {
    ConditionType.ACCEPTED: "False",
    ConditionType.CLUSTER_PROVISIONED: "True",
    ConditionType.STALLED: "True",
    ConditionType.SUSPENDED: "True",
}
"""Conditions, with their status, of sessions that are not waiting for nodes."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The devices that the pods of one role take from nodes with certain labels."""

    devices: frozenset[str]
    node_selector: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Claim:
    """The devices that a session competes for."""

    priority: str | None
    """Its PriorityClass; between sessions with different ones, Kubernetes preempts."""
    demands: tuple[Demand, ...]


def claim(spec: TrainingSessionSpec, base_model: BaseModelSpec) -> Claim | None:
    """Return what a session competes for.

    None if it is ordered elsewhere, needs no devices, or has no pods of its own.
    """
    placement = base_model.placement
    if spec.sharing == "Shared" or spec.pool_cluster is not None:
        return None
    if spec.queue_name or placement.queue_name or placement.scheduler_name:
        return None
    trainer, sampler = base_model.trainer, base_model.sampler
    roles: list[tuple[TrainerShape | SamplerShape, RolePlacement | None]] = []
    if spec.role != "Sampler" and trainer.replicas:
        roles.append((trainer, trainer.placement))
    if sampler.backend == "sglang":
        is_inside = sampler.colocated and bool(roles)
        roles.append((sampler, trainer.placement if is_inside else sampler.placement))
    demands = tuple(
        Demand(devices, placement.of_role(role).node_selector)
        for worker, role in roles
        if (devices := _devices(worker))
    )
    if not demands:
        return None
    return Claim(spec.priority_class_name or placement.priority_class_name, demands)


def _devices(worker: TrainerShape | SamplerShape) -> frozenset[str]:
    gpus = [GPU_RESOURCE] if worker.gpus_per_replica else []
    return frozenset([*gpus, *(resource.name for resource in worker.extended_resources)])


def compete(one: Claim, other: Claim) -> bool:
    """Return whether two sessions may need the same devices and neither preempts the other."""
    return one.priority == other.priority and any(
        here.devices & there.devices and _may_be_same(here.node_selector, there.node_selector)
        for here in one.demands
        for there in other.demands
    )


def _may_be_same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether one node could have both sets of labels."""
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def may_have_pods(session: Manifest) -> bool:
    """Return whether a session may have pods: it is neither suspended by its owner nor deleted."""
    return "deletionTimestamp" not in session["metadata"] and not session["spec"].get("suspend")


def waits_for_nodes(session: Manifest) -> bool:
    """Return whether a session has or will have unscheduled pods, according to its last status."""
    status = session.get("status", {})
    if not may_have_pods(session):
        return False
    if status.get("finishedTime") is not None:
        return False
    conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if conditions.get(ConditionType.SUSPENDED) == "Unknown":
        return False
    reasons = {each["type"]: each.get("reason") for each in status.get("conditions", [])}
    if reasons.get(ConditionType.QUOTA_RESERVED) == Reason.QUOTA_EXCEEDED:
        return False
    is_suspended_by_kueue = conditions.get(ConditionType.QUOTA_RESERVED) == "False"
    if is_suspended_by_kueue and status.get("rayCluster") is not None:
        return False
    return all(conditions.get(kind) != placed for kind, placed in _PLACED.items())


def owner_of(session: Manifest) -> str:
    """Return whose turn a session takes; a pool cluster or a spare takes its own."""
    spec = session["spec"]
    is_serving = spec.get("role") in SERVING_ROLES
    return str(session["metadata"]["name"] if is_serving else spec.get("owner", ""))


def waiting_message(session: Manifest, ahead: list[Manifest]) -> str:
    """Return the message of a session that waits for others.

    Sessions of other owners are only counted: their names and messages are not for this owner.

    Args:
        session: the session.
        ahead: those that it waits for, in their order.
    """
    first, number = ahead[0], len(ahead)
    are = "1 session is" if number == 1 else f"{number} sessions are"
    message = f"waiting for other sessions to be scheduled: {are} ahead"
    if owner_of(first) != owner_of(session):
        return message
    why = str(first.get("status", {}).get("message", "")).strip()
    return (
        f"{message}; TrainingSession {first['metadata']['name']} is next, but not all of its pods"
        " are scheduled yet" + (f": {why}" if why else "")
    )


def has_nodes(session: Manifest, children: Mapping[ChildKey, Manifest]) -> bool:
    """Return whether all pods of a session are scheduled, before its status reports it."""
    metadata = session["metadata"]
    cluster = children.get(ChildKey("RayCluster", metadata["name"]))
    if cluster is None or not _owns(metadata, cluster):
        return False
    groups = cluster["spec"].get("workerGroupSpecs", [])
    wanted = 1 + sum(group.get("replicas", 0) * group.get("numOfHosts", 1) for group in groups)
    placed = [
        child
        for key, child in children.items()
        if key.kind == "Pod" and _owns(cluster["metadata"], child) and "nodeName" in child["spec"]
    ]
    return len(placed) >= int(wanted)


def _owns(owner: Manifest, child: Manifest) -> bool:
    """Return whether an object that is not being deleted belongs to the given owner."""
    metadata = child["metadata"]
    references = metadata.get("ownerReferences", [])
    is_owned = any(each["uid"] == owner.get("uid") for each in references)
    return is_owned and "deletionTimestamp" not in metadata


def in_start_order(
    waiting: Iterable[Manifest], holding: Iterable[Manifest], admitted: Set[str]
) -> Iterator[Manifest]:
    """Yield the sessions that wait for devices: those that may start, then by turn.

    The order is the same for all sessions, whichever compete, so there is always one that waits for
    no other.

    Args:
        waiting: sessions without nodes that need devices.
        holding: sessions with a RayCluster that need devices.
        admitted: names of the sessions that may start.
    """
    listed = sorted(waiting, key=age)
    queued = [each for each in listed if each["metadata"]["name"] not in admitted]
    started = [each for each in listed if each["metadata"]["name"] in admitted]
    names = {each["metadata"]["name"] for each in started}
    held = Counter(map(owner_of, started))
    held.update(owner_of(each) for each in holding if each["metadata"]["name"] not in names)
    yield from started
    yield from in_turn(queued, owner_of, held)


def claim_of(spec: Manifest, offering: Manifest | None) -> Claim | None:
    """Return what a session competes for, given its spec and its BaseModel as in YAML.

    None if nothing is ordered, or if one of them can't be read.
    """
    try:
        session = TrainingSessionSpec.model_validate(spec)
    except ValidationError:
        return None
    base_model = parsing.base_model(offering) if offering is not None else None
    return claim(session, base_model) if base_model is not None else None
