"""Computes the status of a session: conditions, phase, counts. Pure."""

from collections.abc import Iterable, Mapping

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import (
    MAX_MESSAGE_LENGTH,
    NEVER_FITS,
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    find,
    moved,
    timestamp,
)
from tinkercloud_crds.names import Names
from tinkercloud_crds.training_session import Failing, Phase, TrainingSessionStatus, Workers
from tinkercloud_operator.decide.pods.engine_pods import engine_pods
from tinkercloud_operator.decide.pods.failure_limits import (
    PERSISTENT_FAILURES,
    current_failure,
    recent_restarts,
    restart_limit,
)
from tinkercloud_operator.decide.session.actions import Action, Plan, PostEvent
from tinkercloud_operator.decide.session.lifetime import Decision, DesiredState, idle_from
from tinkercloud_operator.decide.session.readiness import StepStatus, readiness
from tinkercloud_operator.decide.session.session_program import program_status
from tinkercloud_operator.spec.observed import Observed, SaveKey
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec

_FAILED_PODS = frozenset(
    {
        Reason.IMAGE_PULL_BACK_OFF,
        Reason.CONFIGURATION_ERROR,
        Reason.CRASH_LOOP,
        Reason.OUT_OF_MEMORY,
        Reason.OUT_OF_DISK,
    }
)
"""Reasons of pods that occupy a node but do not run."""
_NEEDS_HELP = (
    NEVER_FITS
    | _FAILED_PODS
    | {
        Reason.APPLY_FAILED,
        Reason.START_FAILED,
        Reason.RESTART_LIMIT,
        Reason.SAVE_FAILED,
        Reason.KUBERAY_SILENT,
        Reason.DELETION_STUCK,
    }
)
"""Reasons that make a session Stalled."""
_EXPECTED_STOPS = frozenset(
    {Reason.SUSPENDED, Reason.IDLE, Reason.FINISHED, Reason.LIFETIME_EXCEEDED}
)
"""Reasons of sessions that are without pods on purpose."""


def status(
    observed: Observed,
    desired: ResolvedSpec | Rejection,
    effective: ResolvedSpec | Rejection,
    decision: Decision | None,
) -> TrainingSessionStatus:
    """Return the status of a session.

    Args:
        observed: the observed session.
        desired: what the session would start with now, or why it may not start.
        effective: the spec that its children follow, or why there are none.
        decision: the desired state; None if the session is being deleted.
    """
    ready, steps = readiness(observed, desired, effective, decision)
    head = observed.head
    incarnation = head.incarnation if head is not None and head.is_started else None
    previous = observed.session.status
    has_restarted = _has_restarted(observed, incarnation)
    restarts = _recent_restarts(observed, decision, has_restarted=has_restarted)
    reported = common_status(
        observed,
        decision,
        (ready, steps),
        save=("checkpoint", previous.incarnation or ""),
        is_stopped=not observed.has_pods,
    )
    return reported.model_copy(
        update={
            "endpoint": endpoint(observed) if ready.is_reached else None,
            "incarnation": incarnation or previous.incarnation,
            "ray_cluster": observed.session.name if observed.ray_cluster is not None else None,
            "workers": _workers(observed, effective),
            "gpus": _gpus(observed, effective),
            "max_gpus": _max_gpus(observed, effective),
            "idle_since": _idle_since(observed) if ready.is_reached else None,
            "plan": effective.plan if isinstance(effective, ResolvedSpec) else previous.plan,
            "restarts": previous.restarts + has_restarted,
            "recent_restarts": restarts,
            "served_incarnation": incarnation if ready.is_reached else previous.served_incarnation,
            "saved_incarnation": _saved_incarnation(observed),
            "failing": (restart_limit(observed, restarts) if has_restarted else None)
            or _failing(observed, decision, ready),
            "program": program_status(observed, decision),
        }
    )


def common_status(
    observed: Observed,
    decision: Decision | None,
    steps: tuple[StepStatus, Mapping[ConditionType, StepStatus]],
    *,
    save: SaveKey,
    is_stopped: bool,
) -> TrainingSessionStatus:
    """Return the status of a session without what depends on who serves it.

    Args:
        observed: the observed session.
        decision: the desired state; None if the session is being deleted.
        steps: whether the session is ready, and its steps to that.
        save: the save that may have created a later checkpoint.
        is_stopped: whether nothing is left to save or to delete before the session has finished.
    """
    ready, by_type = steps
    previous, used = observed.session.status, observed.session.last_activity
    saved = observed.answers.completed_saves.get(save)
    is_over = decision is not None and decision.desired is DesiredState.FINISHED
    is_finishing = is_over and is_stopped and previous.finished_time is None
    return TrainingSessionStatus(
        observed_generation=observed.session.generation,
        phase=_phase(observed, decision, ready),
        conditions=_conditions(observed, ready, by_type, decision),
        incarnation=previous.incarnation,
        last_activity_time=timestamp(used) if used is not None else None,
        latest_checkpoint=saved or previous.latest_checkpoint,
        restarts=previous.restarts,
        served_incarnation=previous.served_incarnation,
        saved_incarnation=previous.saved_incarnation,
        finished_time=timestamp(observed.now) if is_finishing else previous.finished_time,
        message=ready.message[:MAX_MESSAGE_LENGTH] or None,
    )


