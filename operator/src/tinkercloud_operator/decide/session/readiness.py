"""The steps of a session on its way to Ready, and what blocks each of them: pure.

The steps are ordered. A step that is not reached carries the reason of the first one that blocks,
so the conditions that are True always come first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import SESSION_STEPS, ConditionType, Reason, timestamp
from tinkercloud_crds.served_schemas import KUBERAY_MINIMUM
from tinkercloud_kube.errors import is_undeclared
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pods.deadlines import awaited_head, awaited_until, overdue
from tinkercloud_operator.decide.pods.node_fit import never_fits, no_matching_node
from tinkercloud_operator.decide.read.quota_messages import never_within
from tinkercloud_operator.decide.session.lifetime import Decision, DesiredState
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_operator.spec.pinned import pending_changes
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The status of one step."""

    is_reached: bool | None
    """None while it is undecided (condition status Unknown)."""
    reason: Reason
    message: str = ""


def readiness(
    observed: Observed,
    desired: ResolvedSpec | Rejection,
    effective: ResolvedSpec | Rejection,
    decision: Decision | None,
) -> tuple[StepStatus, dict[ConditionType, StepStatus]]:
    """Return the status of Ready and of the steps that lead to it.

    Args:
        observed: the observed session.
        desired: what the session would start with now, or why it may not start.
        effective: the spec that its children follow, or why there are none.
        decision: the desired state; None if the session is being deleted.
    """
    later = _later_steps(observed, effective, decision)
    return ready_after([_accepted(observed, desired, effective), *later])


def ready_after(found: Sequence[StepStatus]) -> tuple[StepStatus, dict[ConditionType, StepStatus]]:
    """Return the status of Ready, and of the steps, each of which is blocked by those before it.

    Args:
        found: the status of each of `SESSION_STEPS`, regardless of the others.
    """
    blocker: StepStatus | None = None
    steps = {}
    for kind, step in zip(SESSION_STEPS, found, strict=True):
        if blocker is None and not step.is_reached:
            blocker = step
        steps[kind] = step if blocker is None else blocker
    return blocker or StepStatus(is_reached=True, reason=Reason.READY), steps


def _later_steps(
    observed: Observed, effective: ResolvedSpec | Rejection, decision: Decision | None
) -> Iterable[StepStatus]:
    """Yield the status of each step after the first one."""
    if observed.session.deleted is not None:
        failure = observed.failed_save
        why = f"the last checkpoint could not be saved: {failure.message}" if failure else ""
        ends = StepStatus(is_reached=False, reason=Reason.TERMINATING, message=why)
        yield from [ends] * 4
        return
    if decision is not None and decision.desired is not DesiredState.RUNNING:
        reason = Reason.SUSPENDING if observed.has_pods else decision.reason
        stops = _unsaved(observed, decision) or StepStatus(
            is_reached=False, reason=reason, message=decision.message
        )
        late = _overdue(observed)
        is_stuck = late is not None and late.reason is Reason.DELETION_STUCK
        yield from [late if late is not None and is_stuck else stops] * 4
        return
    yield _quota(observed, effective)
    yield _provisioned(observed, effective)
    head = observed.head
    if head is None or not head.is_started:
        yield StepStatus(
            is_reached=False, reason=Reason.HEAD_STARTING, message="the head is starting"
        )
    else:
        yield StepStatus(is_reached=True, reason=Reason.HEAD_SERVING)
    waiting = [pod.name for pod in observed.pods.live if not pod.is_ready]
    if waiting or head is None:
        message = f"loading the model; pods not ready: {', '.join(sorted(waiting)[:4])}"
        yield StepStatus(is_reached=False, reason=Reason.LOADING, message=message)
    else:
        yield StepStatus(is_reached=True, reason=Reason.LOADED)


def _unsaved(observed: Observed, decision: Decision) -> StepStatus | None:
    """Return the status of a session that stops and could not be saved, if that is so."""
    failure = observed.failed_save
    if failure is None or observed.ray_cluster is None:
        return None
    if "deletionTimestamp" in observed.ray_cluster["metadata"]:
        return None
    kept = "the pods are kept" if decision.urgent_since is None else "the pods are kept for a while"
    message = f"the state could not be saved, so {kept} and the save is repeated: {failure.message}"
    return StepStatus(is_reached=False, reason=Reason.SAVE_FAILED, message=message)


