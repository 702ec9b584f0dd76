"""Decides which sessions of a pool are moved to other clusters. Pure.

A move has three steps, each of which can be repeated: the target is recorded on the session; the
head of its cluster suspends the model and refuses it from then on; the session is placed on the
target, where the model is resumed. A session that is being moved takes a slot on both clusters.

If the target is lost and there is no other one, the session is *taken back*: its own cluster is
recorded as the target, so that no operator can place it elsewhere any more; the head continues the
model; the record is removed.

If a head can't give a model away, for example because the checkpoint store is down, the record is
removed, so that the run continues where it is, and the move starts again after a pause.

Sessions are moved from clusters that are drained, outdated or on cordoned nodes, and from an almost
empty cluster if the others have enough room for its sessions (*defragmentation*). Before all of
them, and before new sessions get places, those are moved whose model has no room where they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice

from tinkercloud_operator.decide.pool.pool_model import Cluster, PoolFacts, PoolSession

MAX_MOVES = 4
"""Sessions of a pool that are moved at a time; each is written to the store and read again."""
_RETRY = timedelta(seconds=5)
"""Interval between two requests to a head that has not given a model away."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves of a pool."""

    start: Mapping[str, str]
    """New targets, by name of the session."""
    cancel: tuple[str, ...]
    """Sessions that are not moved after all, because the head of their cluster can't give them
    away or has taken them back."""
    ask: tuple[str, ...]
    """Sessions that the heads of their clusters are to give away."""
    take_back: tuple[str, ...]
    """Sessions that the heads of their clusters are to continue."""
    arrive: Mapping[str, str]
    """Clusters of sessions that are placed there now, by name of the session."""
    held: Mapping[str, str]
    """Why sessions that are to be moved stay for now, by name of the session."""
    homeless: int
    """Sessions that need another cluster and have no target yet."""
    without_room: int
    """Those of them for which no ready cluster has room."""
    changes_at: datetime | None
    """When the moves may change although no object does."""


def room_elsewhere(facts: PoolFacts, load: Counter[str]) -> tuple[Mapping[str, str], PoolFacts]:
    """Find clusters for the sessions that their own has no room for.

    Args:
        facts: the facts about a pool.
        load: taken slots by cluster, to which those of the sessions are added.

    Returns:
        The clusters by name of the session, and the facts once the sessions have slots there.
    """
    found: dict[str, str] = {}
    for session in facts.without_room():
        target = None if _is_refused(session, facts.now) else _target(facts, session, load)
        if target is not None:
            found[session.name] = target
            facts = facts.with_placed(session, target)
            load[target] += 1
    return found, facts


def plan_moves(
    facts: PoolFacts, load: Counter[str], rooms: Mapping[str, str], *, has_waiting: bool
) -> Moves:
    """Return what to do about the moves of a pool.

    Args:
        facts: the facts about it.
        load: taken slots by cluster, to which those of new targets are added.
        rooms: the clusters that `room_elsewhere` has found.
        has_waiting: whether sessions wait for a place.
    """
    clusters = {cluster.name: cluster for cluster in facts.clusters}
    moving = [each for each in facts.sessions if _is_moving(each, clusters)]
    cancel = [each for each in moving if _stays(each, facts.now)]
    leaving = [each for each in moving if each not in cancel]
    stranded = [each for each in leaving if not _has_target(each, clusters)]
    room = max(0, MAX_MOVES - len(leaving))
    lacking = facts.without_room()
    others = [
        each for each in _to_move(facts, load, has_waiting=has_waiting) if each not in lacking
    ]
    held = [each for each in (*lacking, *others) if _is_refused(each, facts.now)]
    movable = [each for each in others if each not in held]
    found = dict(islice(rooms.items(), room))
    start, unfit = _targets(facts, (*stranded, *movable), load, room - len(found))
    returning = [each for each in stranded if each.name not in start and _serves(each, clusters)]
    for session in (*cancel, *returning):
        _release(session, clusters, load)
    back = {each.name: str(each.cluster) for each in returning if not _is_returning(each)}
    staying = [each for each in (*held, *cancel) if _is_refused(each, facts.now)]
    on_left = [
        each for each in (*movable, *staying, *returning) if clusters[each.cluster or ""].is_left
    ]
    homeless = {each.name for each in stranded if each not in returning}
    homeless |= {each.name for each in on_left}
    ready = [each for each in leaving if each not in stranded]
    ask = tuple(each.name for each in ready if not each.has_left)
    take_back = tuple(each.name for each in returning if _is_returning(each))
    return Moves(
        start={**found, **start, **back},
        cancel=tuple(each.name for each in cancel),
        ask=ask,
        take_back=take_back,
        arrive={each.name: str(each.moving_to) for each in ready if each.has_left},
        held={each.name: _why_held(each) for each in staying},
        homeless=len(homeless.difference(start)),
        without_room=len(homeless & unfit),
        changes_at=_changes_at(facts, staying, asks=bool(ask or take_back)),
    )


