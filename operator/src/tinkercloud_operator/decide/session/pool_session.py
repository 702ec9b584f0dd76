"""What a session needs that a pool cluster or a taken spare serves: a status, no pods. Pure.

The pool's own worker gives it a place (`slots_plan`). Its steps to Ready are those of the cluster
that serves it. When it ends, the head of the cluster saves a last checkpoint of its model and drops
the model, which frees the slot.
"""

from collections.abc import Iterable

from tinkercloud_crds.conditions import (
    SESSION_STEPS,
    Condition,
    ConditionType,
    Reason,
    find,
)
from tinkercloud_crds.names import Names
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.decide.session.actions import (
    Delete,
    DeleteSession,
    Plan,
    RemoveModel,
    SetFinalizer,
)
from tinkercloud_operator.decide.session.lifetime import Decision, DesiredState, decision_about
from tinkercloud_operator.decide.session.readiness import StepStatus, ready_after
from tinkercloud_operator.decide.session.saving import seconds_left, seconds_until
from tinkercloud_operator.decide.session.status import common_status, reporting_plan
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Observed, PoolCluster
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec, resolve

_RETRY_SECONDS = 5.0
"""Interval between two requests to a head that has not completed one."""
_LEAST_REMOVAL_SECONDS = 15.0
"""Time limit for dropping a model of a head, even if no time is given to save it."""


def reconcile_in_pool(observed: Observed, settings: Settings) -> Plan:
    """Return the plan for a session that shares a cluster."""
    session = observed.session
    resolved = resolve(session.spec, observed.base_model, observed.limits.sessions_of_owner)
    if session.deleted is not None:
        return _finalize(observed, resolved, settings)
    decision = decision_about(observed, resolved)
    new_status = _status(observed, resolved, decision)
    seconds = seconds_until(observed, decision.changes_at)
    match decision.desired:
        case DesiredState.DELETED:
            return reporting_plan(observed, [DeleteSession()], new_status, None)
        case DesiredState.FINISHED:
            request = _removal(observed, _removal_seconds(settings))
            if request is not None:
                return reporting_plan(observed, [request], new_status, _RETRY_SECONDS)
            return reporting_plan(observed, [], new_status, seconds)
        case DesiredState.RUNNING if not session.has_finalizer and _may_have_model(observed):
            # Before it has a place: what a head holds for it must be dropped when it ends.
            return reporting_plan(observed, [SetFinalizer(present=True)], new_status, seconds)
        case _:
            return reporting_plan(observed, _delete_children(observed), new_status, seconds)


def _delete_children(observed: Observed) -> list[Delete]:
    """Return the deletions of what was being started when the session took over a spare.

    Its pods have served nobody. The Secret and its marker stay for pods that it may get later.
    """
    marker = ChildKey("ConfigMap", Names(observed.session.name).token_secret)
    return [
        Delete(key)
        for key, child in observed.children.own.items()
        if key != marker and "deletionTimestamp" not in child["metadata"]
        if key.kind == "RayCluster" or not observed.has_pods
    ]


def _may_have_model(observed: Observed) -> bool:
    return observed.session.spec.role == "Trainer"


def _finalize(observed: Observed, resolved: ResolvedSpec | Rejection, settings: Settings) -> Plan:
    """Let the head drop the model, then remove the finalizer, after a limited time in any case."""
    if not observed.session.has_finalizer or observed.session.deleted is None:
        return Plan()
    left = seconds_left(observed, observed.session.deleted, _removal_seconds(settings))
    request = _removal(observed, left)
    if request is not None:
        new_status = _status(observed, resolved, None)
        return reporting_plan(observed, [request], new_status, min(left, _RETRY_SECONDS))
    if left > 0 and _is_restarting(observed):
        return reporting_plan(observed, [], _status(observed, resolved, None), left)
    return Plan((SetFinalizer(present=False),))


def _removal_seconds(settings: Settings) -> float:
    return max(settings.last_checkpoint_seconds, _LEAST_REMOVAL_SECONDS)


def _removal(observed: Observed, left: float) -> RemoveModel | None:
    """Return the request that the head still needs, if it can serve one."""
    cluster, model_id = observed.pool.cluster, observed.session.spec.model_id
    if cluster is None or model_id is None or left <= 0 or not _may_have_model(observed):
        return None
    if cluster.endpoint is None or cluster.incarnation is None:
        return None
    if ("remove", cluster.incarnation) in observed.answers.completed_saves:
        return None
    return RemoveModel(cluster.name, cluster.endpoint, cluster.incarnation, model_id, left)


def _is_leaving(observed: Observed) -> bool:
    """Return whether a head still has to save and drop the model."""
    return _removal(observed, _LEAST_REMOVAL_SECONDS) is not None


