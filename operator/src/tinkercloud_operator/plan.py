"""What is to be done about one TrainingSession: plain data, executed by `apply`."""

from dataclasses import dataclass
from typing import Literal

from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.observed import ChildKey, Manifest


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
class Delete:
    """Delete a child, if it exists."""

    key: ChildKey


@dataclass(frozen=True, slots=True)
class AskHead:
    """Ask the head for something that it answers when it is done."""

    what: Literal["suspend", "checkpoint"]
    url: str
    incarnation: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class HoldFinalizer:
    """Hold, or let go of, the session's finalizer."""

    held: bool


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Delete the TrainingSession itself."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Post an Event, once for each reason and message in a while."""

    reason: Reason
    message: str
    is_warning: bool


Action = Apply | CreateSecret | Delete | AskHead | HoldFinalizer | DeleteSession | Announce


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions in order, the status to be written if it differs, and when to look again."""

    actions: tuple[Action, ...] = ()
    status: TrainingSessionStatus | None = None
    """None leaves the status as it is."""
    look_again_seconds: float | None = None
    """None: when something happens."""