def _accepted(
    observed: Observed, desired: ResolvedSpec | Rejection, effective: ResolvedSpec | Rejection
) -> StepStatus:
    if isinstance(desired, ResolvedSpec):
        waiting = pending_changes(effective, desired)
        if not waiting and observed.platform.own_gap is not None:
            reason = Reason.DEFINITIONS_OUTDATED
            return StepStatus(is_reached=True, reason=reason, message=observed.platform.own_gap)
        if not waiting:
            return StepStatus(is_reached=True, reason=Reason.ACCEPTED)
        message = (
            "the running pods use an earlier spec; suspend and resume the session to apply the"
            f" changes: {', '.join(waiting)}"
        )
        return StepStatus(is_reached=True, reason=Reason.CHANGE_WAITS, message=message)
    if observed.ray_cluster is not None:
        message = (
            f"the session is running, but could not be restarted with the current spec:"
            f" {desired.message}"
        )
        return StepStatus(is_reached=True, reason=desired.reason, message=message)
    return StepStatus(is_reached=False, reason=desired.reason, message=desired.message)


def _quota(observed: Observed, effective: ResolvedSpec | Rejection) -> StepStatus:
    cluster = observed.ray_cluster
    if cluster is None:
        queue = effective.placement.queue_name if isinstance(effective, ResolvedSpec) else None
    else:
        # Kueue reads the label of the live object, and may have set a default queue.
        queue = cluster["metadata"].get("labels", {}).get(labels.QUEUE_LABEL)
    if observed.is_suspended_by_kueue:
        before = "evicted by Kueue; " if observed.pods.required else ""
        through = "without a LocalQueue" if queue is None else f"through LocalQueue {queue!r}"
        message = f"{before}waiting for Kueue to admit the session {through}"
        return StepStatus(is_reached=False, reason=Reason.QUEUED, message=message)
    if cluster is None and observed.limits.quota_message is not None:
        return StepStatus(
            is_reached=False, reason=Reason.QUOTA_EXCEEDED, message=observed.limits.quota_message
        )
    if queue is None and cluster is None and observed.limits.start_order_message is not None:
        return StepStatus(
            is_reached=False, reason=Reason.QUEUED, message=observed.limits.start_order_message
        )
    if queue is None:
        return StepStatus(is_reached=True, reason=Reason.NO_QUEUE)
    if cluster is None:
        message = f"the session is being submitted to LocalQueue {queue!r}"
        waits = StepStatus(is_reached=False, reason=Reason.QUEUED, message=message)
        return _blocker(observed, effective) or _head_ends(observed) or waits
    return StepStatus(is_reached=True, reason=Reason.ADMITTED)


def _provisioned(observed: Observed, effective: ResolvedSpec | Rejection) -> StepStatus:
    problem = (
        _blocker(observed, effective)
        or _overdue(observed)
        or _head_ends(observed)
        or _pod_trouble(observed, effective)
        or _pods_rejected(observed.ray_cluster)
    )
    if problem is not None and _is_serving(observed, effective):
        message = f"the session is running, but its pods could not be recreated: {problem.message}"
        return StepStatus(is_reached=True, reason=problem.reason, message=message)
    if problem is not None:
        return problem
    if observed.children.predecessors:
        message = "waiting for the deletion of the objects of an earlier session with the same name"
        return StepStatus(is_reached=False, reason=Reason.PROVISIONING, message=message)
    wanted = _wanted_pods(observed, effective)
    live = observed.pods.live
    running = sum(pod.is_scheduled for pod in live)
    if running < wanted or any(not pod.is_scheduled for pod in live):
        message = f"{running} of {wanted} pods are scheduled"
        return StepStatus(is_reached=False, reason=Reason.PROVISIONING, message=message)
    return StepStatus(is_reached=True, reason=Reason.PROVISIONED)


