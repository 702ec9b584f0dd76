"""Decides what the warm spares of a BaseModel need: clusters, and who takes them over. Pure.

`warmSpares` is their number; the slots that a pool keeps free are decided in `slots_plan`.

A spare is a TrainingSession of role Spare: a cluster with the model loaded that serves nobody. A
session takes it over in two writes, each conditional on the object's resource version: the spare
gets the session as its owner, then the session gets the spare as its cluster. The first write
decides; a process that continues after it finds the owner and does the second. A spare serves one
session in its life, so nothing of an earlier one can be left on it.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime

from tinkercloud_crds.base_model import SparesStatus


@dataclass(frozen=True, slots=True)
class Spare:
    """A cluster that was started for a session that did not exist yet."""

    name: str
    is_ready: bool
    """Whether it serves requests."""
    is_stopping: bool
    """Whether it is being deleted."""
    taken_by: str | None = None
    """Uid of the session that has taken it over."""
    is_outdated: bool = False
    """Whether its pods were started with an earlier specification."""
    has_failed: bool = False
    """Whether it will never be ready: its pods did not start until the deadline."""
    problem: str | None = None
    """What keeps it from becoming ready without intervention, if anything does."""
    gpus: int = 0

    @property
    def is_free(self) -> bool:
        """Whether no session has taken it over, and it is not being deleted."""
        return self.taken_by is None and not self.is_stopping


@dataclass(frozen=True, slots=True)
class Taker:
    """A session that could use, or uses, a spare."""

    name: str
    uid: str
    cluster: str | None
    """The spare that serves it, which may no longer exist."""
    may_take: bool
    """Whether a spare is what it would start itself, and it has not started anything."""
    needs_cluster: bool
    """Whether it still uses its cluster: it has not ended and is not suspended."""


@dataclass(frozen=True, slots=True)
class SparesFacts:
    """Everything that decides about the spares of a BaseModel."""

    prefix: str
    """The names of spares are this and a number, such as `spare-qwen3-8b-1f0c-0`."""
    wanted: int
    """Number of spares that the BaseModel asks for; 0 if there is none."""
    spares: Sequence[Spare]
    takers: Sequence[Taker]
    """Oldest first."""
    sessions_short: int
    """Sessions of the namespace that wait for nodes or quota."""
    sessions_unplaced: int
    """Those, and sessions whose pods are being created: a new spare could take their place."""
    now: datetime
    closed_until: datetime | None = None
    """Until when no cluster is added, if it is closed."""
    ending: Mapping[str, datetime | None] = field(default_factory=dict)
    """Spares that were deleted and whose heads may still be saving, with the time until which they
    are waited for, if it is known."""

    @property
    def is_closed(self) -> bool:
        """Whether no cluster is added now."""
        return self.closed_until is not None and self.now < self.closed_until


@dataclass(frozen=True, slots=True)
class SparesPlan:
    """What to do about the spares of a BaseModel."""

    take: Mapping[str, str]
    """Spares that get a session as owner, by name of the session."""
    place: Mapping[str, str]
    """Spares that get known as the cluster of the session that owns them, by its name."""
    release: tuple[str, ...]
    """Sessions whose spare is gone; they get pods of their own."""
    create: tuple[str, ...]
    delete: tuple[str, ...]
    changes_at: datetime | None = None
    """When the plan may change although no object does."""


def plan_spares(facts: SparesFacts) -> SparesPlan:
    """Return what the spares need now. Executing it and planning again leads to an empty plan."""
    takes = _takes(facts)
    delete = _unused(facts) | _unwanted(facts, set(takes.values()))
    return SparesPlan(
        take=takes,
        place=_places(facts),
        release=_released(facts),
        create=_new_spares(facts, set(takes.values())),
        delete=tuple(sorted(delete)),
        changes_at=_changes_at(facts),
    )


def _changes_at(facts: SparesFacts) -> datetime | None:
    moments = [each for each in facts.ending.values() if each is not None]
    if facts.is_closed and facts.closed_until is not None:
        moments.append(facts.closed_until)
    return min(moments, default=None)


def spares_status(facts: SparesFacts) -> SparesStatus | None:
    """Return the status of the spares; None if there are none and none are wanted."""
    if not facts.wanted and not facts.spares:
        return None
    untaken = [spare for spare in facts.spares if spare.taken_by is None]
    ready = sum(spare.is_ready and spare.is_free for spare in untaken)
    return SparesStatus(
        ready=ready,
        clusters=len(untaken),
        taken=len(facts.spares) - len(untaken),
        gpus=sum(spare.gpus for spare in untaken),
        message=_message(facts),
        summary=f"{ready}/{facts.wanted}",
    )


def _message(facts: SparesFacts) -> str:
    if facts.wanted and facts.sessions_short:
        waiting = f"{facts.sessions_short} sessions wait for nodes or quota"
        return f"no spare is started: {waiting}"
    if _missing(facts) and facts.sessions_unplaced:
        return f"no spare is started: {facts.sessions_unplaced} sessions get their pods first"
    problems = [f"{spare.name}: {spare.problem}" for spare in facts.spares if spare.problem]
    return "; ".join(problems)[:1024]


def _takes(facts: SparesFacts) -> dict[str, str]:
    """Return which spare each session takes over: the oldest session first."""
    owners = {spare.taken_by for spare in facts.spares}
    waiting = [each.name for each in facts.takers if each.may_take and each.uid not in owners]
    usable = [
        spare.name
        for spare in facts.spares
        if spare.is_free and spare.is_ready and not spare.is_outdated and not spare.has_failed
    ]
    # As many as there are of both: the other sessions start pods of their own.
    return dict(zip(waiting, sorted(usable), strict=False))


def _places(facts: SparesFacts) -> dict[str, str]:
    """Return the sessions that own a spare and don't have it yet: a take was interrupted."""
    owned = {spare.taken_by: spare.name for spare in facts.spares if not spare.is_stopping}
    return {
        taker.name: owned[taker.uid]
        for taker in facts.takers
        if taker.may_take and taker.uid in owned
    }


