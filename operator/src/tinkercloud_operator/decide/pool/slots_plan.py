"""Decides what the pool of a BaseModel needs: clusters, places, and moves (`pool_moves`). Pure.

A session waits until a ready cluster has a free slot, and is placed there. One worker of one
process decides for a whole pool, so slots are never assigned twice. `pool.spareSlots`, the slots
that are kept free, are decided here; whole clusters that wait for a session (`warmSpares`), in
`spare_clusters`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate

from tinkercloud_crds.base_model import Pool, PoolStatus
from tinkercloud_operator.decide.pool.pool_model import (
    Cluster,
    PoolFacts,
    PoolSession,
    silent_at,
    size_of,
)
from tinkercloud_operator.decide.pool.pool_moves import Moves, plan_moves, room_elsewhere
from tinkercloud_operator.decide.tenancy.turns import in_turn


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What to do about a pool."""

    create: tuple[str, ...]
    """Names of clusters."""
    delete: tuple[str, ...]
    """Names of failed clusters, and of clusters without sessions that are surplus, unused or
    outdated."""
    places: Mapping[str, str]
    """Clusters of sessions that get a place now, by name of the session."""
    waiting: Mapping[str, str]
    """Why each of the sessions waits that have no place, or no room where they are, by name."""
    moves: Moves
    """Sessions that are to be moved to other clusters."""
    changes_at: datetime | None
    """When the plan may change although no object does."""


def plan_pool(facts: PoolFacts) -> PoolPlan:
    """Return what a pool needs now. Executing it and planning again gives an empty plan."""
    load = facts.load()
    lacking = facts.without_room()
    rooms, facts = room_elsewhere(facts, load)
    places: dict[str, str] = {}
    waiting: list[PoolSession] = []
    owners = {(session.cluster, session.owner) for session in facts.sessions}
    for session in _in_turn(facts, load):
        chosen = _place(facts, session, load, owners)
        if chosen is None:
            waiting.append(session)
            continue
        places[session.name] = chosen
        if session.moving_to in facts.names:
            load[session.moving_to] -= 1
        load[chosen] += 1
        facts = facts.with_placed(session, chosen)
        owners.add((chosen, session.owner))
    moves = plan_moves(facts, load, rooms, has_waiting=bool(waiting or lacking))
    # Those whose old head has not ended need a place when it has.
    later = _to_move_on(facts, places) + len(facts.waiting_for_heads())
    moves = replace(moves, homeless=moves.homeless + later)
    # Those that their head can't give away now need no other cluster yet.
    short = [*waiting, *(each for each in lacking if each.name not in {*rooms, *moves.held})]
    unneeded = _surplus_clusters(facts, short, load, moves.homeless) or _outdated_cluster(
        facts, load
    )
    delete = tuple(
        dict.fromkeys((*_failed_clusters(facts), *_drained_clusters(facts, load), *unneeded))
    )
    create = _new_clusters(facts, short, load, delete, moves)
    why = _why_waiting(facts, create, load)
    return PoolPlan(
        create=create,
        delete=delete,
        places=places,
        waiting={
            **_why_without_room(facts, lacking, rooms, moves, why),
            **{session.name: why for session in waiting},
            **_why_ending(facts),
        },
        moves=moves,
        changes_at=_changes_at(facts, short, load, moves),
    )


def pool_status(facts: PoolFacts) -> PoolStatus | None:
    """Return the status of a pool; None if there is none."""
    if facts.pool is None and not facts.clusters:
        return None
    models = sum(each.cluster in facts.names for each in facts.sessions)
    usable = [each for each in facts.clusters if not each.is_stopping]
    ready = sum(each.is_ready for each in usable)
    slots_by_cluster = {each.name: facts.slots_of(each) for each in usable}
    slots = sum(slots_by_cluster.values())
    return PoolStatus(
        clusters=len(facts.clusters),
        ready=ready,
        models=models,
        slots=slots,
        slots_by_cluster=slots_by_cluster,
        waiting=len(facts.unplaced()) + len(facts.without_room()),
        gpus=sum(each.gpus for each in facts.clusters),
        cluster_summary=f"{ready}/{len(facts.clusters)}",
        slot_summary=f"{models}/{slots}",
    )


def _to_move_on(facts: PoolFacts, places: Mapping[str, str]) -> int:
    """Return how many sessions get places on clusters from which they are moved again.

    They are placed there only if no other cluster has a slot.
    """
    left = {each.name for each in facts.clusters if each.is_left}
    return sum(cluster in left for cluster in places.values())


def _in_turn(facts: PoolFacts, load: Mapping[str, int]) -> Iterator[PoolSession]:
    """Yield the sessions that wait, in the order in which they get places."""
    places = Counter(each.owner for each in facts.sessions if each.cluster in load)
    return in_turn(facts.unplaced(), lambda session: session.owner, places)


