"""Parses Kubernetes objects (JSON) into the fields of `Observed`: pure."""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import CORDON, BaseModelSpec
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read.pod_problems import is_true, problem_of, program_failure
from tinkercloud_operator.spec.observed import Node, Pod, ProgramPod, SessionObject
from tinkercloud_operator.spec.quantities import parse_quantity

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
        is_scheduled=is_true(conditions.get("PodScheduled")),
        is_started=bool(serving)
        and all(item.get("started") or item.get("ready") for item in serving),
        is_ready=is_true(conditions.get("Ready")),
        is_terminating="deletionTimestamp" in metadata,
        restarts=sum(item.get("restartCount", 0) for item in serving),
        problem=problem_of(manifest, conditions),
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
    if not is_true(conditions.get("Ready")):
        return None
    due = parse_time(metadata.get("deletionTimestamp"))
    if due is not None:
        return due - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
    target = conditions.get("DisruptionTarget")
    return parse_time(target.get("lastTransitionTime")) if target and is_true(target) else None


def _serving(
    metadata: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the containers that count: for a head, only its main one.

    A container that a platform has injected may end while the head is still saving.
    """
    if metadata.get("labels", {}).get(labels.COMPONENT_LABEL) != _HEAD:
        return containers
    return [item for item in containers if item.get("name") == _HEAD]


def replaces(manifest: Manifest, failed: Manifest) -> bool:
    """Return whether a ready pod replaces one that has failed."""
    here, gone = manifest["metadata"], failed["metadata"]
    return (
        pod(manifest).is_ready
        and pod(manifest).component == pod(failed).component
        and here.get("creationTimestamp", "") > gone.get("creationTimestamp", "")
    )


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
        failure=program_failure(status, ended or {}) if has_failed else None,
        exit_code=ended.get("exitCode") if ended is not None and has_failed else None,
    )


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


def session_object(manifest: Manifest) -> SessionObject | None:
    """Read a TrainingSession; None if this version of the operator cannot read it."""
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {})
    created = parse_time(metadata["creationTimestamp"])
    try:
        spec = TrainingSessionSpec.model_validate(manifest.get("spec", {}))
        status = session_status(manifest)
    except ValidationError:
        return None
    if created is None:
        return None
    return SessionObject(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        created=created,
        deleted=parse_time(metadata.get("deletionTimestamp")),
        has_finalizer=labels.FINALIZER in metadata.get("finalizers", []),
        is_declared=spec.model_id is None and labels.CREATED_FOR not in annotations,
        spec=spec,
        status=status,
        last_activity=last_activity(manifest),
        degraded=annotations.get(labels.DEGRADED),
        leave_node=annotations.get(labels.LEAVE_NODE),
        retried=parse_time(annotations.get(labels.RETRY)),
    )
