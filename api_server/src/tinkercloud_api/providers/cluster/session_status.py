"""Reads TrainingSessions and BaseModels and interprets their status for clients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

import structlog
from pydantic import ValidationError

from tinkercloud_api.providers.base import HeadEnd, HeadFailed, Pending
from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec, PoolStatus
from tinkercloud_crds.conditions import NEVER_FITS, Condition, ConditionType, Reason, find
from tinkercloud_crds.idle_gpus import IdleGpus
from tinkercloud_crds.pods.program_fields import ProgramStatus
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, WireError
from tinkercloud_protocol.wire.future_responses import QueueState
from tinkercloud_protocol.wire.json_model import describe

log = structlog.get_logger(__name__)

ObjectT = TypeVar("ObjectT")

_CLIENT_ERRORS = frozenset({Reason.BASE_MODEL_NOT_FOUND, Reason.NOT_ALLOWED})
_ENDED = frozenset({Reason.LIFETIME_EXCEEDED, Reason.FINISHED, Reason.TERMINATING})
_QUEUE_STATES: dict[str, QueueState] = {
    Reason.QUEUED: "paused_capacity",
    Reason.UNSCHEDULABLE: "paused_capacity",
    Reason.SCHEDULING_GATED: "paused_capacity",
    Reason.POOL_FULL: "paused_capacity",
    Reason.QUOTA_EXCEEDED: "paused_capacity",
    Reason.NAMESPACE_QUOTA_EXCEEDED: "paused_capacity",
}
"""SDK queue states of reasons that need external action; all other reasons are `active`."""


@dataclass(frozen=True, slots=True)
class TrainingSessionView:
    """The fields of a TrainingSession that the provider uses."""

    name: str
    uid: str
    generation: int
    """Generation of the spec; conditions of an earlier generation are stale."""
    created_at: str
    is_deleted: bool
    """Whether the object is being deleted."""
    last_activity: datetime | None
    spec: TrainingSessionSpec
    conditions: tuple[Condition, ...]
    endpoint: str | None
    incarnation: str | None
    program: ProgramStatus | None = None
    degraded: str | None = None
    """Why its run is less safe than its BaseModel's durability promises; None if it isn't."""
    moving_to: str | None = None
    """The pool cluster that it is being moved to, or returns to; until then no head accepts its
    requests."""
    gpus: int = 0
    """Number of GPUs that its pods request."""
    gpus_idle_since: datetime | None = None
    """Since when they are idle; None if they are not."""


@dataclass(frozen=True, slots=True)
class BaseModelView:
    """The fields of a BaseModel that the provider uses."""

    name: str
    spec: BaseModelSpec
    is_offered: bool
    pool: PoolStatus | None
    """Its pool, as last written by the operator."""
    gpus: int = 0
    """Number of GPUs that the pods of its sessions request."""
    idle: IdleGpus = field(default_factory=IdleGpus)
    """Those that nobody uses, as last written by the operator."""
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The session serves requests."""

    endpoint: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has permanently ended or failed; the error gives the reason."""

    error: WireError


Readiness = Ready | Pending | Ended


def readable(read: Callable[[Manifest], ObjectT]) -> Callable[[Manifest], ObjectT | None]:
    """Return a reader that logs an object it cannot read and returns None for it.

    A later version of the server may have written the object; other objects are not affected.
    """

    def read_or_skip(manifest: Manifest) -> ObjectT | None:
        try:
            return read(manifest)
        except ValidationError as error:
            name = manifest["metadata"]["name"]
            log.warning("ignoring an unreadable object", name=name, error=describe(error))
            return None

    return read_or_skip


def read_session(manifest: Manifest) -> TrainingSessionView:
    """Read a TrainingSession."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    annotations = metadata.get("annotations", {})
    return TrainingSessionView(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        created_at=metadata["creationTimestamp"],
        is_deleted="deletionTimestamp" in metadata,
        last_activity=parse_time(annotations.get(labels.LAST_ACTIVITY)),
        spec=TrainingSessionSpec.model_validate(manifest["spec"]),
        conditions=tuple(map(Condition.model_validate, status.get("conditions", ()))),
        endpoint=status.get("endpoint"),
        incarnation=status.get("incarnation"),
        program=ProgramStatus.model_validate(status["program"]) if "program" in status else None,
        degraded=annotations.get(labels.DEGRADED),
        moving_to=annotations.get(labels.MOVING_TO),
        gpus=status.get("gpus", 0),
        gpus_idle_since=parse_time(status.get("idleSince")),
    )


def read_base_model(manifest: Manifest) -> BaseModelView:
    """Read a BaseModel. It is offered unless its Ready condition is False."""
    status = manifest.get("status", {})
    conditions = [Condition.model_validate(condition) for condition in status.get("conditions", ())]
    ready = find(conditions, ConditionType.READY)
    return BaseModelView(
        name=manifest["metadata"]["name"],
        spec=BaseModelSpec.model_validate(manifest["spec"]),
        is_offered=ready is None or ready.status != "False",
        pool=PoolStatus.model_validate(status["pool"]) if "pool" in status else None,
        gpus=status.get("gpus", 0),
        idle=IdleGpus.model_validate(status.get("idle", {})),
        conditions=tuple(conditions),
    )