def is_ready(status: TrainingSessionStatus) -> bool:
    """Return whether a status says that the session serves requests."""
    return status.endpoint is not None


def endpoint(observed: Observed) -> str:
    """Return the cluster-internal URL of a session's head."""
    return head_url(observed.session.name, observed.session.namespace)


def head_url(session: str, namespace: str) -> str:
    """Return the cluster-internal URL of the head of a session with that name."""
    return f"http://{Names(session).head_service}.{namespace}.svc:{labels.HEAD_PORT}"


def reporting_plan(
    observed: Observed,
    actions: Iterable[Action],
    new_status: TrainingSessionStatus,
    requeue_after_seconds: float | None,
) -> Plan:
    """Return a plan that writes the status if it differs, with the Event for it."""
    return Plan(
        tuple(actions),
        _ready_event(observed, new_status) or _move_event(observed, new_status),
        new_status if new_status != observed.session.status else None,
        requeue_after_seconds,
    )


def _ready_event(observed: Observed, new_status: TrainingSessionStatus) -> PostEvent | None:
    """Return the Event for a changed reason of the Ready condition, if it changed."""
    before = find(observed.session.status.conditions, ConditionType.READY)
    ready = find(new_status.conditions, ConditionType.READY)
    stalled = find(new_status.conditions, ConditionType.STALLED)
    if ready is None or (before is not None and before.reason == ready.reason):
        return None
    is_warning = stalled is not None and stalled.status == "True"
    return PostEvent(Reason(ready.reason), ready.message or ready.reason, is_warning)


def _move_event(observed: Observed, new_status: TrainingSessionStatus) -> PostEvent | None:
    """Return the Event for a failed move to another cluster, if it failed now."""
    kind = ConditionType.QUOTA_RESERVED
    before, place = (find(each.conditions, kind) for each in (observed.session.status, new_status))
    if place is None or place.reason != Reason.MOVE_FAILED:
        return None
    if before is not None and before.reason == place.reason:
        return None
    return PostEvent(Reason.MOVE_FAILED, place.message or place.reason, is_warning=True)


def _conditions(
    observed: Observed,
    ready: StepStatus,
    steps: Mapping[ConditionType, StepStatus],
    decision: Decision | None,
) -> list[Condition]:
    is_stalled = not ready.is_reached and ready.reason in _NEEDS_HELP
    is_settled = ready.is_reached or is_stalled or ready.reason in _EXPECTED_STOPS
    stable = StepStatus(is_reached=False, reason=Reason.STABLE)
    found = {
        **steps,
        ConditionType.READY: ready,
        ConditionType.RECONCILING: stable
        if is_settled
        else StepStatus(is_reached=True, reason=Reason.PROGRESSING, message=ready.message),
        ConditionType.STALLED: StepStatus(
            is_reached=True, reason=ready.reason, message=ready.message
        )
        if is_stalled
        else stable,
        ConditionType.SUSPENDED: _suspended(observed, decision),
    }
    if ready.is_reached and observed.session.degraded is not None:
        found[ConditionType.DURABILITY_DEGRADED] = StepStatus(
            is_reached=True, reason=Reason.WRITES_FAIL, message=observed.session.degraded
        )
    return [
        moved(
            observed.session.status.conditions,
            kind,
            truth(step),
            step.reason,
            step.message,
            generation=observed.session.generation,
            now=observed.now,
        )
        for kind, step in found.items()
    ]


def truth(step: StepStatus) -> ConditionStatus:
    """Return the condition status of a step."""
    if step.is_reached is None:
        return "Unknown"
    return "True" if step.is_reached else "False"


def _suspended(observed: Observed, decision: Decision | None) -> StepStatus:
    if decision is not None and decision.desired in {DesiredState.SUSPENDED, DesiredState.FINISHED}:
        if observed.has_pods:
            # The reason of a disruption lasts longer than the pod that is disrupted.
            is_disrupted = decision.reason is Reason.DISRUPTED
            reason = Reason.DISRUPTED if is_disrupted else Reason.SUSPENDING
            return StepStatus(is_reached=None, reason=reason, message=decision.message)
        if decision.desired is DesiredState.SUSPENDED:
            return StepStatus(is_reached=True, reason=decision.reason, message=decision.message)
    return StepStatus(is_reached=False, reason=Reason.RUNNING)


