"""`reconcile(observed, settings) -> Plan`: the actions that one TrainingSession needs. Pure.

Every trigger leads here: an event about the session or a child, a timer, a restart, the resync. The
plan depends only on the observed state, never on what changed, so any step can be repeated, or be
interrupted and continued by another process.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.names import Names
from tinkercloud_crds.pods.shapes import HeadShape
from tinkercloud_crds.training_session import SERVING_ROLES, TrainingSessionStatus
from tinkercloud_operator.children import engines, support_objects
from tinkercloud_operator.children.pods import Build, Json
from tinkercloud_operator.children.raycluster import ray_cluster, updatable_fields
from tinkercloud_operator.decide.pods.deadlines import awaited_head, next_deadline
from tinkercloud_operator.decide.pods.drift import is_up_to_date
from tinkercloud_operator.decide.pods.engine_pods import engine_pods
from tinkercloud_operator.decide.pods.failure_limits import PERSISTENT_FAILURES
from tinkercloud_operator.decide.session.actions import (
    Action,
    Apply,
    CreateSecret,
    CreateSecretMarker,
    Delete,
    DeleteSession,
    Plan,
    SetFinalizer,
)
from tinkercloud_operator.decide.session.lifetime import (
    Decision,
    DesiredState,
    decision_about,
    idle_from,
    stopping_since,
)
from tinkercloud_operator.decide.session.pool_session import reconcile_in_pool
from tinkercloud_operator.decide.session.saving import (
    Kind,
    is_save_recorded,
    needs_save,
    save_requests,
    seconds_left,
    seconds_until,
)
from tinkercloud_operator.decide.session.session_program import (
    is_of_program,
    program_children,
    surplus_of_program,
)
from tinkercloud_operator.decide.session.status import is_ready, reporting_plan, status
from tinkercloud_operator.decide.tenancy.tenant_choices import choices_of_tenant
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Observed
from tinkercloud_operator.spec.pinned import pending_changes, pinned_head_config, pinned_spec
from tinkercloud_operator.spec.resolved import (
    Rejection,
    ResolvedSpec,
    check_pod_groups,
    resolve,
)

_QUEUE_SECONDS = 60.0
"""Interval at which the message of a queued session is refreshed."""


def reconcile(observed: Observed, settings: Settings) -> Plan:
    """Return the plan for a session."""
    if observed.is_in_pool:
        return reconcile_in_pool(observed, settings)
    if observed.session.deleted is not None:
        return _finalize(observed, settings)
    desired = _desired_spec(observed, settings)
    effective = _effective_spec(observed, desired, settings)
    decision = decision_about(observed, desired)
    new_status = status(observed, desired, effective, decision)
    moments = (decision.changes_at, next_deadline(observed), _counts_idle_at(observed, new_status))
    known = [each for each in moments if each is not None]
    recheck_seconds = seconds_until(observed, min(known, default=None))
    match decision.desired:
        case DesiredState.RUNNING if stopping_since(observed) is not None:
            # Record the end of the stop first: a new RayCluster would be mistaken for the old one.
            return reporting_plan(observed, [], new_status, 0.0)
        case DesiredState.RUNNING if _waits_to_start(observed):
            # The session is enqueued when it may start; this only refreshes its message.
            seconds = min(_QUEUE_SECONDS, recheck_seconds or _QUEUE_SECONDS)
            plan = reporting_plan(observed, [], new_status, seconds)
            return _with_program(plan, observed, decision, settings)
        case DesiredState.RUNNING:
            own = _actions_to_run(observed, effective, settings)
            program = _program_actions(observed, decision, settings, is_ready=is_ready(new_status))
            return reporting_plan(observed, [*own, *program], new_status, recheck_seconds)
        case DesiredState.SUSPENDED | DesiredState.FINISHED:
            stopping = _Stopping(decision, effective)
            plan = _stop(observed, stopping, settings, new_status, recheck_seconds)
            return _with_program(plan, observed, decision, settings)
        case DesiredState.DELETED:
            return reporting_plan(observed, [DeleteSession()], new_status, None)


def _counts_idle_at(observed: Observed, new_status: TrainingSessionStatus) -> datetime | None:
    """Return when the GPUs of a session will count as idle, if they may and don't yet."""
    is_used = is_ready(new_status) and new_status.idle_since is None
    return idle_from(observed) if is_used else None


