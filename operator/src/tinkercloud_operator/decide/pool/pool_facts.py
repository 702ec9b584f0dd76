"""Reads the facts about the pool of a BaseModel from its objects. Pure."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec, Pool
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import SERVING_ROLES, Lora
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pods.failure_limits import PERSISTENT_FAILURES
from tinkercloud_operator.decide.pool.head_answers import HeadMemory
from tinkercloud_operator.decide.pool.pool_model import Cluster, PoolFacts, PoolSession, Refusal
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.read.session_facts import age, condition, is_live
from tinkercloud_operator.decide.session.lifetime import ACTIVITY_DELAY
from tinkercloud_operator.spec.observed import FailedSave
from tinkercloud_operator.spec.pool_slots import pool_of

_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 900.0
"""Pause after a head could not give a model away; it doubles with each further failure. The run's
requests are held during an attempt, so that attempts must be rare."""
_DEFAULT_RANK = int(Lora().rank)
_NAME_LENGTH = 21
"""Maximum length of the BaseModel's name within names of clusters, which are limited to 40."""


def is_cluster(session: Manifest) -> bool:
    """Return whether the pods of a session serve others: a cluster of a pool, or a spare."""
    return session["spec"].get("role") in SERVING_ROLES


def is_of_pool(session: Manifest) -> bool:
    """Return whether a session is a cluster of a pool."""
    return bool(session["spec"].get("role") == "Pool")


