"""The lifetime of a session: whether it should have pods, and when that can change. Pure.

An unused session is suspended or deleted (`spec.idle`), one that is too old ends
(`spec.maxLifetimeSeconds`), and a finished one is deleted after a while. A declared session is
never deleted, since GitOps tools would recreate it: it is finished and kept. Everything derives
from timestamps in the object, so a restarted operator reaches the same decisions.

The states, with the status of the condition Suspended:

| State       | Suspended | RayCluster | What holds                                               |
|-------------|-----------|------------|----------------------------------------------------------|
| Running     | False     | exists     | The operator creates and repairs all children.           |
| Stopping    | Unknown   | exists     | The head is asked to save its state.                     |
| Saved       | Unknown   | exists     | The status records what the head has saved.              |
| Terminating | Unknown   | deleted    | The pods are terminating.                                |
| Suspended   | True      | none       | Only the Secret and its marker remain.                   |
| Finished    | False     | none       | As Suspended, but the session never runs again.          |
| Deleting    | any       | any        | The head saves a last checkpoint; the finalizer is held. |
| Deleted     | -         | none       | The TrainingSession does not exist.                      |

The transitions; `decide` detects the events that concern use and age, `reconcile` the others:

| State       | Event                                                        | Next state  |
|-------------|--------------------------------------------------------------|-------------|
| Running     | `spec.suspend` is set                                        | Stopping    |
| Running     | `spec.suspend` is set before there are pods                  | Suspended   |
| Running     | it is idle, with idle action Suspend                         | Stopping    |
| Running     | it is idle, with idle action Delete, and is declared         | Stopping    |
| Running     | it is idle, with idle action Delete, and belongs to a client | Deleting    |
| Running     | one of its nodes is cordoned                                 | Stopping    |
| Running     | its head or a trainer is evicted, or on a node that ends     | Stopping    |
| Running     | its pods, including the head, fail until the start deadline  | Terminating |
| Running     | its head exits too often                                     | Terminating |
| Running     | its maximum lifetime ends                                    | Stopping    |
| Running     | somebody deletes its RayCluster                              | Running     |
| Running     | it is deleted                                                | Deleting    |
| Stopping    | the head completes the save                                  | Saved       |
| Stopping    | the head does not complete the save                          | Stopping    |
| Stopping    | its maximum lifetime ends before the head completes the save | Terminating |
| Stopping    | the head is lost                                             | Terminating |
| Stopping    | a disrupted session has used up its time to save             | Terminating |
| Stopping    | a client sends a request                                     | Stopping    |
| Saved       | the operator deletes the RayCluster                          | Terminating |
| Terminating | the last pod ends                                            | Suspended   |
| Terminating | the last pod ends, after its maximum lifetime                | Finished    |
| Terminating | a client sends a request, and the RayCluster is gone         | Running     |
| Suspended   | a client sends a request to an idle session                  | Running     |
| Suspended   | `spec.suspend` is cleared                                    | Running     |
| Suspended   | it is retried after its pods have failed                     | Running     |
| Suspended   | its maximum lifetime ends                                    | Finished    |
| Suspended   | it is deleted                                                | Deleted     |
| Finished    | its TTL passes, and it belongs to a client                   | Deleted     |
| Deleting    | the head completes the checkpoint                            | Deleted     |
| Deleting    | the head does not complete the checkpoint in time            | Deleted     |

docs/understand/suspend-and-resume.md has the same tables, and a test walks through every row.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import Condition, ConditionType, Reason, find
from tinkercloud_crds.pods.shapes import Idle
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import SERVING_ROLES, Failing
from tinkercloud_operator.decide.pods.disruptions import drained_node, notice
from tinkercloud_operator.decide.pods.failure_limits import current_failure, failed_at
from tinkercloud_operator.decide.read.program_facts import is_running, used_until
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec, idle_policy, max_lifetime

_AVAILABILITY_STEPS = (ConditionType.ACCEPTED, ConditionType.QUOTA_RESERVED, ConditionType.READY)
"""Conditions that must be True before a session can be used."""
_STARTING = frozenset(
    {Reason.HEAD_TERMINATING, Reason.PROVISIONING, Reason.HEAD_STARTING, Reason.LOADING}
)
"""Reasons of sessions that are starting normally but cannot be used yet."""
_QUEUED = frozenset({Reason.QUEUED, Reason.QUOTA_EXCEEDED, Reason.NAMESPACE_QUOTA_EXCEEDED})
"""Reasons of sessions that may start once others end."""

ACTIVITY_DELAY = timedelta(seconds=labels.LAST_ACTIVITY_SECONDS + 30)
"""Upper bound on the delay between a request and its record on the session: the API server writes
the annotation at intervals, and one of its writes may fail."""
_COUNTED_AFTER = timedelta(minutes=5)
"""Time without a request after which the GPUs of a session count as idle. A pause between two steps
is shorter."""
_ABANDONED_AFTER = timedelta(minutes=10)
"""Time without a request after which the client of a session that never ran is considered gone. A
waiting client polls every minute; if it does return, the API server creates another session for
it."""


class DesiredState(StrEnum):
    """The state that a session should be in."""

    RUNNING = "Running"
    """With pods."""
    SUSPENDED = "Suspended"
    """State saved, without pods."""
    FINISHED = "Finished"
    """Last checkpoint saved, without pods; the object is kept for inspection."""
    DELETED = "Deleted"
    """Deleted, after a last checkpoint."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A desired state, the reason for it, and when it may change by itself."""

    desired: DesiredState
    reason: Reason
    message: str
    changes_at: datetime | None = None
    urgent_since: datetime | None = None
    """When the session had to stop; the head may save for a limited time after that. None if the
    pods are kept until it has saved."""