def _is_restarting(observed: Observed) -> bool:
    """Return whether the head of the cluster may come back with the model."""
    cluster = observed.pool.cluster
    return cluster is not None and cluster.endpoint is None and cluster.has_pods


def _status(
    observed: Observed, resolved: ResolvedSpec | Rejection, decision: Decision | None
) -> TrainingSessionStatus:
    ready, steps = ready_after([_accepted(observed, resolved), *_later_steps(observed, decision)])
    cluster = observed.pool.cluster
    incarnation = cluster.incarnation if cluster is not None else None
    reported = common_status(
        observed,
        decision,
        (ready, steps),
        save=("remove", incarnation or ""),
        is_stopped=not _is_leaving(observed),
    )
    if cluster is None or not ready.is_reached:
        return reported
    return reported.model_copy(update={"endpoint": cluster.endpoint, "incarnation": incarnation})


def _accepted(observed: Observed, resolved: ResolvedSpec | Rejection) -> StepStatus:
    if isinstance(resolved, ResolvedSpec):
        return StepStatus(is_reached=True, reason=Reason.ACCEPTED)
    if observed.pool.cluster is not None:
        message = (
            "the session is being served, but would not be accepted with the current spec:"
            f" {resolved.message}"
        )
        return StepStatus(is_reached=True, reason=resolved.reason, message=message)
    return StepStatus(is_reached=False, reason=resolved.reason, message=resolved.message)


def _later_steps(observed: Observed, decision: Decision | None) -> Iterable[StepStatus]:
    """Yield the status of each step after the first one."""
    cluster, spec = observed.pool.cluster, observed.session.spec
    if decision is None:
        yield from [StepStatus(is_reached=False, reason=Reason.TERMINATING)] * 4
    elif decision.desired is not DesiredState.RUNNING:
        # Clients wait for the last checkpoint, which the error then names. The cluster of a pool
        # keeps the model of a suspended session.
        is_kept = spec.sharing == "Shared" and decision.desired is DesiredState.SUSPENDED
        is_leaving = _is_leaving(observed) and not is_kept
        reason = Reason.SUSPENDING if is_leaving else decision.reason
        stops = StepStatus(is_reached=False, reason=reason, message=decision.message)
        yield from [stops] * 4
    elif cluster is None and spec.sharing == "Dedicated":
        message = (
            f"cluster {spec.pool_cluster} is gone; the session gets its own pods when the head of"
            " that cluster has ended"
        )
        yield from [StepStatus(is_reached=False, reason=Reason.PROVISIONING, message=message)] * 4
    elif cluster is None and observed.limits.quota_message is not None:
        waits = StepStatus(
            is_reached=False, reason=Reason.QUOTA_EXCEEDED, message=observed.limits.quota_message
        )
        yield from [waits] * 4
    elif cluster is None:
        message = observed.pool.message or "waiting for a place in the pool"
        yield from [StepStatus(is_reached=False, reason=Reason.POOL_FULL, message=message)] * 4
    else:
        place = f"served by pool cluster {cluster.name}"
        reason = Reason.PLACED
        if observed.pool.move_failure is not None:
            place, reason = f"{place}; {observed.pool.move_failure}", Reason.MOVE_FAILED
        yield StepStatus(is_reached=True, reason=reason, message=place)
        if observed.pool.message is not None:
            # The head has no room for the run, although it serves others.
            waits = StepStatus(
                is_reached=False, reason=Reason.POOL_FULL, message=observed.pool.message
            )
            yield from [waits] * 3
            return
        has_others = spec.sharing == "Shared"
        yield from (
            _step_of_cluster(cluster, kind, has_others=has_others) for kind in SESSION_STEPS[2:]
        )


def _step_of_cluster(cluster: PoolCluster, kind: ConditionType, *, has_others: bool) -> StepStatus:
    """Return the status of a step of the cluster, which is that of all sessions on it.

    On a cluster of several owners it has the reason alone: the words of its head and its logs may
    name runs of others.
    """
    if cluster.endpoint is not None:
        step = find(cluster.conditions, kind)
        reason = Reason.READY if step is None else Reason(step.reason)
        return StepStatus(is_reached=True, reason=reason)
    ready = find(cluster.conditions, ConditionType.READY)
    why = _why_not_ready(ready, has_others=has_others)
    message = f"pool cluster {cluster.name} is not ready{why}"
    return StepStatus(is_reached=False, reason=Reason.POOL_CLUSTER_NOT_READY, message=message)


def _why_not_ready(ready: Condition | None, *, has_others: bool) -> str:
    if ready is None or ready.status == "True":
        return ""
    words = f": {ready.message}" if ready.message and not has_others else ""
    return f": {ready.reason}{words}"