def _blocker(observed: Observed, effective: ResolvedSpec | Rejection) -> StepStatus | None:
    """Return what prevents the operator from creating the children, if anything does."""
    if not observed.platform.has_kuberay:
        message = "the RayCluster API (ray.io/v1) is not installed; install KubeRay"
        return StepStatus(is_reached=False, reason=Reason.KUBERAY_MISSING, message=message)
    if observed.platform.kuberay_gap is not None:
        message = observed.platform.kuberay_gap
        return StepStatus(is_reached=False, reason=Reason.KUBERAY_TOO_OLD, message=message)
    if (
        isinstance(effective, ResolvedSpec)
        and effective.devices is not None
        and not observed.platform.has_device_claims
    ):
        message = (
            "the ResourceClaimTemplate API (resource.k8s.io/v1) is not available, but the"
            " BaseModel's sampler.engines.deviceClassName requires it; upgrade to Kubernetes 1.34"
            " or newer"
        )
        return StepStatus(is_reached=False, reason=Reason.APPLY_FAILED, message=message)
    if observed.answers.apply_error is not None:
        return _rejected(observed.answers.apply_error)
    return None


def _overdue(observed: Observed) -> StepStatus | None:
    late = overdue(observed)
    if late is None:
        return None
    return StepStatus(is_reached=False, reason=late.reason, message=late.message)


def _head_ends(observed: Observed) -> StepStatus | None:
    """Return the status of a session that waits for the head of an earlier RayCluster."""
    head = awaited_head(observed)
    if head is None:
        return None
    message = (
        f"the RayCluster is gone, but its head {head.name} is still running and may be saving its"
        " state; the session gets new pods when the head has ended"
    )
    until = awaited_until(head)
    if until is not None:
        message += f", at the latest at {timestamp(until)}"
    return StepStatus(is_reached=False, reason=Reason.HEAD_TERMINATING, message=message)


def _pod_trouble(observed: Observed, effective: ResolvedSpec | Rejection) -> StepStatus | None:
    live = sorted(observed.pods.live, key=lambda pod: pod.name)
    gone = [observed.pods.failed] if observed.pods.failed is not None else []
    for pod in [*live, *gone]:
        if pod.problem is None:
            continue
        if pod.problem.reason is Reason.UNSCHEDULABLE:
            return _unschedulable(observed, effective, pod.name, pod.problem.message)
        message = f"pod {pod.name}: {pod.problem.message}"
        return StepStatus(is_reached=False, reason=pod.problem.reason, message=message)
    return None


def _unschedulable(
    observed: Observed, effective: ResolvedSpec | Rejection, pod: str, scheduler_message: str
) -> StepStatus:
    """Return the status for a pod that the scheduler finds no node for."""
    missing = None
    if isinstance(effective, ResolvedSpec) and observed.platform.nodes is not None:
        never = never_fits(effective, observed.platform.nodes)
        if never is not None:
            return StepStatus(is_reached=False, reason=Reason.NEVER_FITS, message=never)
        missing = no_matching_node(effective, observed.platform.nodes)
    message = "; ".join(
        part for part in (f"pod {pod}: {scheduler_message}", missing) if part is not None
    )
    return StepStatus(is_reached=False, reason=Reason.UNSCHEDULABLE, message=message)


def _pods_rejected(cluster: Manifest | None) -> StepStatus | None:
    """Return why KubeRay could not create pods, if it could not."""
    conditions: list[Mapping[str, Any]] = (cluster or {}).get("status", {}).get("conditions", [])
    for condition in conditions:
        message = str(condition.get("message", ""))
        if condition.get("type") != "ReplicaFailure" or condition.get("status") != "True":
            continue
        return _rejected(message)
    return None


def _rejected(message: str) -> StepStatus:
    """Return the status for a rejected request; a ResourceQuota may have room for it later."""
    reason = Reason.APPLY_FAILED
    if is_undeclared(message) and "Kind=RayCluster" in message:
        reason = Reason.KUBERAY_TOO_OLD
        message = f"requires KubeRay {KUBERAY_MINIMUM} or newer, including its CRDs: {message}"
    if "exceeded quota" in message:
        is_too_small = never_within(message)
        reason = Reason.QUOTA_TOO_SMALL if is_too_small else Reason.NAMESPACE_QUOTA_EXCEEDED
    return StepStatus(is_reached=False, reason=reason, message=message)


def _is_serving(observed: Observed, effective: ResolvedSpec | Rejection) -> bool:
    """Return whether all pods exist and are healthy."""
    live = observed.pods.live
    is_well = all(pod.is_ready and pod.problem is None for pod in live)
    return 0 < len(live) == _wanted_pods(observed, effective) and is_well


def _wanted_pods(observed: Observed, effective: ResolvedSpec | Rejection) -> int:
    if isinstance(effective, ResolvedSpec):
        return sum(kind.count for kind in effective.pods)
    return len(observed.pods.live)
