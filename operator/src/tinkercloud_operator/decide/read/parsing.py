"""Parses Kubernetes objects (JSON) into the fields of `Observed`: pure."""

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import CORDON, BaseModelSpec
from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.quantities import parse_quantity
from tinkercloud_operator.spec.snapshot import Node, Pod, PodProblem, ProgramPod

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
_BLOCKING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints that keep new pods off a node."""
_ACTIVITY_FIELD = f"f:{labels.LAST_ACTIVITY}"
_HEAD = "head"
"""Component of a head's pod, and name of its main container; platforms may inject others."""


def slim(kind: str, manifest: Manifest) -> Manifest:
    """Return an object without unused fields, since all sessions are kept in memory."""
    metadata = {
        key: value
        for key, value in manifest["metadata"].items()
        if key not in {"managedFields", "selfLink"}
    }
    if kind == "Pod":
        spec = _slim_pod_spec(manifest.get("spec", {}))
        return {"metadata": metadata, "spec": spec, "status": manifest.get("status", {})}
    if kind == "Job":
        suspend = {"suspend": bool(manifest.get("spec", {}).get("suspend"))}
        return {**manifest, "metadata": metadata, "spec": suspend}
    if kind == "TrainingSession" and (written := _activity_fields(manifest["metadata"])):
        metadata["managedFields"] = written
    return {**manifest, "metadata": metadata}


def interned(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a copy of a JSON value with interned strings.

    Field names and values that all sessions share make up a third of the memory of cached objects.
    """
    if isinstance(value, Mapping):
        return {sys.intern(key): interned(child) for key, child in value.items()}
    if isinstance(value, list):
        return [interned(child) for child in value]
    return sys.intern(value) if isinstance(value, str) else value


def _slim_pod_spec(spec: Mapping[str, Any]) -> Manifest:
    tolerations = [
        {"key": each.get("key") or ""}
        for each in spec.get("tolerations", [])
        if each.get("effect") in {None, "", "NoSchedule"}
    ]
    kept = {**spec, "tolerations": tolerations}
    wanted = ("nodeName", "schedulingGates", "tolerations")
    return {key: kept[key] for key in wanted if kept.get(key)}


def _activity_fields(metadata: Mapping[str, Any]) -> list[Manifest]:
    """Return who wrote the last-activity annotation, and when."""
    return [
        {
            "manager": entry["manager"],
            "time": entry.get("time"),
            "fieldsV1": {"f:metadata": {"f:annotations": {_ACTIVITY_FIELD: {}}}},
        }
        for entry in metadata.get("managedFields", [])
        if entry.get("manager") == labels.API_FIELD_MANAGER and _owns_activity(entry)
    ]


def _owns_activity(entry: Mapping[str, Any]) -> bool:
    owned = entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:annotations", {})
    return _ACTIVITY_FIELD in owned


def last_activity(manifest: Manifest) -> datetime | None:
    """Return when a client last used a session.

    The time comes from Kubernetes' clock (managedFields) if the API server wrote the annotation,
    since the API server's own clock may be wrong.
    """
    metadata = manifest["metadata"]
    annotated = parse_time(metadata.get("annotations", {}).get(labels.LAST_ACTIVITY))
    if annotated is None:
        return None
    written = [parse_time(entry.get("time")) for entry in _activity_fields(metadata)]
    return max((each for each in written if each is not None), default=annotated)


def pod(manifest: Manifest) -> Pod:
    """Parse a pod."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", [])}
    containers: Sequence[Mapping[str, Any]] = status.get("containerStatuses", [])
    spec = manifest.get("spec", {})
    serving = _serving(metadata, containers)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        component=metadata.get("labels", {}).get(labels.COMPONENT_LABEL, ""),
        is_scheduled=_is_true(conditions.get("PodScheduled")),
        is_started=bool(serving)
        and all(item.get("started") or item.get("ready") for item in serving),
        is_ready=_is_true(conditions.get("Ready")),
        is_terminating="deletionTimestamp" in metadata,
        restarts=sum(item.get("restartCount", 0) for item in serving),
        problem=_problem(manifest, conditions),
        node=spec.get("nodeName"),
        tolerations=frozenset(each["key"] for each in _slim_pod_spec(spec).get("tolerations", [])),
        finalizers=tuple(metadata.get("finalizers", [])),
        due=parse_time(metadata.get("deletionTimestamp")),
        disrupted=_disrupted_since(metadata, conditions),
    )


def _disrupted_since(
    metadata: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]
) -> datetime | None:
    """Return since when a running pod is being evicted, preempted or deleted."""
    if not _is_true(conditions.get("Ready")):
        return None
    due = parse_time(metadata.get("deletionTimestamp"))
    if due is not None:
        return due - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
    target = conditions.get("DisruptionTarget")
    return parse_time(target.get("lastTransitionTime")) if target and _is_true(target) else None