def decision_about(observed: Observed, desired: ResolvedSpec | Rejection) -> Decision:
    """Return the desired state of a session that is not being deleted.

    Args:
        observed: the observed session.
        desired: what the session would start with now, or why it may not start.
    """
    spec, base_model = observed.session.spec, observed.base_model
    idle = idle_policy(spec, base_model)
    # Without pods, a rejected session waits to be accepted, which does not count as idle time.
    has_own_pods = observed.has_pods and not observed.is_in_pool
    if isinstance(desired, Rejection) and not has_own_pods:
        idle = None
    if spec.sharing == "Shared" and idle is not None and idle.action != "Delete":
        # Its suspension would save no pods.
        idle = None
    return decide(observed, idle, max_lifetime(spec, base_model))


def decide(
    observed: Observed,
    idle: Idle | None,
    max_lifetime_seconds: int | None,
) -> Decision:
    """Return the desired state of a session.

    Args:
        observed: the observed session.
        idle: the idle policy; None if it is unknown, which keeps the session in its current state.
        max_lifetime_seconds: maximum age of the session; None for no limit.
    """
    finished = parse_time(observed.session.status.finished_time)
    if finished is not None:
        return _after_finish(observed, finished)
    abandoned_at = _abandoned_at(observed)
    if abandoned_at is not None and observed.now >= abandoned_at:
        message = "the client stopped polling before the session was ready"
        return Decision(DesiredState.DELETED, Reason.IDLE, message)
    decision = _before_finish(observed, idle, max_lifetime_seconds)
    moments = (abandoned_at, decision.changes_at)
    return replace(
        decision, changes_at=min((each for each in moments if each is not None), default=None)
    )


def _before_finish(
    observed: Observed, idle: Idle | None, max_lifetime_seconds: int | None
) -> Decision:
    expiry = _after(observed.session.created, max_lifetime_seconds)
    if expiry is not None and observed.now >= expiry:
        return Decision(
            DesiredState.FINISHED,
            Reason.LIFETIME_EXCEEDED,
            f"the session reached its maximum lifetime of {max_lifetime_seconds} s",
            urgent_since=expiry,
        )
    if observed.session.spec.suspend:
        return Decision(DesiredState.SUSPENDED, Reason.SUSPENDED, "spec.suspend is true", expiry)
    failing, moment = current_failure(observed), failed_at(observed)
    if failing is not None and moment is not None and observed.now >= moment:
        return replace(_failed(observed, failing, expiry), urgent_since=moment)
    running = _unless_stopped(observed, idle, expiry)
    if moment is None or running.desired is not DesiredState.RUNNING:
        return running
    return replace(running, changes_at=min(moment, running.changes_at or moment))