def _changes_at(facts: PoolFacts, staying: Iterable[PoolSession], *, asks: bool) -> datetime | None:
    if asks:
        return facts.now + _RETRY
    again = (each.refusal.until for each in staying if each.refusal is not None)
    moments = (_defragments_at(facts), *again)
    return min((each for each in moments if each is not None and each > facts.now), default=None)


def is_emptied(facts: PoolFacts, moves: Moves, cluster: str) -> bool:
    """Return whether sessions of a cluster are on their way to others, or about to be."""
    clusters = {each.name: each for each in facts.clusters}
    return any(
        _has_target(replace(each, moving_to=moves.start.get(each.name, each.moving_to)), clusters)
        for each in facts.sessions
        if each.cluster == cluster
        and each.waits_since is not None
        and each.name not in moves.cancel
    )


def _is_moving(session: PoolSession, clusters: Mapping[str, Cluster]) -> bool:
    """Return whether a session is being moved; one whose cluster is gone gets another place."""
    is_live = session.waits_since is not None
    return is_live and session.moving_to is not None and session.cluster in clusters


def _release(session: PoolSession, clusters: Mapping[str, Cluster], load: Counter[str]) -> None:
    """Free the slot that a session has on the target of a move that does not take place."""
    target = session.moving_to
    if target is not None and target in clusters and target != session.cluster:
        load[target] -= 1


def _stays(session: PoolSession, now: datetime) -> bool:
    """Return whether the head of a session's cluster keeps it, or has taken it back."""
    return (_is_returning(session) and session.is_back) or _is_refused(session, now)


def _is_refused(session: PoolSession, now: datetime) -> bool:
    """Return whether the head of a session's cluster can't give it away, and is not asked for now.

    A refusal of an earlier attempt does not end the next one, which starts after the pause.
    """
    refusal = session.refusal
    return refusal is not None and not session.has_left and now < refusal.until


def _why_held(session: PoolSession) -> str:
    why = session.refusal.message if session.refusal is not None else ""
    return f"moving it to another cluster has failed and is tried again later: {why}"


def _is_returning(session: PoolSession) -> bool:
    return session.moving_to == session.cluster


def _has_target(session: PoolSession, clusters: Mapping[str, Cluster]) -> bool:
    """Return whether a session is on its way to another cluster, and may be placed there."""
    target = clusters.get(session.moving_to or "")
    return target is not None and target.offers_slots and not _is_returning(session)


def _serves(session: PoolSession, clusters: Mapping[str, Cluster]) -> bool:
    """Return whether a session can be served by the cluster that it is on."""
    source = clusters[session.cluster or ""]
    return source.is_ready and source.is_usable


def _to_move(facts: PoolFacts, load: Counter[str], *, has_waiting: bool) -> list[PoolSession]:
    """Return the sessions that are to be moved and have no target, in order of urgency."""
    if facts.pool is None:
        return []
    left = sorted(
        (each for each in facts.clusters if (each.is_left or each.is_cordoned) and _gives(each)),
        key=lambda each: (
            not each.is_cordoned,
            not each.is_draining,
            load[each.name],
            each.name,
        ),
    )
    almost_empty = None if left or has_waiting else _almost_empty(facts, load)
    sources = left if almost_empty is None else [almost_empty]
    return [each for source in sources for each in _movable(facts, source)]