def _waits_to_start(observed: Observed) -> bool:
    """Return whether a session may start no pods now: others come first, or a spare serves it."""
    messages = (observed.limits.start_order_message, observed.limits.quota_message)
    is_waiting = observed.pool.takes_spare or any(message is not None for message in messages)
    return is_waiting and observed.ray_cluster is None


def _desired_spec(observed: Observed, settings: Settings) -> ResolvedSpec | Rejection:
    """Return what the session would start with now, or why it may not start."""
    spec, limits = observed.session.spec, observed.limits
    resolved = resolve(spec, observed.base_model, limits.sessions_of_owner)
    if isinstance(resolved, ResolvedSpec):
        resolved = choices_of_tenant(spec, resolved, limits.tenant)
    if isinstance(resolved, ResolvedSpec):
        resolved = check_pod_groups(resolved, settings.kueue_groups)
    if isinstance(resolved, ResolvedSpec):
        resolved = _check_head_config(observed, resolved, settings)
    if isinstance(resolved, ResolvedSpec) and spec.program and settings.api_url is None:
        message = (
            "spec.program: the operator does not know the API server's URL; set"
            " TINKERCLOUD_OPERATOR_API_URL"
        )
        resolved = Rejection(Reason.NOT_ALLOWED, message)
    return resolved


def _effective_spec(
    observed: Observed, desired: ResolvedSpec | Rejection, settings: Settings
) -> ResolvedSpec | Rejection:
    """Return the spec that the session's children follow: the pinned one if its pods have one.

    While Kueue holds the RayCluster back there are no pods, and before a head has run there is
    nothing to lose: in both cases the desired spec applies at once, unless it is rejected.
    """
    pinned = pinned_spec(observed)
    if pinned is None or isinstance(_check_head_config(observed, pinned, settings), Rejection):
        return desired
    can_change = (
        observed.is_suspended_by_kueue
        or not _has_started(observed)
        or not pending_changes(pinned, desired)
    )
    return desired if can_change and isinstance(desired, ResolvedSpec) else pinned


def _has_started(observed: Observed) -> bool:
    """Return whether a head has run in the current pods."""
    head, before = observed.head, observed.session.status
    is_started = head is not None and head.is_started
    return is_started or before.incarnation not in {None, before.saved_incarnation}


def _check_head_config(
    observed: Observed, resolved: ResolvedSpec, settings: Settings
) -> ResolvedSpec | Rejection:
    """Return the spec, or a rejection if the head would reject its configuration.

    The configuration model of the head validates rules that the CRDs cannot express, or that are
    newer than the BaseModel.
    """
    try:
        support_objects.head_config(Build(Names(observed.session.name), resolved, settings))
    except ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        message = f"the head would reject this BaseModel's configuration: {'; '.join(problems)}"
        return Rejection(Reason.NOT_ALLOWED, message)
    return resolved


def _actions_to_run(
    observed: Observed, effective: ResolvedSpec | Rejection, settings: Settings
) -> Iterable[Action]:
    """Yield the actions that make a session run: the finalizer first, the pods last."""
    if not isinstance(effective, ResolvedSpec):
        return
    build = _build(observed, effective, settings)
    if observed.session.spec.role != "Sampler" and not observed.session.has_finalizer:
        yield SetFinalizer(present=True)
    platform = observed.platform
    if not platform.has_kuberay or platform.kuberay_gap or observed.children.predecessors:
        return
    if not _can_claim_devices(observed, effective):
        return
    yield from _support_actions(observed, build)
    if awaited_head(observed) is not None:
        # A new head would continue from what the old one has not written yet.
        return
    wanted, live = _owned(ray_cluster(build), observed), observed.ray_cluster
    if not is_up_to_date(updatable_fields(wanted, live), live):
        yield Apply(wanted)


