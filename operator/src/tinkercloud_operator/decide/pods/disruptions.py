"""Whether a session must leave its nodes: drains, evictions, preemptions and spot notices. Pure.

A node that is being drained waits until the session is saved, because evictions respect the
session's disruption budget. A notice does not wait: the pod or its node ends at a fixed time, so
the pods are deleted after the time to save, with or without a save.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from tinkercloud_crds.base_model import CORDON, DRAINING_TAINTS, ENDING_TAINTS, BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.spec.observed import Observed, Pod

_STATEFUL = frozenset({"head", "trainer"})
"""Components whose end loses state. The head replaces a lost engine by itself."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A disruption that does not wait for the session to be saved."""

    message: str
    since: datetime
    """When the time to save starts."""


def notice(observed: Observed, stopping_since: datetime | None) -> Notice | None:
    """Return the disruption because of which a session must stop within a limited time, if any.

    Args:
        observed: the observed session.
        stopping_since: when it started to stop, by its last status; None if it did not.
    """
    suspended = find(observed.session.status.conditions, ConditionType.SUSPENDED)
    if stopping_since is not None and observed.ray_cluster is None:
        return None
    evicted = _evicted_pod(observed)
    if evicted is not None and evicted.disrupted is not None:
        message = (
            f"pod {evicted.name} is being evicted, preempted or deleted; saving the state to resume"
            " the session with new pods"
        )
        return Notice(message, evicted.disrupted)
    if stopping_since is not None:
        # The disrupted pod may be gone, and with it any chance to save.
        is_disrupted = suspended is not None and suspended.reason == Reason.DISRUPTED
        message = suspended.message if suspended is not None else ""
        return Notice(message, stopping_since) if is_disrupted else None
    for pod, taint in _taints_to_leave(observed):
        if taint not in DRAINING_TAINTS and pod.component in _STATEFUL:
            message = (
                f"node {pod.node} of pod {pod.name} has the taint {taint}; saving the state to"
                " resume the session on other nodes"
            )
            return Notice(message, observed.now)
    return None


def drained_node(observed: Observed) -> str | None:
    """Return why a session must leave a node that is being drained; None if it need not.

    The session's disruption budget protects all of its pods, so the drain waits until the operator
    has moved the session.
    """
    for pod, taint in _taints_to_leave(observed):
        if taint in DRAINING_TAINTS:
            what = "is cordoned" if taint == CORDON else f"has the taint {taint}"
            return f"node {pod.node} {what}; saving the state to resume the session on other nodes"
    return None


def _evicted_pod(observed: Observed) -> Pod | None:
    """Return a pod that is about to end, and whose state a head that has served can save.

    A head that is deleted saves its state by itself, and so does one that Kueue evicts.
    """
    head, cluster = observed.head, observed.ray_cluster
    if head is None or head.is_terminating or not head.is_started:
        return None
    if head.incarnation != observed.session.status.served_incarnation:
        return None
    if cluster is None or "deletionTimestamp" in cluster["metadata"]:
        return None
    if observed.is_suspended_by_kueue:
        return None
    going = [
        pod
        for pod in observed.pods.required
        if pod.disrupted is not None and pod.component in _STATEFUL
        if not (pod.component == "head" and pod.is_terminating)
    ]
    return min(going, key=lambda pod: pod.name, default=None)


def taints_to_leave(
    pods: Iterable[Pod],
    base_model: BaseModelSpec | None,
    node_taints: Mapping[str, frozenset[str]],
    leave_node: str | None,
) -> Iterator[tuple[Pod, str]]:
    """Yield pods, each with a taint of its node because of which it must leave.

    Args:
        pods: the pods that a session needs.
        base_model: the session's BaseModel, if it exists.
        node_taints: keys of the taints that keep new pods off a node, by node.
        leave_node: the cordoned node that the session was asked to leave, if any.
    """
    leaves = frozenset(
        base_model.sessions.leave_taints
        if base_model is not None
        else (*DRAINING_TAINTS, *ENDING_TAINTS)
    )
    for pod in sorted(pods, key=lambda pod: pod.node or ""):
        # A pod that tolerates the taint could be scheduled to the same node again.
        if pod.node is None or pod.is_terminating or "" in pod.tolerations:
            continue
        wanted = leaves | {CORDON} if pod.node == leave_node else leaves
        found = node_taints.get(pod.node, frozenset())
        for taint in sorted((found & wanted) - pod.tolerations):
            yield pod, taint


def _taints_to_leave(observed: Observed) -> Iterator[tuple[Pod, str]]:
    return taints_to_leave(
        observed.pods.required,
        observed.base_model,
        observed.platform.node_taints,
        observed.session.leave_node,
    )
