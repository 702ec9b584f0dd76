"""`reconcile(observed, settings) -> Plan`: what is to be done about one TrainingSession. Pure.

All paths lead here: an event about the session or a child, the clock, a restart, the resync. The
plan follows from what is seen alone, never from what changed, so that any step may be repeated,
or interrupted at any point and taken up by another process.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.children import engines, support_objects
from tinkercloud_operator.children.pods import Build, Json, Names
from tinkercloud_operator.children.raycluster import kept, ray_cluster
from tinkercloud_operator.decide.actions import (
    Action,
    Announce,
    Apply,
    AskHead,
    CreateSecret,
    Delete,
    DeleteSession,
    HoldFinalizer,
    Plan,
    WitnessSecret,
)
from tinkercloud_operator.decide.deadlines import next_deadline
from tinkercloud_operator.decide.drift import is_as_wanted
from tinkercloud_operator.decide.lifetime import Decision, Wanted, decide, stopping_since
from tinkercloud_operator.decide.status import endpoint, status
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.pinned import changes, started_with, told_head
from tinkercloud_operator.spec.resolved import (
    Refusal,
    Shape,
    admitted,
    idle_policy,
    longest_lifetime,
    resolve,
)
from tinkercloud_operator.spec.snapshot import ChildKey, Observed

_RETRY_SECONDS = 5.0
"""Between two tries to ask a head for something."""
_QUEUE_SECONDS = 60.0
"""Between two looks at how many sessions are ahead of one that waits for its turn."""


def reconcile(observed: Observed, settings: Settings) -> Plan:
    """Return what is to be done about a session now."""
    if observed.deleted is not None:
        return _let_go(observed, settings)
    offered = _offered(observed, settings)
    shape = _in_force(observed, offered, settings)
    decision = _decision(observed, offered)
    seen = status(observed, offered, shape, decision)
    moments = [each for each in (decision.changes_at, next_deadline(observed)) if each is not None]
    again = _until(observed, min(moments, default=None))
    match decision.wanted:
        case Wanted.RUNNING if stopping_since(observed) is not None:
            # A cluster made before this is written would be taken for the one that stops.
            return _plan(observed, [], seen, 0.0)
        case Wanted.RUNNING if observed.turn is not None and observed.ray_cluster is None:
            # It is looked at as soon as its turn comes; this keeps its message true.
            return _plan(observed, [], seen, min(_QUEUE_SECONDS, again or _QUEUE_SECONDS))
        case Wanted.RUNNING:
            return _plan(observed, _running(observed, shape, settings), seen, again)
        case Wanted.SUSPENDED:
            return _stop(observed, "suspend", settings, seen, again)
        case Wanted.FINISHED:
            return _stop(observed, "checkpoint", settings, seen, again)
        case Wanted.DELETED:
            return _plan(observed, [DeleteSession()], seen, None)


def _offered(observed: Observed, settings: Settings) -> Shape | Refusal:
    """Return what a session would be started with now."""
    shape = resolve(observed.spec, observed.base_model, observed.sessions_of_owner)
    if isinstance(shape, Shape):
        shape = admitted(shape, settings.kueue_groups)
    return _headed(observed, shape, settings) if isinstance(shape, Shape) else shape


def _in_force(observed: Observed, offered: Shape | Refusal, settings: Settings) -> Shape | Refusal:
    """Return what a session's children follow from: what its pods were started with, if it has any.

    One that Kueue holds back has none, and where no head has run yet nothing is lost: it is
    described anew, unless that is refused.
    """
    held = started_with(observed)
    if held is None or isinstance(_headed(observed, held, settings), Refusal):
        return offered
    is_free = observed.is_held_back or not _has_begun(observed) or not changes(held, offered)
    return offered if is_free and isinstance(offered, Shape) else held


def _has_begun(observed: Observed) -> bool:
    """Whether a head has run in the pods there are."""
    head, before = observed.head, observed.status
    is_started = head is not None and head.is_started
    return is_started or before.incarnation not in {None, before.saved_incarnation}


def _headed(observed: Observed, shape: Shape, settings: Settings) -> Shape | Refusal:
    """Return the shape, or a refusal if no head would start with it.

    The head's own configuration is the judge: it knows rules that the definitions can't have, and
    those that a BaseModel is older than.
    """
    try:
        support_objects.head_config(Build(Names(observed.name), shape, settings))
    except ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        message = f"the head would reject this BaseModel's configuration: {'; '.join(problems)}"
        return Refusal(Reason.NOT_ALLOWED, message)
    return shape


def _decision(observed: Observed, offered: Shape | Refusal) -> Decision:
    """Return what a session is to be. One that is refused is suspended and ends as others do."""
    spec, base_model = observed.spec, observed.base_model
    # Without pods, a refused session waits to be allowed: that is not idleness.
    is_judged = isinstance(offered, Shape) or observed.has_pods
    idle = idle_policy(spec, base_model) if is_judged else None
    deadline = base_model.sessions.start_deadline_seconds if base_model is not None else None
    return decide(observed, idle, longest_lifetime(spec, base_model), deadline)


def _running(observed: Observed, shape: Shape | Refusal, settings: Settings) -> Iterable[Action]:
    """Yield what makes a session run: its finalizer first, its pods last."""
    if not isinstance(shape, Shape):
        return
    build = Build(Names(observed.name), shape, settings, told_head(observed, shape))
    if observed.spec.role == "Trainer" and not observed.has_finalizer:
        yield HoldFinalizer(held=True)
    if not observed.has_kuberay or observed.kuberay_gap or observed.has_predecessors:
        return
    if shape.devices is not None and not observed.has_device_claims:
        return
    if not observed.has_secret:
        secret = _owned(support_objects.token_secret(build), observed)
        yield CreateSecret(secret, support_objects.SECRET_KEYS)
        yield WitnessSecret(secret)
    for manifest in children(build):
        wanted, live = _owned(manifest, observed), observed.children.get(key_of(manifest))
        is_cluster = manifest["kind"] == "RayCluster"
        if not is_as_wanted(kept(wanted, live) if is_cluster else wanted, live):
            yield Apply(wanted)


def children(build: Build) -> list[Json]:
    """Return the children of a running session, without their owner, in the order they are made."""
    policies = [support_objects.network_policy(build)] if build.settings.network_policies else []
    has_engines = build.shape.sampler.backend == "sglang"
    services = [engines.engines_service(build)] if has_engines else []
    return [
        support_objects.config_map(build),
        *policies,
        support_objects.disruption_budget(build),
        *support_objects.claim_templates(build),
        support_objects.head_service(build),
        *services,
        ray_cluster(build),
    ]


def key_of(manifest: Json) -> ChildKey:
    """Return the key of a child."""
    return ChildKey(str(manifest["kind"]), str(manifest["metadata"]["name"]))


def _owned(manifest: Json, observed: Observed) -> Json:
    metadata = manifest["metadata"]
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "name": observed.name,
        "uid": observed.uid,
        "controller": True,
    }
    own = {
        labels.SESSION_LABEL: observed.name,
        labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
    }
    placed = {
        **metadata,
        "namespace": observed.namespace,
        "labels": {**own, **metadata.get("labels", {})},
        "ownerReferences": [owner],
    }
    return {**manifest, "metadata": placed}


def _stop(
    observed: Observed,
    what: Literal["suspend", "checkpoint"],
    settings: Settings,
    seen: TrainingSessionStatus,
    again: float | None,
) -> Plan:
    """Let the head save what there is, then let the pods go; never wait for it without end."""
    if observed.ray_cluster is None:
        return _plan(observed, _unneeded(observed), seen, again)
    began = stopping_since(observed)
    left = _left(observed, began or observed.now, settings.stop_seconds)
    ask = _question(observed, what, left)
    if ask is not None and began is None:
        # A head that was asked serves nobody any more: whoever takes over must know that it was.
        return _plan(observed, [], seen, 0.0)
    if ask is not None:
        return _plan(observed, [ask], seen, min(left, _RETRY_SECONDS))
    if left > 0 and not _is_written(observed, seen):
        return _plan(observed, [], seen, 0.0)
    is_going = "deletionTimestamp" in observed.ray_cluster["metadata"]
    end = [] if is_going else [Delete(ChildKey("RayCluster", observed.name))]
    return _plan(observed, end, seen, again)


def _unneeded(observed: Observed) -> Iterable[Action]:
    """Yield what deletes the children that a session without pods has no use for.

    Its Secret stays, with its witness: whoever knows the head's token may use it after a resume.
    """
    if observed.pods:
        return
    witness_key = ChildKey("ConfigMap", Names(observed.name).token_secret)
    for key, child in observed.children.items():
        if key != witness_key and "deletionTimestamp" not in child["metadata"]:
            yield Delete(key)


def _let_go(observed: Observed, settings: Settings) -> Plan:
    """Ask the head of a deleted session for a last checkpoint; then, or after a while, let go."""
    if not observed.has_finalizer or observed.deleted is None:
        return Plan()
    offered = _offered(observed, settings)
    seen = status(observed, offered, _in_force(observed, offered, settings), None)
    left = _left(observed, observed.deleted, settings.last_checkpoint_seconds)
    ask = _question(observed, "checkpoint", left)
    if ask is not None:
        return _plan(observed, [ask], seen, min(left, _RETRY_SECONDS))
    if left > 0 and not _is_written(observed, seen):
        return _plan(observed, [], seen, 0.0)
    return Plan((HoldFinalizer(held=False),))


def _left(observed: Observed, began: datetime, patience_seconds: float) -> float:
    """Return for how many seconds a head is still waited for."""
    return (began + timedelta(seconds=patience_seconds) - observed.now).total_seconds()


def _is_written(observed: Observed, seen: TrainingSessionStatus) -> bool:
    """Whether the status says what the head has saved: once it is gone, nobody can ask it."""
    written = observed.status
    return (written.saved_incarnation, written.latest_checkpoint) == (
        seen.saved_incarnation,
        seen.latest_checkpoint,
    )


def _question(
    observed: Observed, what: Literal["suspend", "checkpoint"], left: float
) -> AskHead | None:
    """Return what the head is still to be asked; None if it has done it, or can't any more."""
    head = observed.head
    if head is None or left <= 0:
        return None
    done = (what, head.incarnation)
    # One that saves what it holds, to end, is not ready for anything else.
    if done in observed.answers or not (head.is_ready or done in observed.asked):
        return None
    return AskHead(what, endpoint(observed), head.incarnation, left)


def _until(observed: Observed, moment: datetime | None) -> float | None:
    return None if moment is None else max(0.0, (moment - observed.now).total_seconds())


def _plan(
    observed: Observed,
    actions: Iterable[Action],
    seen: TrainingSessionStatus,
    look_again_seconds: float | None,
) -> Plan:
    return Plan(
        tuple(actions),
        _announcement(observed, seen),
        seen if seen != observed.status else None,
        look_again_seconds,
    )


def _announcement(observed: Observed, seen: TrainingSessionStatus) -> Announce | None:
    """Return the Event that a new reason is worth."""
    before = find(observed.status.conditions, ConditionType.READY)
    ready = find(seen.conditions, ConditionType.READY)
    stalled = find(seen.conditions, ConditionType.STALLED)
    if ready is None or (before is not None and before.reason == ready.reason):
        return None
    is_warning = stalled is not None and stalled.status == "True"
    return Announce(Reason(ready.reason), ready.message or ready.reason, is_warning)