def _unless_stopped(observed: Observed, idle: Idle | None, expiry: datetime | None) -> Decision:
    found = notice(observed, stopping_since(observed))
    if found is not None:
        return Decision(
            DesiredState.SUSPENDED, Reason.DISRUPTED, found.message, expiry, found.since
        )
    if stopping_since(observed) is not None and observed.ray_cluster is not None:
        # Its head no longer serves requests; a resumed session gets a new one.
        message = (
            "the session is stopping; it resumes with new pods after the current ones have ended"
        )
        return Decision(DesiredState.SUSPENDED, Reason.SUSPENDING, message, expiry)
    # A cluster of a pool whose sessions are moved to others is suspended when they have left.
    drained = None if observed.pool.is_emptied else drained_node(observed)
    if drained is not None:
        return Decision(DesiredState.SUSPENDED, Reason.SUSPENDING, drained, expiry)
    if observed.session.spec.role in SERVING_ROLES or _was_suspended_by_owner(observed):
        # Its pool decides when a cluster is no longer needed, and deletes it (`slots_plan`).
        return Decision(DesiredState.RUNNING, Reason.RUNNING, "", expiry)
    if idle is None or _is_queued(observed):
        return _unchanged(observed, expiry)
    return _by_activity(observed, idle, expiry)


def _failed(observed: Observed, failing: Failing, expiry: datetime | None) -> Decision:
    """Return the decision for a session whose pods keep failing; a resumable one is kept."""
    reason = Reason(failing.reason)
    what = "the pods failed to start" if reason is Reason.START_FAILED else "the head keeps failing"
    if observed.session.is_declared or observed.session.status.incarnation is not None:
        message = f"{what}; retry the session once the cause is fixed: {failing.message}"
        return Decision(DesiredState.SUSPENDED, reason, message, expiry)
    return Decision(DesiredState.FINISHED, reason, f"{what}: {failing.message}")


def stopping_since(observed: Observed) -> datetime | None:
    """Return when the session started to stop, by its last status; None if it did not."""
    suspended = find(observed.session.status.conditions, ConditionType.SUSPENDED)
    if suspended is None or suspended.status != "Unknown":
        return None
    return parse_time(suspended.last_transition_time) or observed.now


def _unchanged(observed: Observed, expiry: datetime | None) -> Decision:
    condition = find(observed.session.status.conditions, ConditionType.SUSPENDED)
    if condition is not None and condition.status == "True":
        return Decision(DesiredState.SUSPENDED, Reason.IDLE, condition.message, expiry)
    return Decision(DesiredState.RUNNING, Reason.RUNNING, "", expiry)


def _by_activity(observed: Observed, idle: Idle, expiry: datetime | None) -> Decision:
    if is_running(observed):
        return Decision(DesiredState.RUNNING, Reason.RUNNING, "", expiry)
    unused_since = last_use(observed)
    if observed.session.last_activity is not None:
        unused_since = max(unused_since, observed.session.last_activity + ACTIVITY_DELAY)
    idle_at = unused_since + timedelta(seconds=idle.timeout_seconds)
    if observed.now >= idle_at:
        message = f"no requests for {idle.timeout_seconds} s"
        if idle.action == "Delete":
            end = DesiredState.FINISHED if observed.session.is_declared else DesiredState.DELETED
            return Decision(end, Reason.IDLE, message, urgent_since=idle_at)
        return Decision(
            DesiredState.SUSPENDED,
            Reason.IDLE,
            f"{message}; the next request resumes the session",
            expiry,
        )
    changes_at = min(idle_at, expiry) if expiry is not None else idle_at
    return Decision(DesiredState.RUNNING, Reason.RUNNING, "", changes_at)


