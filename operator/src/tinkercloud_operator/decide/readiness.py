"""What holds a session up on its way to Ready: pure.

The steps are findings in order; one that is not reached carries the reason of the one that holds
it up, so that the conditions which are True are always the first ones.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import SESSION_STEPS, ConditionType, Reason
from tinkercloud_operator.decide.deadlines import overdue
from tinkercloud_operator.decide.definitions import KUBERAY_MINIMUM, is_undeclared
from tinkercloud_operator.decide.lifetime import Decision, Wanted
from tinkercloud_operator.decide.node_fit import never_fits, without_kin
from tinkercloud_operator.spec.pinned import changes
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.resolved import Refusal, Shape
from tinkercloud_operator.spec.snapshot import Manifest, Observed


@dataclass(frozen=True, slots=True)
class Finding:
    """What is true of one step."""

    is_reached: bool | None
    """None while it is neither so nor otherwise."""
    reason: Reason
    message: str = ""


def steps_to_ready(
    observed: Observed,
    offered: Shape | Refusal,
    shape: Shape | Refusal,
    decision: Decision | None,
) -> tuple[Finding, dict[ConditionType, Finding]]:
    """Return the finding about Ready, and those about the steps to it.

    Args:
        observed: what was seen.
        offered: what the session would be started with now, or why with nothing.
        shape: what its children follow from, or why there are none.
        decision: what it is to be; None if it is being deleted.
    """
    blocker: Finding | None = None
    steps = {}
    found = [_accepted(observed, offered, shape), *_findings(observed, shape, decision)]
    for kind, finding in zip(SESSION_STEPS, found, strict=True):
        if blocker is None and not finding.is_reached:
            blocker = finding
        steps[kind] = finding if blocker is None else blocker
    return blocker or Finding(is_reached=True, reason=Reason.READY), steps


def _findings(
    observed: Observed, shape: Shape | Refusal, decision: Decision | None
) -> Iterable[Finding]:
    """Yield what there is to say of each step but the first."""
    if observed.deleted is not None:
        yield from [Finding(is_reached=False, reason=Reason.TERMINATING)] * 4
        return
    if decision is not None and decision.wanted is not Wanted.RUNNING:
        reason = Reason.SUSPENDING if observed.has_pods else decision.reason
        stops = Finding(is_reached=False, reason=reason, message=decision.message)
        late = _overdue(observed)
        is_stuck = late is not None and late.reason is Reason.DELETION_STUCK
        yield from [late if late is not None and is_stuck else stops] * 4
        return
    yield _quota(observed, shape)
    yield _provisioned(observed, shape)
    head = observed.head
    if head is None or not head.is_started:
        yield Finding(is_reached=False, reason=Reason.HEAD_STARTING, message="the head is starting")
    else:
        yield Finding(is_reached=True, reason=Reason.HEAD_SERVING)
    waiting = [pod.name for pod in observed.pods if not pod.is_ready and not pod.is_terminating]
    if waiting or head is None:
        message = f"loading the model; pods not ready: {', '.join(sorted(waiting)[:4])}"
        yield Finding(is_reached=False, reason=Reason.LOADING, message=message)
    else:
        yield Finding(is_reached=True, reason=Reason.LOADED)


def _accepted(observed: Observed, offered: Shape | Refusal, shape: Shape | Refusal) -> Finding:
    if isinstance(offered, Shape):
        waiting = changes(shape, offered)
        if not waiting and observed.own_gap is not None:
            reason = Reason.DEFINITIONS_OUTDATED
            return Finding(is_reached=True, reason=reason, message=observed.own_gap)
        if not waiting:
            return Finding(is_reached=True, reason=Reason.ACCEPTED)
        message = (
            "running pods keep the spec they started with; suspend and resume the session to apply:"
            f" {', '.join(waiting)}"
        )
        return Finding(is_reached=True, reason=Reason.CHANGE_WAITS, message=message)
    if observed.ray_cluster is not None:
        message = (
            f"still running, but would not start again with the current spec: {offered.message}"
        )
        return Finding(is_reached=True, reason=offered.reason, message=message)
    return Finding(is_reached=False, reason=offered.reason, message=offered.message)


def _quota(observed: Observed, shape: Shape | Refusal) -> Finding:
    cluster = observed.ray_cluster
    if cluster is None:
        queue = shape.placement.queue_name if isinstance(shape, Shape) else None
    else:
        # Kueue goes by what is there, and may have chosen a queue where none is named.
        queue = cluster["metadata"].get("labels", {}).get(labels.QUEUE_LABEL)
    if observed.is_held_back:
        before = "evicted by Kueue; " if observed.pods else ""
        through = "without a LocalQueue" if queue is None else f"through LocalQueue {queue!r}"
        message = f"{before}waiting for admission by Kueue {through}"
        return Finding(is_reached=False, reason=Reason.QUEUED, message=message)
    if queue is None and cluster is None and observed.turn is not None:
        return Finding(is_reached=False, reason=Reason.QUEUED, message=observed.turn)
    if queue is None:
        return Finding(is_reached=True, reason=Reason.NO_QUEUE)
    if cluster is None:
        message = f"about to be submitted to LocalQueue {queue!r}"
        waits = Finding(is_reached=False, reason=Reason.QUEUED, message=message)
        return _obstacle(observed, shape) or waits
    return Finding(is_reached=True, reason=Reason.ADMITTED)


def _provisioned(observed: Observed, shape: Shape | Refusal) -> Finding:
    problem = (
        _obstacle(observed, shape)
        or _overdue(observed)
        or _pod_trouble(observed, shape)
        or _pods_refused(observed.ray_cluster)
    )
    if problem is not None and _serves(observed, shape):
        message = f"still running, but could not be recreated: {problem.message}"
        return Finding(is_reached=True, reason=problem.reason, message=message)
    if problem is not None:
        return problem
    if observed.has_predecessors:
        message = "waiting for the resources of a deleted session with the same name to be removed"
        return Finding(is_reached=False, reason=Reason.PROVISIONING, message=message)
    wanted = _wanted_pods(observed, shape)
    live = [pod for pod in observed.pods if not pod.is_terminating]
    running = sum(pod.is_scheduled for pod in live)
    if running < wanted or any(not pod.is_scheduled for pod in live):
        message = f"{running} of {wanted} pods are scheduled"
        return Finding(is_reached=False, reason=Reason.PROVISIONING, message=message)
    return Finding(is_reached=True, reason=Reason.PROVISIONED)


def _obstacle(observed: Observed, shape: Shape | Refusal) -> Finding | None:
    """Return why children can't be made at all, if they can't."""
    if not observed.has_kuberay:
        message = "the RayCluster API (ray.io/v1) is not installed; install KubeRay"
        return Finding(is_reached=False, reason=Reason.KUBERAY_MISSING, message=message)
    if observed.kuberay_gap is not None:
        message = observed.kuberay_gap
        return Finding(is_reached=False, reason=Reason.KUBERAY_TOO_OLD, message=message)
    if isinstance(shape, Shape) and shape.devices is not None and not observed.has_device_claims:
        message = (
            "the ResourceClaimTemplate API (resource.k8s.io/v1) is not available, but the BaseModel's"
            " sampler.engines.deviceClassName requires it; upgrade to Kubernetes 1.34 or newer"
        )
        return Finding(is_reached=False, reason=Reason.APPLY_FAILED, message=message)
    if observed.apply_error is not None:
        return _refused(observed.apply_error)
    return None


def _overdue(observed: Observed) -> Finding | None:
    late = overdue(observed)
    if late is None:
        return None
    return Finding(is_reached=False, reason=late.reason, message=late.message)


def _pod_trouble(observed: Observed, shape: Shape | Refusal) -> Finding | None:
    live = sorted(
        (pod for pod in observed.pods if not pod.is_terminating), key=lambda pod: pod.name
    )
    gone = [observed.failed] if observed.failed is not None else []
    for pod in [*live, *gone]:
        if pod.trouble is None:
            continue
        if pod.trouble.reason is Reason.UNSCHEDULABLE:
            return _without_room(observed, shape, pod.name, pod.trouble.message)
        message = f"pod {pod.name}: {pod.trouble.message}"
        return Finding(is_reached=False, reason=pod.trouble.reason, message=message)
    return None


def _without_room(observed: Observed, shape: Shape | Refusal, pod: str, told: str) -> Finding:
    """Return what it means that the scheduler has no node for a pod."""
    missing = None
    if isinstance(shape, Shape) and observed.nodes is not None:
        never = never_fits(shape, observed.nodes)
        if never is not None:
            return Finding(is_reached=False, reason=Reason.NEVER_FITS, message=never)
        missing = without_kin(shape, observed.nodes)
    message = "; ".join(part for part in (f"pod {pod}: {told}", missing) if part is not None)
    return Finding(is_reached=False, reason=Reason.UNSCHEDULABLE, message=message)


_QUOTA = re.compile(r"requested: ([^ ]+), used: ([^ ]+), limited: ([^ ]+)")


def _pods_refused(cluster: Manifest | None) -> Finding | None:
    """Return why KubeRay could not create pods, if it could not."""
    conditions: list[Mapping[str, Any]] = (cluster or {}).get("status", {}).get("conditions", [])
    for condition in conditions:
        message = str(condition.get("message", ""))
        if condition.get("type") != "ReplicaFailure" or condition.get("status") != "True":
            continue
        return _refused(message)
    return None


def _refused(message: str) -> Finding:
    """Return what it means that something was refused: a ResourceQuota may have room for it yet."""
    reason = Reason.APPLY_FAILED
    if is_undeclared(message) and "Kind=RayCluster" in message:
        reason = Reason.KUBERAY_TOO_OLD
        message = f"requires KubeRay {KUBERAY_MINIMUM} or newer, including its CRDs: {message}"
    if "exceeded quota" in message:
        reason = Reason.QUOTA_TOO_SMALL if _never_within(message) else Reason.QUOTA_EXCEEDED
    return Finding(is_reached=False, reason=reason, message=message)


def _never_within(message: str) -> bool:
    """Whether a quota's message says that even an empty quota would be too small."""
    match = _QUOTA.search(message)
    if match is None:
        return False
    requested, _, limited = (
        dict(pair.split("=", 1) for pair in group.split(",") if "=" in pair)
        for group in match.groups()
    )
    return any(
        name in limited and parse_quantity(amount) > parse_quantity(limited[name])
        for name, amount in requested.items()
    )


def _serves(observed: Observed, shape: Shape | Refusal) -> bool:
    """Whether all pods are there, and well."""
    live = [pod for pod in observed.pods if not pod.is_terminating]
    is_well = all(pod.is_ready and pod.trouble is None for pod in live)
    return 0 < len(live) == _wanted_pods(observed, shape) and is_well


def _wanted_pods(observed: Observed, shape: Shape | Refusal) -> int:
    if isinstance(shape, Shape):
        return sum(kind.count for kind in shape.pods)
    return len([pod for pod in observed.pods if not pod.is_terminating])
