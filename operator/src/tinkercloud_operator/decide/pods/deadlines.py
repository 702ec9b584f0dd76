"""Deadlines for other controllers: KubeRay, owners of finalizers, nodes. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinkercloud_crds.conditions import Reason, timestamp
from tinkercloud_crds.times import parse_time
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import Observed, Pod

KUBERAY_TIMEOUT = timedelta(minutes=5)
"""Time within which even a busy KubeRay reports that it has observed a RayCluster."""
DELETION_TIMEOUT = timedelta(minutes=5)
"""Time within which a deleted RayCluster disappears."""
TERMINATION_TIMEOUT = timedelta(minutes=1)
"""Time after the grace period within which a node confirms the end of a pod."""
_WAITS_FOR_DEPENDENTS = "foregroundDeletion"
"""Finalizer of foreground deletion: the dependents, not a controller, are what blocks."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Something that another controller should do by a certain time."""

    moment: datetime
    reason: Reason
    message: str


def overdue(observed: Observed) -> Deadline | None:
    """Return the earliest missed deadline, if there is one."""
    late = [each for each in _deadlines(observed) if each.moment <= observed.now]
    return min(late, key=lambda each: each.moment, default=None)


def next_deadline(observed: Observed) -> datetime | None:
    """Return when the next deadline would be missed."""
    moments = (each.moment for each in _deadlines(observed) if each.moment > observed.now)
    return min(moments, default=None)


def ending_head(pods: Iterable[Pod], now: datetime) -> Pod | None:
    """Return a head that has started and is terminating, if there is one.

    It may still be writing the state of its models to the checkpoint store, and its trainers hold
    their devices until it has ended. One whose node has not confirmed its end in time is not waited
    for: the node is lost, or the pod has been overdue long enough to be reported as such.

    Args:
        pods: the pods of a session; those of a RayCluster that is gone count as terminating.
        now: the current time.
    """
    ending = (
        pod
        for pod in pods
        if pod.component == "head" and pod.is_started and pod.is_terminating
        if (until := awaited_until(pod)) is None or now < until
    )
    return min(ending, key=lambda pod: pod.name, default=None)


def awaited_until(head: Pod) -> datetime | None:
    """Return until when a head that is terminating is waited for, once that is known."""
    return None if head.due is None else head.due + TERMINATION_TIMEOUT


def awaited_head(observed: Observed) -> Pod | None:
    """Return the head that must have ended before a session gets a new RayCluster, if any."""
    cluster = observed.ray_cluster
    if cluster is not None and "deletionTimestamp" not in cluster["metadata"]:
        return None
    return ending_head(observed.pods.required, observed.now)


def _deadlines(observed: Observed) -> Iterator[Deadline]:
    cluster = observed.ray_cluster
    if cluster is not None and not observed.is_suspended_by_kueue and not observed.pods.required:
        yield from _kuberay_deadline(cluster)
    children = {**observed.children.own, **observed.children.predecessors}
    yield from _deletion_deadlines(
        child for key, child in children.items() if key.kind == "RayCluster"
    )
    for pod in observed.pods.required:
        yield from _pod_deadline(pod)


def _kuberay_deadline(cluster: Manifest) -> Iterator[Deadline]:
    metadata = cluster["metadata"]
    made = parse_time(metadata.get("creationTimestamp"))
    is_seen = "observedGeneration" in cluster.get("status", {})
    if made is None or is_seen or "deletionTimestamp" in metadata:
        return
    message = (
        f"KubeRay has not reconciled RayCluster {metadata['name']}, created at {timestamp(made)};"
        " check that the KubeRay operator is running and watches this namespace, and read its logs"
    )
    yield Deadline(made + KUBERAY_TIMEOUT, Reason.KUBERAY_SILENT, message)


def _deletion_deadlines(clusters: Iterable[Manifest]) -> Iterator[Deadline]:
    for cluster in clusters:
        metadata = cluster["metadata"]
        since = parse_time(metadata.get("deletionTimestamp"))
        holding = [each for each in metadata.get("finalizers", []) if each != _WAITS_FOR_DEPENDENTS]
        if since is None or not holding:
            continue
        message = (
            f"RayCluster {metadata['name']} has been terminating since {timestamp(since)}, blocked"
            f" by finalizers {', '.join(holding)}; the controllers that set them must remove them"
        )
        yield Deadline(since + DELETION_TIMEOUT, Reason.DELETION_STUCK, message)


def _pod_deadline(pod: Pod) -> Iterator[Deadline]:
    if pod.due is None:
        return
    if pod.finalizers:
        why = (
            f"is blocked by finalizers {', '.join(pod.finalizers)}; the controllers that set them"
            " must remove them"
        )
    else:
        why = (
            f"node {pod.node} has not confirmed its termination; check the node; if it is"
            " permanently lost, delete the Node object, or delete the pod with --force"
        )
    message = f"pod {pod.name} should have terminated by {timestamp(pod.due)}, but {why}"
    yield Deadline(pod.due + TERMINATION_TIMEOUT, Reason.DELETION_STUCK, message)