def last_use(observed: Observed) -> datetime:
    """Return when a session was last used.

    Time during which it could not be used counts as use: until it is accepted, admitted and ready,
    and while it is being resumed. So does time during which its program runs. A client that
    requests a suspended session needs it now, regardless of the client's clock.
    """
    session, conditions = observed.session, observed.session.status.conditions
    moments = [session.created, session.last_activity, session.retried, used_until(observed)]
    suspended = find(conditions, ConditionType.SUSPENDED)
    if suspended is None or suspended.status != "True":
        moments += [_reached_at(observed, kind) for kind in _AVAILABILITY_STEPS]
        accepted = find(conditions, ConditionType.ACCEPTED)
        ready = find(conditions, ConditionType.READY)
        is_starting = ready is not None and ready.reason in _STARTING
        if accepted is None or accepted.status == "False" or is_starting:
            moments.append(observed.now)
    if suspended is not None:
        moments.append(_resumed_at(observed, suspended))
    return max(moment for moment in moments if moment is not None)


def idle_from(observed: Observed) -> datetime | None:
    """Return when the GPUs of a ready session count as idle, unless it is used before.

    None while its program uses them.
    """
    return None if is_running(observed) else last_use(observed) + _COUNTED_AFTER


def _resumed_at(observed: Observed, suspended: Condition) -> datetime | None:
    """Return when it was resumed; now if a resume is pending; None if it stays suspended."""
    since, used = parse_time(suspended.last_transition_time), observed.session.last_activity
    if suspended.status == "False":
        return since
    return observed.now if since is not None and used is not None and used > since else None


def _reached_at(observed: Observed, kind: ConditionType) -> datetime | None:
    condition = find(observed.session.status.conditions, kind)
    if condition is None or condition.status != "True":
        return None
    return parse_time(condition.last_transition_time)


def _abandoned_at(observed: Observed) -> datetime | None:
    """Return when the client of a session that never ran counts as gone, if it has one."""
    session, head = observed.session, observed.head
    has_run = session.status.incarnation is not None
    if session.is_declared or session.spec.suspend or has_run:
        return None
    if session.spec.program is not None:
        # The program is the client; it starts when the session is ready.
        return None
    if head is not None and head.is_started:
        return None
    return max(session.last_activity or session.created, session.created) + _ABANDONED_AFTER


def _is_queued(observed: Observed) -> bool:
    """Return whether the session waits for Kueue or a quota, according to the last status."""
    condition = find(observed.session.status.conditions, ConditionType.QUOTA_RESERVED)
    return condition is not None and condition.reason in _QUEUED


def _was_suspended_by_owner(observed: Observed) -> bool:
    """Return whether `spec.suspend` caused the suspension; clearing the field resumes it."""
    condition = find(observed.session.status.conditions, ConditionType.SUSPENDED)
    return (
        condition is not None
        and condition.status == "True"
        and condition.reason == Reason.SUSPENDED
    )


def _after_finish(observed: Observed, finished: datetime) -> Decision:
    if observed.session.is_declared:
        return Decision(
            DesiredState.FINISHED,
            Reason.FINISHED,
            "the session has finished; delete and recreate it to run it again",
            urgent_since=finished,
        )
    gone_at = finished + timedelta(seconds=observed.session.spec.ttl_seconds_after_finished)
    if observed.now >= gone_at:
        return Decision(DesiredState.DELETED, Reason.FINISHED, "ttlSecondsAfterFinished has passed")
    if observed.session.status.failing is not None:
        failed = _failed(observed, observed.session.status.failing, None)
        return replace(failed, changes_at=gone_at, urgent_since=finished)
    message = "the session has finished"
    return Decision(DesiredState.FINISHED, Reason.FINISHED, message, gone_at, finished)


def _after(moment: datetime, seconds: int | None) -> datetime | None:
    return None if seconds is None else moment + timedelta(seconds=seconds)
