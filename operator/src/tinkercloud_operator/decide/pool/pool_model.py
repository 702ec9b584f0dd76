"""What decides about the pool of a BaseModel: its clusters and its sessions, as plain data. Pure.

A session that shares a cluster is a session *of the pool*.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from tinkercloud_crds.base_model import Pool
from tinkercloud_protocol.heads.capacity import HeadCapacity

_SILENCE = timedelta(minutes=5)
"""How long after a client's last sign of life it may still wait for its model."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of a pool."""

    name: str
    is_ready: bool
    """Whether it serves requests."""
    is_stopping: bool
    """Whether it is being deleted."""
    unused_since: datetime
    """When it was last used, or when it became ready or was created if it never was."""
    is_outdated: bool = False
    """Whether its pods were started with an earlier specification."""
    has_failed: bool = False
    """Whether it will never be ready again: its pods did not start until the deadline."""
    is_suspended: bool = False
    """Whether an administrator has suspended it, so that its slots do not count."""
    gpus: int = 0
    """Number of GPUs that its pods request."""
    problem: str | None = None
    """The reason for which it can't become ready without intervention, if there is one."""
    is_draining: bool = False
    """Whether an administrator wants its sessions to be moved to others."""
    is_cordoned: bool = False
    """Whether it has pods on a cordoned node, so that it is suspended unless its sessions can be
    moved to others."""
    most_sessions: int | None = None
    """How many sessions fit by what its head has measured; None if that is unknown."""
    capacity: HeadCapacity | None = None
    """What its head says of models of any size; None if that is unknown."""
    has_reported: bool = False
    """Whether its head has said anything of its memory."""
    held: frozenset[str] = frozenset()
    """Ids of the runs whose models its head has, by its last answer."""
    is_full: bool = False
    """Whether its head says that one more model of the size of the largest has no room."""
    pending: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the runs that are placed here and not in `held`, by name of the run."""
    endpoint: str | None = None
    """URL of its head."""
    incarnation: str | None = None
    """Identity of its head's process."""

    @property
    def is_limited(self) -> bool:
        """Whether its memory may have no room for a session although it has a free slot."""
        return self.most_sessions is not None or self.capacity is not None

    @property
    def is_usable(self) -> bool:
        """Whether it serves sessions now, or will."""
        return not (self.is_stopping or self.has_failed)

    @property
    def offers_slots(self) -> bool:
        """Whether its free slots count."""
        return self.is_usable and not (self.is_suspended or self.is_draining)

    @property
    def is_left(self) -> bool:
        """Whether its sessions are to be moved to others."""
        return self.is_outdated or self.is_draining

    @property
    def takes_moved(self) -> bool:
        """Whether a session may be moved here."""
        return self.is_ready and self.offers_slots and not (self.is_left or self.is_cordoned)


@dataclass(frozen=True, slots=True)
class Refusal:
    """That a head could not give a model away, which it continues."""

    message: str
    """The head's words."""
    until: datetime
    """When it may be asked again."""


