"""When the pods of a session have failed for too long or too often to keep their nodes. Pure.

`status.failing` records a failure until the session is ready again. Once the operator has deleted
the pods because of it, it stays until the session is retried: by `labels.RETRY`, or by suspending
and resuming the session.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from tinkercloud_crds.base_model import SessionPolicy
from tinkercloud_crds.conditions import MAX_MESSAGE_LENGTH, Reason, timestamp
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import Failing
from tinkercloud_operator.spec.observed import Observed

PERSISTENT_FAILURES = frozenset({Reason.START_FAILED, Reason.RESTART_LIMIT})
"""Reasons of sessions whose pods were deleted because they failed."""
_MOST_RESTARTS = 50
"""Maximum length of `status.recentRestarts`, and of what it is compared with."""


def current_failure(observed: Observed) -> Failing | None:
    """Return the recorded failure, unless the session was retried after it."""
    failing = observed.session.status.failing
    return failing if failing is not None and _counts(observed, failing.since) else None


def failed_at(observed: Observed) -> datetime | None:
    """Return when the pods must be deleted because of the recorded failure; None if never."""
    failing, base_model = current_failure(observed), observed.base_model
    since = parse_time(failing.since) if failing is not None else None
    if failing is None or since is None or base_model is None:
        return None
    if failing.reason == "RestartLimit":
        return since
    return since + timedelta(seconds=base_model.sessions.start_deadline_seconds)


def recent_restarts(observed: Observed, *, has_restarted: bool) -> list[str]:
    """Return when the head exited unexpectedly since the last retry.

    Those before the window of `sessions.maxRestarts` are removed when the head exits again: the
    passing of time alone changes no status.
    """
    known = [each for each in observed.session.status.recent_restarts if _counts(observed, each)]
    policy = _policy(observed)
    if policy is None or not has_restarted:
        return known
    start = timestamp(observed.now - timedelta(seconds=policy.restart_window_seconds))
    kept = [each for each in known if each > start]
    return [*kept, timestamp(observed.now)][-_MOST_RESTARTS:]


def restart_limit(observed: Observed, restarts: Sequence[str]) -> Failing | None:
    """Return the failure of a session whose head has now exited too often, if it has."""
    policy = _policy(observed)
    if policy is None or len(restarts) < policy.max_restarts:
        return None
    gone = observed.pods.failed or observed.head
    why = f"; {gone.problem.message}" if gone is not None and gone.problem is not None else ""
    message = f"the head exited {len(restarts)} times since {restarts[0]}{why}"
    return Failing(
        since=timestamp(observed.now),
        message=message[:MAX_MESSAGE_LENGTH],
        reason="RestartLimit",
    )


def _policy(observed: Observed) -> SessionPolicy | None:
    return observed.base_model.sessions if observed.base_model is not None else None


def _counts(observed: Observed, moment: str) -> bool:
    """Return whether something happened after the last retry. Times are in whole seconds."""
    return observed.session.retried is None or moment > timestamp(observed.session.retried)
