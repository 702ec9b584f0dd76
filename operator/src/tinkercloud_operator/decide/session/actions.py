"""The actions that a TrainingSession needs, as plain data; `run.cluster.executor` executes them."""

from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Literal

from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import ChildKey


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the manifest of a child (server-side apply)."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CreateSecret:
    """Create the session's Secret with a random token, unless it exists."""

    manifest: Manifest
    """The Secret without data."""
    token_keys: tuple[str, ...]
    """Keys of the Secret that hold the token."""


@dataclass(frozen=True, slots=True)
class CreateSecretMarker:
    """Create the marker of the session's Secret, which must exist."""

    manifest: Manifest
    """The manifest of the Secret, without data."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a child, if it exists."""

    key: ChildKey


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Ask the head to save its state; the head responds when the save is complete."""

    kind: Literal["suspend", "checkpoint"]
    url: str
    incarnation: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Ask the head of a pool cluster to save a last checkpoint of a model and to drop the model."""

    cluster: str
    """The TrainingSession of the cluster."""
    url: str
    incarnation: str
    model_id: str
    timeout_seconds: float
    kind: Literal["remove"] = "remove"


@dataclass(frozen=True, slots=True)
class GiveAway:
    """Ask the head of a pool cluster to suspend a model that is in use, for another head."""

    cluster: str
    """The TrainingSession of the cluster."""
    url: str
    incarnation: str
    model_id: str
    timeout_seconds: float
    kind: Literal["give-away"] = "give-away"


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Ask the head of a pool cluster to continue a model that it has given away, if it has."""

    cluster: str
    """The TrainingSession of the cluster."""
    url: str
    incarnation: str
    model_id: str
    timeout_seconds: float
    kind: Literal["take-back"] = "take-back"


HeadRequest = SaveRequest | RemoveModel | GiveAway | TakeBack
"""A request that a head answers once it has saved something."""


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Add or remove the session's finalizer."""

    present: bool


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Delete the TrainingSession itself."""


@dataclass(frozen=True, slots=True)
class PostEvent:
    """Post an Event; repetitions with the same reason and message are dropped."""

    reason: Reason
    message: str
    is_warning: bool


Action = (
    Apply
    | CreateSecret
    | CreateSecretMarker
    | Delete
    | SaveRequest
    | RemoveModel
    | SetFinalizer
    | DeleteSession
)


class Stage(IntEnum):
    """When an action is executed: actions of a stage run concurrently, stages run in order."""

    SESSION = 1
    """Actions on the session itself or on its running pods."""
    SUPPORT = 2
    """Objects that pods depend on: configuration, Secret, policies. The finalizer is also added
    here, before the pods, which hold the state that it protects; everything else is deleted
    together with its owner."""
    PODS = 3
    """The RayCluster, the Job of a program, and the Services that pods do not wait for: creating a
    Service is slow, since the API server allocates cluster IPs one at a time."""


def stage(action: Action) -> Stage:
    """Return the stage of an action."""
    match action:
        case Apply(manifest) if manifest["kind"] in {"RayCluster", "Service", "Job"}:
            return Stage.PODS
        case CreateSecretMarker():
            return Stage.PODS
        case Apply() | CreateSecret() | SetFinalizer(present=True):
            return Stage.SUPPORT
        case SaveRequest() | RemoveModel() | Delete() | DeleteSession() | SetFinalizer():
            return Stage.SESSION


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions to execute, what to report afterwards, and when to reconcile again."""

    actions: tuple[Action, ...] = ()
    event: PostEvent | None = None
    status: TrainingSessionStatus | None = None
    """None leaves the status unchanged."""
    requeue_after_seconds: float | None = None
    """None waits for the next event."""

    @property
    def stages(self) -> list[list[Action]]:
        """The actions grouped by stage, in order."""
        ordered = sorted(self.actions, key=stage)
        return [list(actions) for _, actions in groupby(ordered, stage)]
