"""What is to be done about one TrainingSession: plain data, carried out by `executor`."""

from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Literal

from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.spec.snapshot import ChildKey, Manifest


@dataclass(frozen=True, slots=True)
class Apply:
    """Make a child be as this manifest says (server-side apply)."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CreateSecret:
    """Make the session's Secret with a fresh token, unless it exists."""

    manifest: Manifest
    """Without data."""
    token_keys: tuple[str, ...]
    """Entries that hold the token."""


@dataclass(frozen=True, slots=True)
class CreateSecretMarker:
    """Make the witness of the session's Secret, which exists."""

    manifest: Manifest
    """The Secret's, without data."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a child, if it exists."""

    key: ChildKey


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Ask the head for something that it answers when it is done."""

    kind: Literal["suspend", "checkpoint"]
    url: str
    incarnation: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Hold, or let go of, the session's finalizer."""

    present: bool


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Delete the TrainingSession itself."""


@dataclass(frozen=True, slots=True)
class PostEvent:
    """Post an Event, once for each reason and message in a while."""

    reason: Reason
    message: str
    is_warning: bool


Action = (
    Apply | CreateSecret | CreateSecretMarker | Delete | SaveRequest | SetFinalizer | DeleteSession
)


class Stage(IntEnum):
    """When an action is done: those of one stage at the same time, one stage after the other."""

    SESSION = 1
    """What the session itself, or an existing pod, is told."""
    SUPPORT = 2
    """What pods are told and bound by. The finalizer, too, is held before there are pods, which
    alone hold what could be lost; the rest goes with its owner."""
    PODS = 3
    """What pods are made from, and what they do not wait for: the head's Service costs most, since
    the API server gives out cluster addresses one at a time."""


def stage(action: Action) -> Stage:
    """Return when an action is done."""
    match action:
        case Apply(manifest) if manifest["kind"] in {"RayCluster", "Service"}:
            return Stage.PODS
        case CreateSecretMarker():
            return Stage.PODS
        case Apply() | CreateSecret() | SetFinalizer(present=True):
            return Stage.SUPPORT
        case SaveRequest() | Delete() | DeleteSession() | SetFinalizer():
            return Stage.SESSION


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, then what is to be told, and when to look again."""

    actions: tuple[Action, ...] = ()
    event: PostEvent | None = None
    status: TrainingSessionStatus | None = None
    """None leaves the status as it is."""
    requeue_after_seconds: float | None = None
    """None: when something happens."""

    @property
    def stages(self) -> list[list[Action]]:
        """The actions, those of one stage together, in the order of the stages."""
        ordered = sorted(self.actions, key=stage)
        return [list(actions) for _, actions in groupby(ordered, stage)]