@dataclass(frozen=True, slots=True)
class PoolSession:
    """A session that has, or waits for, a place in a pool."""

    name: str
    owner: str
    cluster: str | None
    """The cluster that it is placed on, which may no longer exist."""
    waits_since: datetime | None
    """When it began to wait; None if it may not be given a place, because it was rejected, has
    ended or is suspended."""
    moving_to: str | None = None
    """The cluster that it is being moved to; its own if it is taken back."""
    has_left: bool = False
    """Whether the head of its cluster has given it away, or has nothing of it."""
    is_back: bool = False
    """Whether the head of its cluster has taken it back, or has nothing of it."""
    model_id: str | None = None
    """The run that it trains, which a head must give away; None for samplers."""
    rank: int = 0
    """Rank of its adapter; 0 for samplers."""
    refusal: Refusal | None = None
    """That the head of its cluster could not give it away, if that was its last answer."""
    used_at: datetime | None = None
    """When its client was last active, to the minute; None if that is unknown."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Everything that decides about a pool."""

    prefix: str
    """The names of clusters are this and a number, such as `pool-qwen3-8b-1f0c-0`."""
    pool: Pool | None
    """The wanted size; None if the BaseModel has no pool any more, so that none is added."""
    clusters: Sequence[Cluster]
    sessions: Sequence[PoolSession]
    """Oldest first."""
    now: datetime
    closed_until: datetime | None = None
    """Until when no cluster is added, if it is closed."""
    ending: Mapping[str, datetime | None] = field(default_factory=dict)
    """Clusters that were deleted and whose heads may still be saving, with the time until which
    they are waited for, if it is known."""

    @property
    def is_closed(self) -> bool:
        """Whether no cluster is added now."""
        return self.closed_until is not None and self.now < self.closed_until

    @property
    def names(self) -> frozenset[str]:
        """Names of the clusters."""
        return frozenset(cluster.name for cluster in self.clusters)

    def load(self) -> Counter[str]:
        """Return the taken slots of each cluster; a session that is being moved takes two."""
        names = self.names
        taken = Counter(each.cluster for each in self.sessions if each.cluster in names)
        taken.update(
            each.moving_to
            for each in self.sessions
            if each.moving_to in names and each.moving_to != each.cluster
        )
        return taken

    def slots_of(self, cluster: Cluster) -> int:
        """Return the slots of a cluster: those of the pool, or fewer if its memory has fewer."""
        slots = self.pool.slots if self.pool is not None else 0
        return slots if cluster.most_sessions is None else min(slots, cluster.most_sessions)

    def is_measured(self, cluster: Cluster) -> bool:
        """Return whether the memory of a cluster has room for fewer sessions than the pool says."""
        return self.pool is not None and self.slots_of(cluster) < self.pool.slots

    def unplaced(self) -> list[PoolSession]:
        """Return the sessions that wait, oldest first: also those whose cluster is gone.

        One whose head has not ended is not among them: another head would not find what it saves.
        """
        kept = self.names | self.ending.keys()
        return [
            session
            for session in self.sessions
            if session.waits_since is not None and session.cluster not in kept
        ]

    def waiting_for_heads(self) -> list[PoolSession]:
        """Return the sessions whose cluster is gone and whose head has not ended."""
        return [
            session
            for session in self.sessions
            if session.waits_since is not None and session.cluster in self.ending
        ]

    def without_room(self) -> list[PoolSession]:
        """Return the sessions whose cluster has no room for their model, which is not there.

        They had room when they were placed, or nothing was known of it. Those that are being moved
        are not among them, nor those of silent clients: nobody waits for their models.
        """
        clusters = {each.name: each for each in self.clusters}
        return [
            session
            for session in self.sessions
            if (silent := silent_at(session)) is not None and self.now < silent
            if session.moving_to is None and session.cluster in clusters
            if _lacks_room(clusters[session.cluster], session)
        ]

    def slots_of_next(self) -> int:
        """Return the slots that another cluster will have, as far as others have measured them."""
        known = [self.slots_of(each) for each in self.clusters if each.most_sessions is not None]
        return max(1, min(known, default=self.pool.slots if self.pool is not None else 1))

    def has_slot(self, cluster: Cluster, taken: int, session: PoolSession) -> bool:
        """Return whether a cluster with so many taken slots has a free one for a session.

        Samplers take none of the memory that heads measure. A head that has not reported its
        capacity gets one run until it does, if other heads report theirs.
        """
        if self.pool is None or taken >= self.pool.slots:
            return False
        if session.model_id is None:
            return True
        if cluster.capacity is None or not session.rank:
            others = cluster.pending.keys() - {session.name}
            if others and not cluster.has_reported and any(each.capacity for each in self.clusters):
                return False
            return taken < self.slots_of(cluster)
        return _has_room(cluster, cluster.capacity, session)

    def with_placed(self, session: PoolSession, name: str) -> "PoolFacts":
        """Return the facts once a session has a slot on a cluster."""
        if not session.rank:
            return self
        clusters = [
            replace(each, pending={**each.pending, session.name: session.rank})
            if each.name == name
            else each
            for each in self.clusters
        ]
        return replace(self, clusters=clusters)

    def free(self, clusters: Iterable[Cluster], load: Mapping[str, int]) -> int:
        """Return the number of free slots of clusters, including those that are starting."""
        return sum(max(0, self.slots_of(each) - load.get(each.name, 0)) for each in clusters)


def silent_at(session: PoolSession) -> datetime | None:
    """Return when nobody waits for a session's model any more; None if it may not wait.

    A client that waits asks again and again.
    """
    moments = [each for each in (session.waits_since, session.used_at) if each is not None]
    return max(moments) + _SILENCE if session.waits_since is not None else None


def _lacks_room(cluster: Cluster, session: PoolSession) -> bool:
    """Return whether a head can't load the model of a run that is placed on its cluster.

    Others that it does not have either do not count: the first one to be loaded gets the room.
    """
    if not (cluster.is_ready and cluster.is_usable and cluster.held and session.model_id):
        return False
    if session.model_id in cluster.held:
        return False
    if cluster.capacity is None or not session.rank:
        return cluster.is_full
    return cluster.capacity.more_of(size_of(session, cluster.capacity)) == 0


def size_of(session: PoolSession, capacity: HeadCapacity) -> int:
    """Return the bytes of a run's adapter, with its gradient and moments, in a head's memory."""
    return session.rank * (capacity.rank_bytes or 1)


def _has_room(cluster: Cluster, capacity: HeadCapacity, session: PoolSession) -> bool:
    """Return whether a cluster's memory has room for a run, with those that it is to get before.

    An empty one is taken to have room: if it has none, its head says why when the run is created.
    """
    others = sum(rank for name, rank in cluster.pending.items() if name != session.name)
    if not (capacity.held or others):
        return True
    unit = capacity.rank_bytes or 1
    return capacity.more_of(session.rank * unit, others * unit) > 0
