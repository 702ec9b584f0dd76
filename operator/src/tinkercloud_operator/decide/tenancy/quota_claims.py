"""What sessions hold of their tenant's limits, and what they wait for. Pure.

`tinkercloud_crds.quota_fields` has the rules. This module derives claims from the objects of
sessions. Those that people and GitOps tools create count as well.
"""

from collections.abc import Callable

from pydantic import ValidationError

from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_crds.quota_fields import Amounts, Claimant
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import SERVING_ROLES, TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.read.session_facts import age, condition, is_live
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve

_NOTHING = Amounts()

Offering = Callable[[str], Manifest | None]
"""Returns the active BaseModel of a model name, if there is one."""


def wants(session: Manifest, offering: Offering) -> Amounts:
    """Return what a session needs while it runs."""
    spec = session["spec"]
    if spec.get("role") in SERVING_ROLES:
        return _NOTHING
    if spec.get("sharing") == "Shared":
        return Amounts(sessions=1, models=int(spec.get("role", "Trainer") == "Trainer"))
    return Amounts(sessions=1, dedicated_gpus=_gpus(session, offering))


def _gpus(session: Manifest, offering: Offering) -> int:
    """Return the GPUs that the pods of a session request, or would request."""
    known = session.get("status", {}).get("maxGpus") or session.get("status", {}).get("gpus", 0)
    if known:
        return int(known)
    offer = offering(session["spec"].get("baseModel", ""))
    base_model = parsing.base_model(offer) if offer is not None else None
    try:
        spec = TrainingSessionSpec.model_validate(session["spec"])
    except ValidationError:
        return 0
    resolved = resolve(spec, base_model, 0)
    return resolved.most_gpus if isinstance(resolved, ResolvedSpec) else 0


def claimant(
    session: Manifest, wanted: Amounts, *, has_cluster: bool, is_admitted: bool, is_rejected: bool
) -> Claimant | None:
    """Return what a session holds and waits for; None if it has ended, or has no owner's quota.

    Args:
        session: the session.
        wanted: what it needs while it runs.
        has_cluster: whether its RayCluster exists.
        is_admitted: whether it was admitted, which its status may not show yet.
        is_rejected: whether its specification is rejected, so that it waits for nothing.
    """
    if wanted == _NOTHING or not is_live(session):
        return None
    reserved = condition(session, ConditionType.QUOTA_RESERVED)
    has_waited = reserved.get("reason") in {None, Reason.QUOTA_EXCEEDED}
    is_placed = has_cluster or bool(session["spec"].get("poolCluster"))
    has_run = "incarnation" in session.get("status", {})
    is_started = is_placed or is_admitted or has_run or not (has_waited or is_rejected)
    has_gpus = is_placed or is_admitted
    held = Amounts(
        sessions=wanted.sessions if is_started else 0,
        dedicated_gpus=wanted.dedicated_gpus if has_gpus else 0,
        models=wanted.models if is_started else 0,
    )
    is_leaving = "deletionTimestamp" in session["metadata"] or session["spec"].get("suspend")
    missing = _NOTHING
    if not (is_leaving or is_rejected):
        missing = Amounts(
            sessions=wanted.sessions - held.sessions,
            dedicated_gpus=0 if is_idle(session) else wanted.dedicated_gpus - held.dedicated_gpus,
            models=wanted.models - held.models,
        )
    return Claimant(session["metadata"]["name"], age(session), held, missing)


def was_rejected(session: Manifest) -> bool:
    """Return whether the specification of a session is rejected, according to its last status."""
    return condition(session, ConditionType.ACCEPTED).get("status") == "False"


def is_idle(session: Manifest) -> bool:
    """Return whether a session is suspended for idleness, and was not used since."""
    suspended = condition(session, ConditionType.SUSPENDED)
    if suspended.get("status") != "True" or suspended.get("reason") != Reason.IDLE:
        return False
    since, used = parse_time(suspended.get("lastTransitionTime")), parsing.last_activity(session)
    return used is None or since is None or used <= since


def gives_back(before: Claimant | None, after: Claimant | None) -> bool:
    """Return whether a session has given something back, or stopped waiting for it."""
    if before is None:
        return False
    if after is None:
        return True
    total, now = before.held + before.missing, after.held + after.missing
    return any(
        getattr(then, name) > getattr(later, name)
        for then, later in ((total, now), (before.held, after.held))
        for name in ("sessions", "dedicated_gpus", "models")
    )