def _gives(source: Cluster) -> bool:
    """Return whether the head of a cluster can be asked to give sessions away."""
    return source.is_ready and source.is_usable


def _movable(facts: PoolFacts, source: Cluster) -> list[PoolSession]:
    return [
        each
        for each in facts.sessions
        if each.cluster == source.name and each.waits_since is not None and each.moving_to is None
    ]


def _targets(
    facts: PoolFacts, sessions: Iterable[PoolSession], load: Counter[str], room: int
) -> tuple[dict[str, str], set[str]]:
    """Return a target cluster for each session, and the names of sessions without one.

    Args:
        facts: the facts about the pool.
        sessions: the sessions; those that have lost their target are first.
        load: taken slots by cluster, to which those of the targets are added.
        room: how many sessions without a target before may get one now.
    """
    clusters = {cluster.name: cluster for cluster in facts.clusters}
    start: dict[str, str] = {}
    unfit: set[str] = set()
    for session in sessions:
        is_new = session.moving_to is None
        if is_new and room == 0:
            break
        target = _target(facts, session, load)
        if target is None:
            unfit.add(session.name)
            continue
        start[session.name] = target
        facts = facts.with_placed(session, target)
        load[target] += 1
        _release(session, clusters, load)
        room -= is_new
    return start, unfit


def _target(facts: PoolFacts, session: PoolSession, load: Counter[str]) -> str | None:
    """Return the cluster to move a session to: one that serves its owner, else the least loaded."""
    if facts.pool is None:
        return None
    owners = {(each.cluster, each.owner) for each in facts.sessions if each is not session}
    free = [
        each.name
        for each in facts.clusters
        if each.takes_moved and each.name != session.cluster
        if facts.has_slot(each, load[each.name], session)
    ]
    return min(
        free,
        key=lambda name: ((name, session.owner) not in owners, load[name], name),
        default=None,
    )


def _almost_empty(facts: PoolFacts, load: Counter[str]) -> Cluster | None:
    """Return the cluster with the fewest sessions, if the others have enough room for them.

    Enough leaves a quarter of a cluster free, beyond the spare slots: otherwise the next session
    would start another cluster. No session may have been created for as long as an unused cluster
    is kept.
    """
    pool = facts.pool
    quiet = _defragments_at(facts)
    if pool is None or facts.is_closed or quiet is None or quiet > facts.now:
        return None
    lasting = [each for each in facts.clusters if each.takes_moved]
    if len(lasting) < len(facts.clusters) or len(lasting) <= pool.min_clusters:
        return None
    source = min(lasting, key=lambda each: (load[each.name], each.name))
    sessions = _movable(facts, source)
    on_it = [each for each in facts.sessions if each.cluster == source.name]
    if not on_it or any(each.waits_since is None for each in on_it):
        return None
    others = [each for each in lasting if each is not source]
    margin = pool.spare_slots + max(1, pool.slots // 4)
    is_enough = facts.free(others, load) >= len(sessions) + margin
    return source if is_enough and _all_fit(facts, sessions, load) else None


def _all_fit(facts: PoolFacts, sessions: Iterable[PoolSession], load: Counter[str]) -> bool:
    """Return whether other clusters have room for all these sessions, one after another."""
    load = load.copy()
    for session in sessions:
        target = _target(facts, session, load)
        if target is None:
            return False
        facts = facts.with_placed(session, target)
        load[target] += 1
    return True


def _defragments_at(facts: PoolFacts) -> datetime | None:
    """Return from when on clusters may be emptied; None if there is nothing to empty."""
    if facts.pool is None or len(facts.clusters) <= facts.pool.min_clusters:
        return None
    created = _latest(each.waits_since for each in facts.sessions)
    if created is None:
        return None
    return created + timedelta(seconds=facts.pool.scale_down_after_seconds)


def _latest(moments: Iterable[datetime | None]) -> datetime | None:
    known: Sequence[datetime] = [each for each in moments if each is not None]
    return max(known, default=None)