def _released(facts: SparesFacts) -> tuple[str, ...]:
    """Return sessions whose spare is gone, or that name a cluster which is not theirs.

    They get pods of their own once the head of the spare has ended: before, theirs would not find
    what it saves.
    """
    owned = {(spare.name, spare.taken_by) for spare in facts.spares}
    return tuple(
        taker.name
        for taker in facts.takers
        if taker.cluster is not None
        and taker.cluster not in facts.ending
        and (taker.cluster, taker.uid) not in owned
    )


def _unused(facts: SparesFacts) -> set[str]:
    """Return taken spares whose session has ended, is suspended, or started its own pods."""
    users = {
        (taker.uid, taker.cluster)
        for taker in facts.takers
        if taker.needs_cluster and taker.cluster is not None
    }
    places = set(_places(facts).values())
    return {
        spare.name
        for spare in facts.spares
        if spare.taken_by is not None
        and not spare.is_stopping
        and spare.name not in places
        and ((spare.taken_by, spare.name) not in users or spare.has_failed)
    }


def _unwanted(facts: SparesFacts, taken: set[str]) -> set[str]:
    """Return free spares to delete: failed, too many, outdated, or for sessions that wait."""
    free = sorted(
        (spare for spare in facts.spares if spare.is_free and spare.name not in taken),
        key=lambda spare: (not spare.has_failed, not spare.is_outdated, spare.is_ready, spare.name),
    )
    failed = sum(spare.has_failed for spare in free)
    stopping = sum(spare.is_stopping for spare in facts.spares)
    # Those that are stopping make room already.
    for_others = max(0, facts.sessions_short - stopping)
    number = max(failed, len(free) - facts.wanted, for_others)
    outdated = any(spare.is_outdated for spare in free) and not stopping
    if outdated and all(spare.is_ready for spare in free):
        # One after the other, so that the others can be taken meanwhile.
        number = max(number, 1)
    return {spare.name for spare in free[:number]}


def _new_spares(facts: SparesFacts, taken: set[str]) -> tuple[str, ...]:
    number = 0 if facts.sessions_unplaced or facts.is_closed else _missing(facts, taken)
    used = {spare.name for spare in facts.spares} | {taker.cluster for taker in facts.takers}
    names = (f"{facts.prefix}-{index}" for index in range(len(used) + number))
    return tuple([name for name in names if name not in used][:number])


def _missing(facts: SparesFacts, taken: Set[str] = frozenset()) -> int:
    """Return how many spares are wanted beyond those that no session takes or has taken."""
    kept = [
        spare
        for spare in facts.spares
        # One that is being deleted still has its pods, unless a session has used it.
        if spare.taken_by is None and spare.name not in taken
    ]
    return max(0, facts.wanted - len(kept))