def taken_by(spare: Manifest) -> str | None:
    """Return the uid of the session that has taken over a spare, if one has."""
    owners = spare["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner["kind"] == "TrainingSession"), None)


def is_in_pool(session: Manifest) -> bool:
    """Return whether a session has, or waits for, a place in a pool."""
    return bool(session["spec"].get("sharing") == "Shared")


def pool_facts(
    model_name: str,
    active: Manifest | None,
    sessions: Iterable[Manifest],
    *,
    deleting: Set[str],
    given_away: Set[tuple[str, str]],
    taken_back: Set[tuple[str, str]],
    failed: Mapping[tuple[str, str], FailedSave],
    now: datetime,
    cordoned: Set[str] = frozenset(),
    measured: Mapping[str, HeadMemory] = MappingProxyType({}),
    ending: Mapping[str, datetime | None] = MappingProxyType({}),
) -> PoolFacts:
    """Return the facts about the pool of a model name.

    Args:
        model_name: `spec.modelName` of the BaseModel.
        active: the active BaseModel of that name, if there is one.
        sessions: all sessions of that name.
        deleting: uids of clusters whose deletion was requested, whether it is visible yet or not.
        given_away: sessions whose models heads have given away, with the head's incarnation.
        taken_back: sessions whose models they have taken back.
        failed: failures to give models away, by session and the head's incarnation.
        now: the current time.
        cordoned: clusters that have pods on cordoned nodes.
        measured: what the memory of heads holds, by incarnation.
        ending: clusters that were deleted and whose heads have not ended, with the time until
            which they are waited for.
    """
    offered = active or {"metadata": {"name": model_name, "deletionTimestamp": ""}}
    metadata = offered["metadata"]
    is_active = "deletionTimestamp" not in metadata
    listed = sorted(sessions, key=age)
    clusters = [
        replace(_cluster(each, deleting), is_cordoned=each["metadata"]["name"] in cordoned)
        for each in listed
        if is_of_pool(each)
    ]
    incarnations = {each.name: each.incarnation or "" for each in clusters}
    placed = [
        _pool_session(each, incarnations, given_away, taken_back, failed)
        for each in listed
        if is_in_pool(each)
    ]
    return PoolFacts(
        prefix=cluster_prefix("pool", metadata["name"]),
        pool=_pool(parsing.base_model(offered)) if is_active else None,
        clusters=_with_memory(clusters, placed, measured),
        sessions=placed,
        now=now,
        closed_until=parse_time(metadata.get("annotations", {}).get(labels.POOL_CLOSED_UNTIL)),
        ending=ending,
    )


def _with_memory(
    clusters: Sequence[Cluster], sessions: Sequence[PoolSession], measured: Mapping[str, HeadMemory]
) -> list[Cluster]:
    """Add what heads have measured; one that has not yet is taken to be like the smallest one."""
    known = {each.name: measured.get(each.incarnation or "") for each in clusters}
    counts = (each.most_models for each in known.values() if each is not None)
    least = min((most for most in counts if most is not None), default=None)
    samplers = Counter(session.cluster for session in sessions if session.model_id is None)
    found = []
    for cluster in clusters:
        memory = known[cluster.name]
        capacity = memory.capacity if memory is not None else None
        most = memory.most_models if memory is not None else None
        held = frozenset(memory.held if memory is not None else ())
        if most is None:
            most = least
        found.append(
            replace(
                cluster,
                has_reported=memory is not None,
                held=held,
                is_full=memory is not None and memory.is_full,
                most_sessions=None if most is None else most + samplers[cluster.name],
                capacity=capacity,
                pending=_pending(cluster.name, sessions, held),
            )
        )
    return found


def _pending(cluster: str, sessions: Sequence[PoolSession], held: Set[str]) -> Mapping[str, int]:
    """Return the ranks of the runs of a cluster that its head did not hold when it measured."""
    return {
        each.name: each.rank
        for each in sessions
        if cluster in {each.cluster, each.moving_to} and each.rank and each.model_id not in held
    }


def cluster_prefix(kind: str, name: str) -> str:
    """Return the beginning of the names of a BaseModel's clusters: readable and unique."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_NAME_LENGTH].strip("-")
    return f"{kind}-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _pool(offer: BaseModelSpec | None) -> Pool | None:
    if offer is None or offer.sharing != "Shared":
        return None
    return pool_of(offer)


def _cluster(session: Manifest, deleting: Set[str]) -> Cluster:
    metadata, ready = session["metadata"], condition(session, ConditionType.READY)
    status = session.get("status", {})
    is_ready = ready.get("status") == "True" and not session["spec"].get("suspend")
    used = parsing.last_activity(session)
    moments = [
        parse_time(metadata["creationTimestamp"]),
        parse_time(ready["lastTransitionTime"]) if is_ready else None,
        used + ACTIVITY_DELAY if used is not None else None,
    ]
    stalled = condition(session, ConditionType.STALLED)
    is_stalled = stalled.get("status") == "True"
    return Cluster(
        name=metadata["name"],
        is_ready=is_ready,
        has_failed=ready.get("reason") in PERSISTENT_FAILURES or not is_live(session),
        is_suspended=bool(session["spec"].get("suspend")),
        is_stopping="deletionTimestamp" in metadata or metadata["uid"] in deleting,
        unused_since=max(moment for moment in moments if moment is not None),
        is_outdated=condition(session, ConditionType.ACCEPTED).get("reason") == Reason.CHANGE_WAITS,
        is_draining=metadata.get("annotations", {}).get(labels.DRAIN) == "true",
        gpus=status.get("gpus", 0),
        endpoint=status.get("endpoint"),
        incarnation=status.get("incarnation"),
        # The message may name runs of other owners.
        problem=stalled["reason"] if is_stalled else None,
    )


def _pool_session(
    session: Manifest,
    incarnations: Mapping[str, str],
    given_away: Set[tuple[str, str]],
    taken_back: Set[tuple[str, str]],
    failed: Mapping[tuple[str, str], FailedSave],
) -> PoolSession:
    spec, metadata = session["spec"], session["metadata"]
    name, cluster = metadata["name"], spec.get("poolCluster")
    is_run, head = spec.get("role") != "Sampler", (name, incarnations.get(cluster or "", ""))
    has_finished = "finishedTime" in session.get("status", {})
    return PoolSession(
        name=name,
        owner=str(spec.get("owner", "")),
        # The head has dropped the model of a finished run, so that its slot is free.
        cluster=None if has_finished else cluster,
        waits_since=parse_time(metadata["creationTimestamp"]) if _may_wait(session) else None,
        moving_to=None if has_finished else metadata.get("annotations", {}).get(labels.MOVING_TO),
        has_left=not is_run or head in given_away,
        is_back=not is_run or head in taken_back,
        model_id=spec.get("modelId") if is_run else None,
        rank=spec.get("lora", {}).get("rank", _DEFAULT_RANK) if is_run else 0,
        refusal=_refusal(failed.get(head)) if is_run else None,
        used_at=parsing.last_activity(session),
    )


def _refusal(failure: FailedSave | None) -> Refusal | None:
    """Return that a head can't give a model away now.

    A request without an answer is none: the head may have given the model away.
    """
    if failure is None or not failure.is_refused:
        return None
    doubled = _FIRST_PAUSE_SECONDS * 2.0 ** min(failure.attempts - 1, 10)
    pause = timedelta(seconds=min(doubled, _LONGEST_PAUSE_SECONDS))
    return Refusal(failure.message, failure.moment + pause)


def _may_wait(session: Manifest) -> bool:
    """Return whether a session may be given a place: it was accepted, and has not ended."""
    metadata, spec = session["metadata"], session["spec"]
    if "deletionTimestamp" in metadata or not is_live(session) or spec.get("suspend"):
        return False
    if spec.get("role") != "Sampler" and labels.FINALIZER not in metadata.get("finalizers", []):
        # It is set first, so that what a head holds for the session is dropped when it ends.
        return False
    if condition(session, ConditionType.QUOTA_RESERVED).get("reason") == Reason.QUOTA_EXCEEDED:
        return False
    return bool(condition(session, ConditionType.ACCEPTED).get("status") == "True")