def _actions_to_save(
    observed: Observed, effective: ResolvedSpec | Rejection, settings: Settings
) -> Iterable[Action]:
    """Yield the actions that keep a head reachable that is asked to save.

    A request needs the token in its Secret, the Service and the policy; a pod that is replaced
    meanwhile needs the configuration.
    """
    if not isinstance(effective, ResolvedSpec) or observed.ray_cluster is None:
        return
    if _can_claim_devices(observed, effective):
        yield from _support_actions(observed, _build(observed, effective, settings))


def _can_claim_devices(observed: Observed, effective: ResolvedSpec) -> bool:
    """Return whether the cluster serves the claims that the pods need, if they need any."""
    return effective.devices is None or observed.platform.has_device_claims


def _build(observed: Observed, effective: ResolvedSpec, settings: Settings) -> Build:
    return Build(
        Names(observed.session.name),
        effective,
        settings,
        pinned_head_config(observed, effective),
        engines=engine_pods(observed, effective),
    )


def _support_actions(observed: Observed, build: Build) -> Iterable[Action]:
    """Yield the actions that create or repair all children except the RayCluster.

    A head whose Secret was deleted accepts the new token once the kubelet has written it to the
    pod.
    """
    if not observed.children.has_secret:
        secret = _owned(support_objects.token_secret(build), observed)
        yield CreateSecret(secret, support_objects.SECRET_KEYS)
        yield CreateSecretMarker(secret)
    for manifest in _support_children(build):
        wanted = _owned(manifest, observed)
        if not is_up_to_date(wanted, observed.children.own.get(key_of(manifest))):
            yield Apply(wanted)


def _with_program(plan: Plan, observed: Observed, decision: Decision, settings: Settings) -> Plan:
    """Return the plan of a session that stops or has no pods, with that of its program."""
    program = _program_actions(observed, decision, settings, is_ready=False)
    return replace(plan, actions=(*program, *plan.actions))


def _program_actions(
    observed: Observed, decision: Decision, settings: Settings, *, is_ready: bool
) -> list[Action]:
    """Return what the session's program needs: its Job exists while it is to run."""
    actions: list[Action] = [Delete(key) for key in surplus_of_program(observed, decision)]
    for manifest in program_children(observed, decision, settings, is_ready=is_ready):
        wanted, live = _owned(manifest, observed), observed.children.own.get(key_of(manifest))
        # A Job cannot be changed: a running program keeps what it started with.
        is_job = manifest["kind"] == "Job"
        checked = {"metadata": wanted["metadata"]} if is_job else wanted
        if not is_up_to_date(checked, live):
            actions.append(Apply(wanted))
    return actions


def children(build: Build) -> list[Json]:
    """Return the children of a running session, without owner references, in creation order."""
    return [*_support_children(build), ray_cluster(build)]


def _support_children(build: Build) -> list[Json]:
    policies = [support_objects.network_policy(build)] if build.settings.network_policies else []
    has_engines = build.resolved.sampler.backend == "sglang"
    services = [engines.engines_service(build)] if has_engines else []
    return [
        support_objects.config_map(build),
        *policies,
        support_objects.disruption_budget(build),
        *support_objects.claim_templates(build),
        support_objects.head_service(build),
        *services,
    ]


def key_of(manifest: Json) -> ChildKey:
    """Return the key of a child."""
    return ChildKey(str(manifest["kind"]), str(manifest["metadata"]["name"]))


def _owned(manifest: Json, observed: Observed) -> Json:
    metadata = manifest["metadata"]
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "name": observed.session.name,
        "uid": observed.session.uid,
        "controller": True,
    }
    own = {
        labels.SESSION_LABEL: observed.session.name,
        labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
    }
    placed = {
        **metadata,
        "namespace": observed.session.namespace,
        "labels": {**own, **metadata.get("labels", {})},
        "ownerReferences": [owner],
    }
    return {**manifest, "metadata": placed}


@dataclass(frozen=True, slots=True)
class _Stopping:
    """How a session stops."""

    decision: Decision
    effective: ResolvedSpec | Rejection
    """The spec that its children follow, or why there is none."""