def _phase(observed: Observed, decision: Decision | None, ready: StepStatus) -> Phase:
    if observed.session.deleted is not None:
        return "Terminating"
    if ready.is_reached:
        return "Ready"
    if decision is not None and decision.desired is not DesiredState.RUNNING:
        if observed.has_pods:
            return "Suspending"
        if decision.reason in PERSISTENT_FAILURES:
            return "Failed"
        return "Suspended" if decision.desired is DesiredState.SUSPENDED else "Finished"
    if ready.reason in _NEEDS_HELP:
        return "Failed"
    phases: Mapping[Reason, Phase] = {
        Reason.QUEUED: "Queued",
        Reason.QUOTA_EXCEEDED: "Queued",
        Reason.NAMESPACE_QUOTA_EXCEEDED: "Queued",
        Reason.POOL_FULL: "Queued",
        Reason.HEAD_STARTING: "Loading",
        Reason.LOADING: "Loading",
    }
    if observed.ray_cluster is None:
        return phases.get(ready.reason, "Pending")
    return phases.get(ready.reason, "Provisioning")


def _gpus(observed: Observed, effective: ResolvedSpec | Rejection) -> int:
    holds_any = observed.ray_cluster is not None and not observed.is_suspended_by_kueue
    if not isinstance(effective, ResolvedSpec) or not holds_any:
        return 0
    more = engine_pods(observed, effective) - effective.samplers
    return effective.gpus + more * effective.sampler.gpus_per_replica


def _idle_since(observed: Observed) -> str | None:
    since = idle_from(observed)
    return timestamp(since) if since is not None and since <= observed.now else None


def _max_gpus(observed: Observed, effective: ResolvedSpec | Rejection) -> int | None:
    if not isinstance(effective, ResolvedSpec) or not effective.sampler.is_scaled:
        return None
    return effective.most_gpus if observed.ray_cluster is not None else None


def _workers(observed: Observed, effective: ResolvedSpec | Rejection) -> Workers:
    if not isinstance(effective, ResolvedSpec):
        return observed.session.status.workers
    head = observed.head
    by_head = int(head is not None and head.is_ready and not head.is_terminating)

    def ready(component: str, replicas: int) -> int:
        if replicas == 0:
            return by_head
        return sum(
            pod.is_ready and not pod.is_terminating
            for pod in (*observed.pods.required, *observed.pods.scaled)
            if pod.component == component
        )

    trains = effective.trainer is not None
    trainers = effective.trainers or int(trains)
    samplers = effective.sampler.replicas if effective.sampler.backend == "sglang" else 1
    if effective.sampler.is_scaled:
        samplers = engine_pods(observed, effective)
    trainers_ready = ready("trainer", effective.trainers) if trains else 0
    # A pod is ready when all of its containers are, including engines.
    colocated_ready = trainers_ready * effective.engines_per_trainer
    samplers_ready = (
        colocated_ready if effective.engines_per_trainer else ready("sampler", effective.samplers)
    )
    return Workers(
        trainers_ready=trainers_ready,
        trainers_desired=trainers,
        samplers_ready=samplers_ready,
        samplers_desired=samplers,
        trainers=f"{trainers_ready}/{trainers}",
        samplers=f"{samplers_ready}/{samplers}",
    )


def _has_restarted(observed: Observed, incarnation: str | None) -> bool:
    """Return whether a head that served requests ended unexpectedly."""
    before = observed.session.status.incarnation
    expected = {None, incarnation, observed.session.status.saved_incarnation}
    return incarnation is not None and before not in expected


def _recent_restarts(
    observed: Observed, decision: Decision | None, *, has_restarted: bool
) -> list[str]:
    """Return the restarts that count; a session that stops starts afresh."""
    if decision is None or decision.desired is not DesiredState.RUNNING:
        return []
    return recent_restarts(observed, has_restarted=has_restarted)


def _saved_incarnation(observed: Observed) -> str | None:
    """Return the last incarnation that saved its state before its pods were deleted."""
    incarnation = observed.session.status.incarnation
    if incarnation is not None and ("suspend", incarnation) in observed.answers.completed_saves:
        return incarnation
    return observed.session.status.saved_incarnation


def _failing(observed: Observed, decision: Decision | None, ready: StepStatus) -> Failing | None:
    """Return why the pods cannot run; a crashing container looks healthy between two crashes."""
    before = current_failure(observed)
    if decision is None or decision.reason in PERSISTENT_FAILURES:
        return observed.session.status.failing
    if ready.is_reached or decision.desired is not DesiredState.RUNNING or not observed.has_pods:
        return None
    if ready.reason not in _FAILED_PODS:
        return before
    since = before.since if before is not None else timestamp(observed.now)
    return Failing(since=since, message=ready.message[:MAX_MESSAGE_LENGTH])
