"""What a TrainingSession's status means for those who wait for it. Pure functions."""

from dataclasses import dataclass
from datetime import datetime

from tinkercloud_api.providers.base import HeadFailed, Waiting
from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import NEVER_FITS, Condition, ConditionType, Reason, find
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_kube.client import Manifest
from tinkercloud_protocol.errors import InvalidRequest, StateLost, WireError
from tinkercloud_protocol.futures import QueueState

_CLIENTS_FAULT = frozenset({Reason.BASE_MODEL_NOT_FOUND, Reason.NOT_ALLOWED})
_OVER = frozenset({Reason.LIFETIME_EXCEEDED, Reason.FINISHED, Reason.TERMINATING})
_QUEUE_STATES: dict[str, QueueState] = {
    Reason.QUEUED: "paused_capacity",
    Reason.UNSCHEDULABLE: "paused_capacity",
    Reason.SCHEDULING_GATED: "paused_capacity",
    Reason.QUOTA_EXCEEDED: "paused_rate_limit",
}
"""What the SDK calls the reasons that only others can end; all else is progress, `active`."""


@dataclass(frozen=True, slots=True)
class Session:
    """What the provider keeps of a TrainingSession."""

    name: str
    uid: str
    generation: int
    """Of the specification; what a status says of another one is out of date."""
    created_at: str
    is_deleted: bool
    """Whether its deletion has been asked for."""
    last_activity: datetime | None
    spec: TrainingSessionSpec
    conditions: tuple[Condition, ...]
    endpoint: str | None
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What the provider keeps of a BaseModel."""

    name: str
    spec: BaseModelSpec
    is_offered: bool


@dataclass(frozen=True, slots=True)
class Usable:
    """Requests are served."""

    endpoint: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Over:
    """It will never be used again; the error says why."""

    error: WireError


Standing = Usable | Waiting | Over


def read_session(manifest: Manifest) -> Session:
    """Read a TrainingSession."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    return Session(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        created_at=metadata["creationTimestamp"],
        is_deleted="deletionTimestamp" in metadata,
        last_activity=parse_time(metadata.get("annotations", {}).get(labels.LAST_ACTIVITY)),
        spec=TrainingSessionSpec.model_validate(manifest["spec"]),
        conditions=tuple(map(Condition.model_validate, status.get("conditions", ()))),
        endpoint=status.get("endpoint"),
        incarnation=status.get("incarnation"),
    )


def read_base_model(manifest: Manifest) -> BaseModel:
    """Read a BaseModel. It is on offer unless its Ready condition says False."""
    conditions = [
        Condition.model_validate(condition)
        for condition in manifest.get("status", {}).get("conditions", ())
    ]
    ready = find(conditions, ConditionType.READY)
    return BaseModel(
        name=manifest["metadata"]["name"],
        spec=BaseModelSpec.model_validate(manifest["spec"]),
        is_offered=ready is None or ready.status != "False",
    )


def standing(session: Session) -> Standing:
    """Return what those who want to use a session have to expect."""
    ready = _current(session, ConditionType.READY)
    stalled = _current(session, ConditionType.STALLED)
    if session.is_deleted or (ready is not None and ready.reason in _OVER):
        why = ready.message if ready is not None and ready.reason in _OVER else ""
        return Over(StateLost(_said(session, "is over", why)))
    if stalled is not None and stalled.status == "True" and stalled.reason in NEVER_FITS:
        return Over(_never_fits(session, stalled))
    if ready is not None and ready.reason == Reason.START_FAILED and session.incarnation is None:
        return Over(HeadFailed(_said(session, ready.reason, ready.message)))
    if session.spec.suspend:
        return Waiting(
            "active",
            _said(session, "is suspended by its owner", "set spec.suspend to false to resume it"),
        )
    if (
        ready is not None
        and ready.status == "True"
        and session.endpoint is not None
        and session.incarnation is not None
    ):
        return Usable(session.endpoint, session.incarnation)
    if ready is None or ready.status == "True":
        return Waiting("active", _said(session, "waits for the operator", ""))
    return Waiting(
        _QUEUE_STATES.get(ready.reason, "active"), _said(session, ready.reason, ready.message)
    )


def asleep_since(session: Session) -> datetime | None:
    """Return when a session was suspended because nobody used it; None if it is not."""
    suspended = find(session.conditions, ConditionType.SUSPENDED)
    if session.spec.suspend or suspended is None or suspended.status != "True":
        return None
    return parse_time(suspended.last_transition_time) if suspended.reason == Reason.IDLE else None


def _current(session: Session, kind: ConditionType) -> Condition | None:
    """Return what a condition says of the specification as it is now."""
    condition = find(session.conditions, kind)
    is_current = condition is not None and condition.observed_generation == session.generation
    return condition if is_current else None


def _never_fits(session: Session, stalled: Condition) -> WireError:
    kind = InvalidRequest if stalled.reason in _CLIENTS_FAULT else HeadFailed
    return kind(_said(session, stalled.reason, stalled.message))


def _said(session: Session, what: str, detail: str) -> str:
    return f"TrainingSession {session.name}: {what}" + (f": {detail}" if detail else "")