def readiness(
    session: TrainingSessionView, cluster: TrainingSessionView | None = None
) -> Readiness:
    """Return whether a session is ready, pending or has ended.

    Args:
        session: the session.
        cluster: the pool cluster that serves it, if it has none of its own and that one exists.
    """
    ready = _current(session, ConditionType.READY)
    stalled = _current(session, ConditionType.STALLED)
    if session.is_deleted or (ready is not None and ready.reason in _ENDED):
        why = ready.message if ready is not None and ready.reason in _ENDED else ""
        return Ended(StateLost(_describe(session, " has ended", why)))
    if stalled is not None and stalled.status == "True" and stalled.reason in NEVER_FITS:
        return Ended(_never_fits(session, stalled))
    if ready is not None and ready.reason == Reason.START_FAILED and session.incarnation is None:
        return Ended(HeadFailed(_describe(session, f": {ready.reason}", ready.message)))
    if session.spec.suspend:
        return Pending(
            "active",
            _describe(
                session, " is suspended by its owner", "set spec.suspend to false to resume it"
            ),
        )
    is_leaving = ready is not None and ready.reason in {Reason.SUSPENDING, Reason.SAVE_FAILED}
    if cluster is not None and not is_leaving:
        return _on_cluster(session, cluster)
    if (
        session.spec.sharing == "Dedicated"
        and session.spec.pool_cluster is None
        and ready is not None
        and ready.status == "True"
        and session.endpoint is not None
        and session.incarnation is not None
    ):
        return Ready(session.endpoint, session.incarnation)
    if ready is None or ready.status == "True":
        return Pending("active", _describe(session, " is waiting for the operator", ""))
    return Pending(
        _QUEUE_STATES.get(ready.reason, "active"),
        _describe(session, f": {ready.reason}", ready.message),
    )


def head_end(session: TrainingSessionView) -> HeadEnd | None:
    """Return the end of a session, for good; None if it has none."""
    state = readiness(session)
    if session.is_deleted:
        has_run = session.incarnation is not None
        # The object exists until the last checkpoint is written.
        why = "its head saves a last checkpoint" if has_run else "it never ran"
        reason = _describe(session, " is being deleted", why)
        return HeadEnd(is_over=False, reason=reason, has_run=has_run)
    if isinstance(state, Ended) and isinstance(state.error, StateLost):
        return HeadEnd(is_over=True, reason=state.error.message)
    return None


def _on_cluster(session: TrainingSessionView, cluster: TrainingSessionView) -> Readiness:
    """Return the readiness of a session that a pool cluster serves: that of the cluster.

    It waits if the cluster has no room for it. It does not end with its cluster: the operator gives
    it a place on another one. Of a cluster that others share, it has the reason alone: the message
    may name their runs.
    """
    if session.moving_to is not None:
        way = f"is being moved from pool cluster {cluster.name} to {session.moving_to}"
        if session.moving_to == cluster.name:
            way = f"returns to pool cluster {cluster.name}"
        return Pending("active", _describe(session, f" {way}", ""))
    ready = _current(session, ConditionType.READY)
    if ready is not None and ready.reason == Reason.POOL_FULL:
        # The head serves others, and has no room for this one.
        return Pending("paused_capacity", _describe(session, f": {ready.reason}", ready.message))
    state = readiness(cluster if session.spec.sharing == "Dedicated" else _without_words(cluster))
    if isinstance(state, Ready):
        return state
    where = _describe(session, f" is on pool cluster {cluster.name}", "")
    if isinstance(state, Pending):
        return Pending(state.queue_state, f"{where}: {state.reason}")
    return Pending("paused_capacity", f"{where}: {state.error.message}")


def _without_words(cluster: TrainingSessionView) -> TrainingSessionView:
    """Return a cluster whose conditions have no messages."""
    silent = (each.model_copy(update={"message": ""}) for each in cluster.conditions)
    return replace(cluster, conditions=tuple(silent))


def idle_since(session: TrainingSessionView) -> datetime | None:
    """Return when a session was suspended for idleness, or None if it was not."""
    suspended = find(session.conditions, ConditionType.SUSPENDED)
    if session.spec.suspend or suspended is None or suspended.status != "True":
        return None
    return parse_time(suspended.last_transition_time) if suspended.reason == Reason.IDLE else None


def _current(session: TrainingSessionView, kind: ConditionType) -> Condition | None:
    """Return a condition if it describes the current generation of the spec."""
    condition = find(session.conditions, kind)
    is_current = condition is not None and condition.observed_generation == session.generation
    return condition if is_current else None


def _never_fits(session: TrainingSessionView, stalled: Condition) -> WireError:
    kind = InvalidRequest if stalled.reason in _CLIENT_ERRORS else HeadFailed
    return kind(_describe(session, f": {stalled.reason}", stalled.message))


def _describe(session: TrainingSessionView, what: str, detail: str) -> str:
    return f"TrainingSession {session.name}{what}" + (f": {detail}" if detail else "")