def _serving(
    metadata: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the containers that count: for a head, only its main one.

    A container that a platform has injected may end while the head is still saving.
    """
    if metadata.get("labels", {}).get(labels.COMPONENT_LABEL) != _HEAD:
        return containers
    return [item for item in containers if item.get("name") == _HEAD]


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _problem(manifest: Manifest, conditions: Mapping[str, Any]) -> PodProblem | None:
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
    if ready is None or _is_true(ready) or is_gated or not _is_true(containers):
        return None
    node_name = manifest.get("spec", {}).get("nodeName")
    return PodProblem(Reason.NODE_NOT_READY, f"node {node_name} is not ready")


def has_failed(manifest: Manifest) -> bool:
    """Return whether the node has permanently ended or rejected a pod.

    A deleted pod has no reason in its status, however its containers ended.
    """
    status = manifest.get("status", {})
    return status.get("phase") == "Failed" and "reason" in status


def replaces(manifest: Manifest, failed: Manifest) -> bool:
    """Return whether a ready pod replaces one that has failed."""
    here, gone = manifest["metadata"], failed["metadata"]
    return (
        pod(manifest).is_ready
        and pod(manifest).component == pod(failed).component
        and here.get("creationTimestamp", "") > gone.get("creationTimestamp", "")
    )


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


def is_of_program(manifest: Manifest) -> bool:
    """Return whether a pod runs a session's program."""
    return labels.PROGRAM_LABEL in manifest["metadata"].get("labels", {})


def program_pod(manifest: Manifest) -> ProgramPod:
    """Parse a pod of a program, which has one container and restarts by being replaced."""
    status = manifest.get("status", {})
    container: Mapping[str, Any] = next(iter(status.get("containerStatuses", [])), {})
    state = container.get("state", {})
    problem = pod(manifest).problem
    ended = state.get("terminated")
    has_failed = status.get("phase") == "Failed"
    return ProgramPod(
        created=str(manifest["metadata"].get("creationTimestamp", "")),
        is_running="running" in state,
        is_ended=has_failed or status.get("phase") == "Succeeded",
        waits=problem.message if problem is not None and not has_failed else None,
        failure=_program_failure(status, ended or {}) if has_failed else None,
        exit_code=ended.get("exitCode") if ended is not None and has_failed else None,
    )


def _program_failure(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    if "reason" in status:
        return _failure(status).message
    if ended.get("reason") == "OOMKilled":
        return "it exceeded its memory limit"
    last_words = str(ended.get("message", "")).strip().rpartition("\n")[2]
    code = f"exit code {ended['exitCode']}" if "exitCode" in ended else "it failed"
    return f"{code}: {last_words}" if last_words else code


def node(manifest: Manifest) -> Node:
    """Parse a node."""
    status = manifest.get("status", {})
    allocatable, capacity = status.get("allocatable", {}), status.get("capacity", {})
    return Node(
        labels=manifest["metadata"].get("labels", {}),
        taints=tuple(manifest.get("spec", {}).get("taints", [])),
        cpu=parse_quantity(allocatable.get("cpu", 0)),
        memory=parse_quantity(allocatable.get("memory", 0)),
        # Only healthy devices are allocatable, so there are none during a driver upgrade.
        devices={
            name: max(parse_quantity(amounts.get(name, 0)) for amounts in (allocatable, capacity))
            for name in {*allocatable, *capacity}
            if "/" in name or name.startswith("hugepages-")
        },
    )


def blocking_taints(manifest: Manifest) -> frozenset[str]:
    """Return the keys of the taints that keep new pods off a node; a cordon counts as its taint."""
    spec = manifest.get("spec", {})
    keys = {
        str(taint["key"])
        for taint in spec.get("taints", [])
        if taint.get("effect") in _BLOCKING_EFFECTS
    }
    return frozenset(keys | {CORDON} if spec.get("unschedulable") else keys)


def session_status(manifest: Manifest) -> TrainingSessionStatus:
    """Parse the status of a session, without fields that this version cannot read.

    After a rollback the operator finds statuses that a newer version wrote.
    """
    written = manifest.get("status", {})
    try:
        return TrainingSessionStatus.model_validate(written)
    except ValidationError as error:
        unreadable = {problem["loc"][0] for problem in error.errors()}
    readable = {key: value for key, value in written.items() if key not in unreadable}
    return TrainingSessionStatus.model_validate(readable)


def base_model(manifest: Manifest) -> BaseModelSpec | None:
    """Parse the spec of a BaseModel; None if this version cannot read it."""
    try:
        return BaseModelSpec.model_validate(manifest.get("spec", {}))
    except ValidationError:
        return None
