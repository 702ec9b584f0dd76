"""When the head of a stopping session is asked to save, and for how long. Pure.

A save that fails is repeated with growing pauses. A session that is suspended keeps its pods until
the save succeeds; one that ends, or whose pods cannot start, keeps them for a limited time.
"""

from datetime import datetime, timedelta
from typing import Literal

from tinkercloud_crds.base_model import SessionPolicy
from tinkercloud_crds.pods.shapes import HeadShape
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.decide.session.actions import SaveRequest
from tinkercloud_operator.decide.session.lifetime import stopping_since
from tinkercloud_operator.decide.session.status import endpoint
from tinkercloud_operator.spec.observed import FailedSave, Observed, Pod

Kind = Literal["suspend", "checkpoint"]

_RETRY_SECONDS = 5.0
"""Pause after the first failure; it doubles with each further one."""
_MAX_RETRY_SECONDS = 60.0
"""Longest pause between two save requests."""


def needs_save(observed: Observed, kind: Kind, shape: HeadShape | None) -> bool:
    """Return whether the head still has to save, and can, or will be able to.

    Args:
        observed: a session that stops.
        kind: what the head is to do.
        shape: the session's head; None if it is unknown, or if a head that is loading is not
            waited for.
    """
    head = observed.head
    if head is None:
        return False
    key = (kind, head.incarnation)
    # A head that is saving in order to stop is not Ready, nor is one that is busy for a moment.
    may_save = head.is_ready or key in observed.answers.pending_saves
    if head.is_started and head.incarnation == observed.session.status.served_incarnation:
        may_save = True
    may_save = may_save or _has_journals(observed, head, shape)
    return may_save and key not in observed.answers.completed_saves


def _has_journals(observed: Observed, head: Pod, shape: HeadShape | None) -> bool:
    """Return whether a head that is loading is waited for, since its disk may have runs.

    A head that has just replaced a killed one in the same pod has the journals of that one. Any
    other head that is loading has nothing to save. One that has not loaded within the start
    deadline is not waited for any more.
    """
    if shape is None or shape.durability.level == "none":
        return False
    saved = {incarnation for _, incarnation in observed.answers.completed_saves}
    if any(head.is_same_pod(each) for each in (*saved, observed.session.status.saved_incarnation)):
        return False
    policy = observed.base_model.sessions if observed.base_model is not None else SessionPolicy()
    patience = timedelta(seconds=policy.start_deadline_seconds)
    since = observed.session.deleted or stopping_since(observed) or observed.now
    is_in_time = observed.now < since + patience
    return is_in_time and head.is_same_pod(observed.session.status.served_incarnation)


def save_requests(observed: Observed, kind: Kind, left: float) -> tuple[list[SaveRequest], float]:
    """Return the request to send now, if any, and the seconds until the next look.

    Args:
        observed: a session whose head needs to save.
        kind: what the head is to do.
        left: seconds that it may take.
    """
    head, failures = observed.head, observed.answers.failed_saves
    failure = failures.get((kind, head.incarnation)) if head is not None else None
    pause = _pause_seconds(failure, observed.now)
    if head is None or pause > 0:
        return [], min(left, pause)
    request = SaveRequest(kind, endpoint(observed), head.incarnation, left)
    return [request], min(left, _RETRY_SECONDS)


def seconds_left(observed: Observed, started: datetime, timeout_seconds: float) -> float:
    """Return the seconds until the timeout of a save."""
    return (started + timedelta(seconds=timeout_seconds) - observed.now).total_seconds()


def seconds_until(observed: Observed, moment: datetime | None) -> float | None:
    """Return the seconds until a moment, 0 if it has passed; None if there is none."""
    return None if moment is None else max(0.0, (moment - observed.now).total_seconds())


def is_save_recorded(observed: Observed, new_status: TrainingSessionStatus) -> bool:
    """Return whether the stored status records the save, which is lost with the head."""
    written = observed.session.status
    return (written.saved_incarnation, written.latest_checkpoint) == (
        new_status.saved_incarnation,
        new_status.latest_checkpoint,
    )


def _pause_seconds(failure: FailedSave | None, now: datetime) -> float:
    """Return the rest of the pause after a failure."""
    if failure is None:
        return 0.0
    pause = min(_RETRY_SECONDS * 2.0 ** min(failure.attempts - 1, 10), _MAX_RETRY_SECONDS)
    return max(0.0, pause - (now - failure.moment).total_seconds())
