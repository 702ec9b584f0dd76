"""Reads the facts about the warm spares of a BaseModel from its objects. Pure."""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from datetime import datetime

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pods.failure_limits import PERSISTENT_FAILURES
from tinkercloud_operator.decide.pool.pool_facts import (
    cluster_prefix,
    is_cluster,
    taken_by,
)
from tinkercloud_operator.decide.pool.spare_clusters import Spare, SparesFacts, Taker
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.read.quota_messages import spares_hold
from tinkercloud_operator.decide.read.session_facts import age, condition, is_live
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve

_SHORT = frozenset({Reason.QUEUED, Reason.UNSCHEDULABLE, Reason.NAMESPACE_QUOTA_EXCEEDED})
"""Reasons of sessions that would start if other pods ended."""
_WITHOUT_CLUSTER = frozenset({"Suspending", "Suspended", "Finished"})
"""Phases of sessions whose cluster is no longer needed."""


def is_spare(session: Manifest) -> bool:
    """Return whether a session is a warm spare, taken or not."""
    return bool(session["spec"].get("role") == "Spare")


def is_short(session: Manifest) -> bool:
    """Return whether a session waits for nodes or quota that a spare may hold.

    A session that waits for a limit of its owner, or for a place in a pool, does not.
    """
    ready = _unready(session)
    if ready.get("reason") not in _SHORT:
        return False
    is_rejected = ready["reason"] == Reason.NAMESPACE_QUOTA_EXCEEDED
    return not is_rejected or spares_hold(ready.get("message", ""))


def is_unplaced(session: Manifest) -> bool:
    """Return whether a session has no nodes for all of its pods yet, but is to get them."""
    return is_short(session) or _unready(session).get("reason") == Reason.PROVISIONING


def _unready(session: Manifest) -> Manifest:
    """Return the `Ready` condition of a session with pods of its own that has yet to start."""
    if is_spare(session) or session["spec"].get("sharing") == "Shared" or not is_live(session):
        return {}
    ready = condition(session, ConditionType.READY)
    is_accepted = condition(session, ConditionType.ACCEPTED).get("status") == "True"
    return ready if is_accepted and ready.get("status") == "False" else {}


def spares_facts(
    model_name: str,
    active: Manifest | None,
    sessions: Iterable[Manifest],
    *,
    may_start: Callable[[Manifest], bool],
    resolved: Callable[[Manifest], ResolvedSpec | None],
    sessions_short: int,
    sessions_unplaced: int,
    deleting: Set[str],
    now: datetime,
) -> SparesFacts:
    """Return the facts about the spares of a model name.

    Args:
        model_name: `spec.modelName` of the BaseModel.
        active: the active BaseModel of that name, if there is one.
        sessions: all sessions of that name.
        may_start: returns whether a session has no RayCluster and does not wait for its tenant.
        resolved: returns what a session would start with, within what its tenant allows; None if
            it would be rejected.
        sessions_short: sessions of the namespace that wait for nodes or quota.
        sessions_unplaced: those, and sessions whose pods are being created.
        deleting: uids of spares whose deletion was requested, whether it is visible yet or not.
        now: the current time.
    """
    metadata: Manifest = active["metadata"] if active is not None else {"name": model_name}
    is_offered = active is not None and "deletionTimestamp" not in metadata
    offer = parsing.base_model(active) if active is not None and is_offered else None
    listed = sorted(sessions, key=age)
    shape = _shape_of_spares(offer)

    def fits(session: Manifest) -> bool:
        if shape is None or not (_is_new(session) and may_start(session)):
            return False
        wanted = resolved(session)
        return wanted is not None and _comparable(wanted) == shape

    return SparesFacts(
        prefix=cluster_prefix("spare", metadata["name"]),
        wanted=offer.warm_spares if offer is not None and offer.sharing == "Dedicated" else 0,
        spares=[_spare(each, deleting) for each in listed if is_spare(each)],
        takers=[
            _taker(each, may_take=fits(each))
            for each in listed
            if not is_cluster(each) and each["spec"].get("sharing") != "Shared"
        ],
        sessions_short=sessions_short,
        sessions_unplaced=sessions_unplaced,
        now=now,
        closed_until=parse_time(metadata.get("annotations", {}).get(labels.POOL_CLOSED_UNTIL)),
    )


def _shape_of_spares(offer: BaseModelSpec | None) -> ResolvedSpec | None:
    """Return what the spares of a BaseModel start; None if there are none."""
    if offer is None or not offer.warm_spares:
        return None
    spare = TrainingSessionSpec(base_model=offer.model_name, role="Spare", owner=labels.POOL_OWNER)
    found = resolve(spare, offer, 0)
    return _comparable(found) if isinstance(found, ResolvedSpec) else None


def _comparable(resolved: ResolvedSpec) -> ResolvedSpec:
    """Return a spec without the explanation of its plan."""
    return replace(resolved, plan=None)


def _is_new(session: Manifest) -> bool:
    """Return whether a session is a LoRA run of a client that has never had pods."""
    spec, status = session["spec"], session.get("status", {})
    is_run = spec.get("role", "Trainer") == "Trainer" and "lora" in spec and "modelId" in spec
    is_over = "deletionTimestamp" in session["metadata"] or not is_live(session)
    has_run = "incarnation" in status or status.get("phase") in _WITHOUT_CLUSTER
    is_stopped = bool(spec.get("suspend")) or has_run or is_over
    return is_run and not is_stopped and "program" not in spec and "poolCluster" not in spec


def _spare(session: Manifest, deleting: Set[str]) -> Spare:
    metadata, ready = session["metadata"], condition(session, ConditionType.READY)
    stalled = condition(session, ConditionType.STALLED)
    is_stalled = stalled.get("status") == "True"
    return Spare(
        name=metadata["name"],
        is_ready=ready.get("status") == "True" and not session["spec"].get("suspend"),
        is_stopping="deletionTimestamp" in metadata or metadata["uid"] in deleting,
        taken_by=taken_by(session),
        is_outdated=condition(session, ConditionType.ACCEPTED).get("reason") == Reason.CHANGE_WAITS,
        has_failed=ready.get("reason") in PERSISTENT_FAILURES or not is_live(session),
        problem=f"{stalled['reason']}: {stalled.get('message', '')}" if is_stalled else None,
        gpus=session.get("status", {}).get("gpus", 0),
    )


def _taker(session: Manifest, *, may_take: bool) -> Taker:
    is_over = not is_live(session)
    phase = session.get("status", {}).get("phase")
    return Taker(
        name=session["metadata"]["name"],
        uid=session["metadata"]["uid"],
        cluster=session["spec"].get("poolCluster"),
        may_take=may_take,
        needs_cluster=not is_over and phase not in _WITHOUT_CLUSTER,
    )