def _stop(
    observed: Observed,
    stopping: _Stopping,
    settings: Settings,
    new_status: TrainingSessionStatus,
    recheck_seconds: float | None,
) -> Plan:
    """Request a save from the head, wait for it, then delete the RayCluster.

    The wait is only limited if the session had to stop at a certain time.
    """
    if observed.ray_cluster is None:
        return reporting_plan(
            observed, _delete_support_objects(observed), new_status, recheck_seconds
        )
    started, decision = stopping_since(observed), stopping.decision
    head = _head_shape(observed, stopping.effective)
    stop_seconds = settings.stop_seconds_of(head)
    kind: Kind = "suspend" if decision.desired is DesiredState.SUSPENDED else "checkpoint"
    left = float(stop_seconds)
    if decision.urgent_since is not None:
        since = max(started or observed.now, decision.urgent_since)
        left = seconds_left(observed, since, stop_seconds)
    # A head that keeps failing while it loads will not save what its disk has.
    awaited = head if decision.reason not in PERSISTENT_FAILURES else None
    if left > 0 and needs_save(observed, kind, awaited):
        if started is None:
            # After a save request the head serves nothing else, so record the stop first: another
            # operator process that takes over must know of it.
            return reporting_plan(observed, [], new_status, 0.0)
        requests, wait_seconds = save_requests(observed, kind, left)
        repairs = _actions_to_save(observed, stopping.effective, settings)
        return reporting_plan(observed, [*requests, *repairs], new_status, wait_seconds)
    if left > 0 and not is_save_recorded(observed, new_status):
        return reporting_plan(observed, [], new_status, 0.0)
    # Without the budget, pods can be evicted even if the deletion of the RayCluster is delayed.
    keys = (
        ChildKey("PodDisruptionBudget", Names(observed.session.name).disruption_budget),
        ChildKey("RayCluster", observed.session.name),
    )
    live = {key: child for key, child in observed.children.own.items() if key in keys}
    deletions = [
        Delete(key)
        for key in keys
        if key in live and "deletionTimestamp" not in live[key]["metadata"]
    ]
    return reporting_plan(observed, deletions, new_status, recheck_seconds)


def _delete_support_objects(observed: Observed) -> Iterable[Action]:
    """Yield deletions of the children that a session without pods does not need.

    The Secret and its marker stay, so that clients with the head's token keep access after a
    resume. `_program_actions` decides about the children of a program.
    """
    if observed.has_pods:
        return
    marker_key = ChildKey("ConfigMap", Names(observed.session.name).token_secret)
    for key, child in observed.children.own.items():
        if key == marker_key or is_of_program(key, observed):
            continue
        if "deletionTimestamp" not in child["metadata"]:
            yield Delete(key)


def _finalize(observed: Observed, settings: Settings) -> Plan:
    """Request a last checkpoint for a deleted session, then remove the finalizer.

    The finalizer is also removed once the time for a last checkpoint has passed; for a cluster of a
    pool, which is suspended, once the time for that has.
    """
    if not observed.session.has_finalizer or observed.session.deleted is None:
        return Plan()
    desired = _desired_spec(observed, settings)
    effective = _effective_spec(observed, desired, settings)
    new_status = status(observed, desired, effective, None)
    head = _head_shape(observed, effective)
    # The runs on a pool cluster do not end with it: they are resumed elsewhere.
    is_pool = observed.session.spec.role in SERVING_ROLES
    kind: Kind = "suspend" if is_pool else "checkpoint"
    of_session = settings.last_checkpoint_seconds_of(head)
    seconds = settings.stop_seconds_of(head) if is_pool else of_session
    left = seconds_left(observed, observed.session.deleted, seconds)
    program = [Delete(key) for key in surplus_of_program(observed, None)]
    if left > 0 and needs_save(observed, kind, head):
        requests, wait_seconds = save_requests(observed, kind, left)
        repairs = _actions_to_save(observed, effective, settings)
        actions = [*program, *requests, *repairs]
        return reporting_plan(observed, actions, new_status, wait_seconds)
    if left > 0 and not is_save_recorded(observed, new_status):
        return reporting_plan(observed, [], new_status, 0.0)
    return Plan((SetFinalizer(present=False),))


def _head_shape(observed: Observed, effective: ResolvedSpec | Rejection) -> HeadShape | None:
    """Return the shape of a session's head, if it is known."""
    if isinstance(effective, ResolvedSpec):
        return effective.base_model.head
    return observed.base_model.head if observed.base_model is not None else None
