"""Reads why a pod does not run: unschedulable, out of memory, crashing, evicted. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from tinkercloud_crds.conditions import Reason
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import PodProblem

_WAITING_REASONS: Mapping[str, Reason] = {
    "ImagePullBackOff": Reason.IMAGE_PULL_BACK_OFF,
    "ErrImagePull": Reason.IMAGE_PULL_BACK_OFF,
    "ErrImageNeverPull": Reason.IMAGE_PULL_BACK_OFF,
    "InvalidImageName": Reason.IMAGE_PULL_BACK_OFF,
    "CreateContainerConfigError": Reason.CONFIGURATION_ERROR,
    "CreateContainerError": Reason.CONFIGURATION_ERROR,
    "RunContainerError": Reason.CONFIGURATION_ERROR,
    "CrashLoopBackOff": Reason.CRASH_LOOP,
}


_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
"""The scheduler's message about a missing claim, which is unrelated to nodes."""


def problem_of(manifest: Manifest, conditions: Mapping[str, Any]) -> PodProblem | None:
    """Return why a pod is not ready; None if it is, or starts as expected.

    Args:
        manifest: the pod.
        conditions: its conditions by type.
    """
    scheduled, status = conditions.get("PodScheduled", {}), manifest.get("status", {})
    if has_failed(manifest):
        return _failure(status)
    if scheduled.get("reason") == "Unschedulable":
        message = str(scheduled.get("message", ""))
        is_missing = _MISSING_CLAIM.search(message) is not None
        reason = Reason.CONFIGURATION_ERROR if is_missing else Reason.UNSCHEDULABLE
        return PodProblem(reason, message)
    if scheduled.get("reason") == "SchedulingGated":
        gates = [str(gate["name"]) for gate in manifest.get("spec", {}).get("schedulingGates", [])]
        named = f": {', '.join(gates)}" if gates else ""
        message = f"waiting for its scheduling gates to be removed{named}"
        return PodProblem(Reason.SCHEDULING_GATED, message)
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    found = (_container_problem(container) for container in containers)
    return next(
        (problem for problem in found if problem is not None), _node_problem(manifest, conditions)
    )


def _node_problem(manifest: Manifest, conditions: Mapping[str, Any]) -> PodProblem | None:
    """Return a problem if the pod's node is not ready.

    In that case Kubernetes sets the pod's Ready to False and keeps the last known container states.
    """
    ready, containers = conditions.get("Ready"), conditions.get("ContainersReady")
    is_gated = ready is not None and ready.get("reason") == "ReadinessGatesNotReady"
    if ready is None or is_true(ready) or is_gated or not is_true(containers):
        return None
    node_name = manifest.get("spec", {}).get("nodeName")
    return PodProblem(Reason.NODE_NOT_READY, f"node {node_name} is not ready")


def has_failed(manifest: Manifest) -> bool:
    """Return whether the node has permanently ended or rejected a pod.

    A deleted pod has no reason in its status, however its containers ended.
    """
    status = manifest.get("status", {})
    return status.get("phase") == "Failed" and "reason" in status


def _failure(status: Mapping[str, Any]) -> PodProblem:
    """Return why the kubelet permanently ended or rejected a pod."""
    why, message = str(status["reason"]), str(status.get("message", "")).strip()
    # The message mentions a limit if a volume, a container or the pod has written too much.
    is_over_limit = why == "Evicted" and "exceed" in message
    reason = Reason.OUT_OF_DISK if is_over_limit else Reason.POD_FAILED
    return PodProblem(reason, f"{why}: {message}" if message else why)


def _container_problem(container: Mapping[str, Any]) -> PodProblem | None:
    name, state = container.get("name"), container.get("state", {})
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    waiting = state.get("waiting", {})
    reason = _WAITING_REASONS.get(waiting.get("reason", ""))
    is_down = "terminated" in state or reason is Reason.CRASH_LOOP
    if is_down and ended.get("reason") == "OOMKilled":
        return PodProblem(Reason.OUT_OF_MEMORY, f"container {name} exceeded its memory limit")
    if reason is None:
        return None
    code = f" (exit code {ended['exitCode']})" if "exitCode" in ended else ""
    last_words = str(ended.get("message", "")).strip().rpartition("\n")[2]
    why = f": {last_words}" if last_words else ""
    return PodProblem(reason, f"container {name}: {waiting.get('message') or reason}{code}{why}")


def program_failure(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Return why the pod of a program has failed.

    Args:
        status: the status of the pod.
        ended: the terminated state of its container; empty if there is none.
    """
    if "reason" in status:
        return _failure(status).message
    if ended.get("reason") == "OOMKilled":
        return "it exceeded its memory limit"
    last_words = str(ended.get("message", "")).strip().rpartition("\n")[2]
    code = f"exit code {ended['exitCode']}" if "exitCode" in ended else "it failed"
    return f"{code}: {last_words}" if last_words else code


def is_true(condition: Mapping[str, Any] | None) -> bool:
    """Return whether a condition exists and is true."""
    return condition is not None and condition.get("status") == "True"