def _place(
    facts: PoolFacts, session: PoolSession, load: Counter[str], owners: set[tuple[str | None, str]]
) -> str | None:
    """Return the cluster for a session: one that serves its owner, else the least loaded.

    A session that was being moved has a slot on its target. Outdated clusters come last, so that
    they can be replaced.
    """
    if facts.pool is None:
        return None
    target = session.moving_to
    free = [
        each.name
        for each in facts.clusters
        if each.is_ready and each.offers_slots and not each.is_cordoned
        if facts.has_slot(each, load[each.name] - (each.name == target), session)
    ]
    outdated = {cluster.name for cluster in facts.clusters if cluster.is_outdated}
    if target in free and target not in outdated:
        return target
    return min(
        free,
        key=lambda name: (name in outdated, (name, session.owner) not in owners, load[name], name),
        default=None,
    )


def _usable(facts: PoolFacts) -> list[Cluster]:
    return [each for each in facts.clusters if each.is_usable]


def _offering_slots(facts: PoolFacts) -> list[Cluster]:
    return [each for each in facts.clusters if each.offers_slots]


def _new_clusters(
    facts: PoolFacts,
    waiting: Sequence[PoolSession],
    load: Counter[str],
    delete: Sequence[str],
    moves: Moves,
) -> tuple[str, ...]:
    pool = facts.pool
    if pool is None or facts.is_closed:
        return ()
    usable = [cluster for cluster in _offering_slots(facts) if cluster.name not in delete]
    due = [session for session in waiting if not usable or _due(session, pool) <= facts.now]
    lasting = [cluster for cluster in usable if not cluster.is_left]
    # A run that waits fits none of the ready clusters, although a smaller one may.
    others = [each for each in usable if not each.is_ready or each.is_cordoned]
    wanted = max(
        len(due) + _spare_slots(pool, waiting, load) - facts.free(usable, load),
        len(due) - facts.free(others, load),
    )
    # Sessions on outdated clusters are moved to new ones, of which one is started after the other.
    # Free slots of ready ones are none for those that their memory has no room for.
    starting = [cluster for cluster in lasting if not cluster.is_ready]
    lacking = max(
        moves.homeless - facts.free(lasting, load),
        moves.without_room - facts.free(starting, load),
    )
    moved = min(lacking, pool.slots)
    # Rounded up: the last of several waiting sessions needs a cluster too.
    needed = -(-max(0, wanted, moved) // facts.slots_of_next())
    missing = pool.min_clusters - len(usable)
    # A cluster that is being deleted still has its pods.
    allowed = pool.max_clusters - len(facts.clusters)
    number = max(0, min(max(needed, missing), allowed))
    # A session that was placed on a lost cluster must not be mistaken for one on its successor.
    known = {name for each in facts.sessions for name in (each.cluster, each.moving_to)}
    taken = facts.names | known
    names = (f"{facts.prefix}-{index}" for index in range(len(taken) + number))
    return tuple([name for name in names if name not in taken][:number])


def _due(session: PoolSession, pool: Pool) -> datetime:
    """Return when a cluster may be started for a waiting session."""
    assert session.waits_since is not None  # noqa: S101 - it waits
    return session.waits_since + timedelta(seconds=pool.scale_up_after_seconds)


def _failed_clusters(facts: PoolFacts) -> tuple[str, ...]:
    """Return clusters that can't serve any more; their sessions get other places, if they have any.

    A cluster has no pods when its start has failed, so only saved state can be continued.
    """
    failed = [each for each in facts.clusters if each.has_failed and not each.is_stopping]
    return tuple(cluster.name for cluster in failed)


def _surplus_clusters(
    facts: PoolFacts, waiting: Sequence[PoolSession], load: Counter[str], homeless: int
) -> tuple[str, ...]:
    """Return clusters to delete: without sessions, and too many or unused for long enough."""
    usable = _offering_slots(facts) if facts.pool is not None else _usable(facts)
    least, most = (facts.pool.min_clusters, facts.pool.max_clusters) if facts.pool else (0, 0)
    empty = sorted(
        (cluster for cluster in usable if not load[cluster.name]),
        key=lambda each: (not each.is_left, each.is_ready, each.unused_since, each.name),
    )
    excess = max(0, len(_usable(facts)) - most)
    suspended = _suspended_clusters(facts, load)[:excess]
    surplus = empty[: excess - len(suspended)]
    # While sessions wait, a cluster that starts is needed, however long that takes.
    unused = [
        cluster
        for cluster in empty
        if not (waiting or homeless) and _unused_at(facts, cluster) <= facts.now
    ]
    chosen = tuple({cluster.name: None for cluster in (*surplus, *unused)})
    if facts.pool is not None:
        slots = {cluster.name: facts.slots_of(cluster) for cluster in usable}
        beyond = facts.free(usable, load) - _spare_slots(facts.pool, waiting, load)
        left = [beyond - taken for taken in accumulate(slots[name] for name in chosen)]
        chosen = chosen[: max(len(surplus), sum(each >= 0 for each in left))]
    return (*suspended, *chosen[: max(0, len(usable) - least)])


def _suspended_clusters(facts: PoolFacts, load: Counter[str]) -> list[str]:
    """Return clusters without sessions that an administrator has suspended; they offer no slots."""
    if facts.pool is None:
        return []
    idle = (each for each in _usable(facts) if each.is_suspended and not load[each.name])
    return sorted(cluster.name for cluster in idle)


def _spare_slots(pool: Pool, waiting: Sequence[PoolSession], load: Counter[str]) -> int:
    """Return how many slots must be free: none if the pool is not in use."""
    return pool.spare_slots if waiting or load.total() else 0


def _drained_clusters(facts: PoolFacts, load: Counter[str]) -> tuple[str, ...]:
    """Return clusters that are drained and have no sessions any more."""
    return tuple(each.name for each in _usable(facts) if each.is_draining and not load[each.name])


def _outdated_cluster(facts: PoolFacts, load: Counter[str]) -> tuple[str, ...]:
    """Return a cluster without sessions to replace, if all others work: one after the other."""
    if any(cluster.is_stopping or not cluster.is_ready for cluster in facts.clusters):
        return ()
    if facts.pool is not None and len(facts.clusters) < facts.pool.min_clusters:
        return ()
    outdated = [each.name for each in facts.clusters if each.is_outdated and not load[each.name]]
    return tuple(sorted(outdated)[:1])


def _unused_at(facts: PoolFacts, cluster: Cluster) -> datetime:
    """Return when a cluster without sessions may be deleted."""
    seconds = facts.pool.scale_down_after_seconds if facts.pool is not None else 0
    return cluster.unused_since + timedelta(seconds=seconds)


def _changes_at(
    facts: PoolFacts, waiting: Sequence[PoolSession], load: Counter[str], moves: Moves
) -> datetime | None:
    if facts.pool is None:
        return None
    moments = [_due(session, facts.pool) for session in waiting]
    moments += [each for each in (facts.closed_until, moves.changes_at) if each is not None]
    moments += [each for each in facts.ending.values() if each is not None]
    moments += [each for each in map(silent_at, facts.without_room()) if each is not None]
    if not waiting and len(_usable(facts)) > facts.pool.min_clusters:
        moments += [
            _unused_at(facts, cluster) for cluster in _usable(facts) if not load[cluster.name]
        ]
    return min((moment for moment in moments if moment > facts.now), default=None)


def _why_ending(facts: PoolFacts) -> dict[str, str]:
    """Return the messages of sessions whose cluster is gone and whose head has not ended."""
    return {
        session.name: (
            f"pool cluster {session.cluster} was deleted, but its head is still running and may be"
            " saving the state; the session gets another place when the head has ended"
        )
        for session in facts.waiting_for_heads()
    }


def _why_without_room(
    facts: PoolFacts,
    lacking: Iterable[PoolSession],
    rooms: Mapping[str, str],
    moves: Moves,
    why_waiting: str,
) -> dict[str, str]:
    """Return the messages of sessions without room on their cluster, unless they are moved now.

    Others share the cluster, so the messages have only numbers of it.
    """
    clusters = {each.name: each for each in facts.clusters}
    found = {}
    for session in lacking:
        cluster = clusters[session.cluster or ""]
        takes = ""
        if cluster.capacity is not None and session.rank:
            size = size_of(session, cluster.capacity)
            takes = f" of rank {session.rank} ({size} bytes)"
        is_next = session.name in rooms
        why = "other runs are moved first" if is_next else moves.held.get(session.name, why_waiting)
        found[session.name] = (
            f"the memory of pool cluster {cluster.name} has no room for its adapter{takes}, with"
            f" {len(cluster.held)} models there; it is moved when another has room: {why}"
        )
    return {name: message for name, message in found.items() if name not in moves.start}


def _why_waiting(facts: PoolFacts, create: Iterable[str], load: Counter[str]) -> str:
    """Return the message of all sessions that wait."""
    if facts.pool is None:
        return "the BaseModel has no pool"
    if facts.is_closed:
        return "the pool is closed: no cluster is added to it for now"
    usable = _offering_slots(facts)
    starting = [
        *(
            f"{each.name} ({each.problem})" if each.problem else each.name
            for each in usable
            if not each.is_ready
        ),
        *create,
    ]
    if starting:
        return f"waiting for a cluster of the pool to be ready: {', '.join(sorted(starting)[:4])}"
    slots = sum(map(facts.slots_of, usable))
    taken = f"all {slots} slots of the pool's clusters are taken"
    if facts.free((each for each in usable if not each.is_cordoned), load):
        taken = "the memory of the pool's clusters has no room for its adapter"
    elif any(map(facts.is_measured, usable)):
        taken += " (their memory has room for fewer models than pool.slotsPerCluster)"
    if len(facts.clusters) >= facts.pool.max_clusters:
        most = facts.pool.max_clusters
        return (
            f"{taken}, and there may be no more clusters (pool.maxClusters is {most}); another"
            " session must end, or an administrator can raise it"
        )
    return f"{taken}; another cluster is started soon (pool.scaleUpAfterSeconds)"
