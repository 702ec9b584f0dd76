"""Simulates a day of ten bursty tenants on eight GPUs: in a pool, and with Dedicated sessions.

    python -m benchmarks.cluster.pool_day

The pool is decided by the function that the operator uses, `plan_pool`. The clock and the clusters
are simulated, in steps of one second, so a day takes seconds. Sessions that compute at the same
time on one cluster divide its time equally: shared passes, which are faster, are not counted.
An oracle, which knows when sessions arrive, bounds what any policy could save.
"""

import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.table import Table

from tinkercloud_crds.base_model import Pool
from tinkercloud_operator.decide.pool.pool_model import Cluster, PoolFacts, PoolSession
from tinkercloud_operator.decide.pool.slots_plan import plan_pool

NUM_TENANTS = 10
NUM_GPUS = 8
GPUS_PER_CLUSTER = 2
START_SECONDS = 300
"""Time from the creation of a cluster until it serves."""
DAY_SECONDS = 86_400
SEEDS = (0, 1, 2, 3, 4)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
WORKING_HOURS = range(7, 26)
"""From the first session of most days until 02:00, when the last ones of the evening have come."""
POOLS = {
    f"pool: minClusters {least}, slotsPerCluster {slots}, spareSlots {spare}": Pool(
        min_clusters=least,
        max_clusters=NUM_GPUS // GPUS_PER_CLUSTER,
        slots_per_cluster=slots,
        spare_slots=spare,
        scale_down_after_seconds=300,
    )
    for least, slots, spare in ((0, 16, 0), (1, 16, 0), (1, 16, 4), (1, 8, 4))
}
SCHEDULED = {
    f"minClusters 1 from 7:00 to 2:00, slotsPerCluster {slots}, spareSlots {spare}": Pool(
        min_clusters=1,
        max_clusters=NUM_GPUS // GPUS_PER_CLUSTER,
        slots_per_cluster=slots,
        spare_slots=spare,
        scale_down_after_seconds=300,
    )
    for slots, spare in ((16, 4), (32, 4), (32, 2))
}
"""Pools whose minClusters is changed to 0 at night, and back, as a CronJob can do."""
ORACLES = {
    f"oracle: slotsPerCluster {slots}": Pool(
        min_clusters=0,
        max_clusters=NUM_GPUS // GPUS_PER_CLUSTER,
        slots_per_cluster=slots,
        scale_up_after_seconds=0,
        scale_down_after_seconds=0,
    )
    for slots in (16, 32, 64)
}
DEDICATED = Pool(
    min_clusters=0,
    max_clusters=NUM_GPUS // GPUS_PER_CLUSTER,
    slots_per_cluster=1,
    scale_up_after_seconds=0,
    scale_down_after_seconds=0,
)
"""Dedicated sessions as a pool: a cluster for each session, which ends with it."""


@dataclass
class Session:
    """A training session that alternates between computing and thinking."""

    name: str
    owner: str
    arrives: int
    """Second of the day."""
    phases: list[tuple[int, int]]
    """Seconds of computing alone on a cluster, and of thinking after it."""
    cluster: str | None = None
    ready: int | None = None
    """When it got a place on a ready cluster."""
    computes: float = 0.0
    """Seconds of computing that are left in this phase."""
    thinks_until: int = 0
    ended: int | None = None

    def next_phase(self, second: int) -> None:
        """Start the next phase, or end."""
        if not self.phases:
            self.ended = second
            return
        work, thinking = self.phases.pop(0)
        self.computes, self.thinks_until = float(work), second + thinking

    def is_computing(self, second: int) -> bool:
        """Whether it uses its cluster in this second."""
        return self.ended is None and second >= self.thinks_until and self.computes > 0


@dataclass
class Host:
    """A simulated cluster."""

    name: str
    ready_from: int
    unused_since: int

    def is_ready(self, second: int) -> bool:
        """Whether it serves."""
        return second >= self.ready_from


@dataclass
class Day:
    """One simulated day."""

    pool: Pool
    sessions: list[Session]
    warm_hours: range = range(48)
    """Hours, from midnight, in which `min_clusters` applies; otherwise it is 0."""
    is_oracle: bool = False
    """Whether clusters were started before they are needed, so that they are ready by then."""
    hosts: dict[str, Host] = field(default_factory=dict)
    held: int = 0
    """Seconds of all clusters together."""
    busy: int = 0
    """Seconds of all clusters in which a session computed, together."""

    def run(self) -> "Day":
        """Simulate the day, and continue until every session has ended."""
        changes_at, second = 0, 0
        waiting = sorted(self.sessions, key=lambda each: each.arrives)
        here: list[Session] = []
        while waiting or here or second < DAY_SECONDS:
            arrived = [each for each in waiting if each.arrives <= second]
            waiting = waiting[len(arrived) :]
            here += arrived
            starts = any(second == host.ready_from for host in self.hosts.values())
            ended = self._compute(here, second)
            here = [each for each in here if each.ended is None]
            if arrived or starts or ended or second >= changes_at or second % 3600 == 0:
                changes_at = self._decide(here, second)
            self.held += len(self.hosts)
            second += 1
        return self

    def _compute(self, sessions: Iterable[Session], second: int) -> bool:
        """Advance all sessions by a second; return whether one has ended."""
        ended = False
        running: dict[str, list[Session]] = {}
        for session in sessions:
            if session.cluster is not None and session.is_computing(second):
                running.setdefault(session.cluster, []).append(session)
        for together in running.values():
            self.busy += 1
            for session in together:
                session.computes -= 1 / len(together)
                if session.computes <= 0:
                    session.next_phase(second + 1)
                ended = ended or session.ended is not None
        return ended

    def _decide(self, sessions: Sequence[Session], second: int) -> int:
        """Do what the operator's plan says; return when to plan again."""
        plan = plan_pool(self._facts(sessions, second))
        for session in sessions:
            if session.name in plan.places:
                session.cluster, session.ready = plan.places[session.name], second
                session.next_phase(second)
                session.thinks_until = second
        for name in plan.delete:
            del self.hosts[name]
        for name in plan.create:
            self.hosts[name] = Host(name, second + self._start_seconds(), second)
            if self.is_oracle:
                self.held += START_SECONDS
        for host in self.hosts.values():
            if any(session.cluster == host.name for session in sessions):
                host.unused_since = second + 1
        if plan.delete or plan.create or plan.places:
            return second + 1
        return _second_of(plan.changes_at) if plan.changes_at is not None else 10 * DAY_SECONDS

    def _facts(self, sessions: Sequence[Session], second: int) -> PoolFacts:
        clusters = [
            Cluster(
                name=host.name,
                is_ready=host.is_ready(second),
                is_stopping=False,
                unused_since=_moment(host.unused_since),
            )
            for host in self.hosts.values()
        ]
        placed = [
            PoolSession(each.name, each.owner, each.cluster, _moment(each.arrives))
            for each in sessions
        ]
        hour = second // 3600 % 24
        is_warm = hour in self.warm_hours or hour + 24 in self.warm_hours
        pool = self.pool if is_warm else self.pool.model_copy(update={"min_clusters": 0})
        return PoolFacts("c", pool, clusters, placed, _moment(second))

    def _start_seconds(self) -> int:
        return 0 if self.is_oracle else START_SECONDS

    def waits(self) -> list[int]:
        """Seconds from the arrival of each session until it was ready."""
        return [each.ready - each.arrives for each in self.sessions if each.ready is not None]

    def idle(self) -> float:
        """Share of the held GPU time in which nothing was computed, starts included."""
        return 1 - self.busy / self.held if self.held else 0.0

    def idle_of_capacity(self) -> float:
        """The same time as a share of all GPUs for a day."""
        return (self.held - self.busy) * GPUS_PER_CLUSTER / (NUM_GPUS * DAY_SECONDS)


def _moment(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)


def _second_of(moment: datetime) -> int:
    return round((moment - EPOCH).total_seconds())


def sessions_of_a_day(seed: int) -> list[Session]:
    """Return the sessions of ten tenants: bursts of one to four during a working day of each."""
    chance = random.Random(seed)  # noqa: S311 - a simulation
    sessions = []
    for tenant in range(NUM_TENANTS):
        # Most tenants work at the same time; some on another continent.
        begin = chance.gauss(9, 1) if tenant < NUM_TENANTS * 0.7 else chance.gauss(17, 1)
        moment, end = begin * 3600, (begin + 9) * 3600
        while (moment := moment + chance.expovariate(1 / 7200)) < end:
            for number in range(chance.randint(1, 4)):
                steps = chance.randint(20, 150)
                phases = [(chance.randint(3, 15), chance.randint(3, 15)) for _ in range(steps)]
                arrives = int(moment) % DAY_SECONDS
                sessions.append(
                    Session(f"{tenant}-{arrives}-{number}", f"{tenant}", arrives, phases)
                )
    return sessions


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    """Print a table of all pools, of oracles and of Dedicated sessions, over all seeds.

    Arguments are other seeds.
    """
    seeds = [int(each) for each in sys.argv[1:]] or SEEDS
    table = Table(
        "",
        "sessions",
        "wait p50",
        "wait p95",
        "GPU hours allocated",
        "idle",
        "idle / all GPUs",
        "length p50",
    )
    for name, pool in {**POOLS, **SCHEDULED, **ORACLES, "Dedicated": DEDICATED}.items():
        hours = WORKING_HOURS if name in SCHEDULED else range(48)
        days = [
            Day(pool, sessions_of_a_day(seed), hours, is_oracle=name in ORACLES).run()
            for seed in seeds
        ]
        waits = [wait for day in days for wait in day.waits()]
        lengths = [
            each.ended - each.arrives
            for day in days
            for each in day.sessions
            if each.ended is not None
        ]
        allocated = sum(day.held for day in days) * GPUS_PER_CLUSTER / 3600 / len(days)
        table.add_row(
            name,
            f"{len(waits) / len(days):.0f}",
            f"{percentile(waits, 50):.0f} s",
            f"{percentile(waits, 95):.0f} s",
            f"{allocated:.0f}",
            f"{statistics.fmean(day.idle() for day in days):.1%}",
            f"{statistics.fmean(day.idle_of_capacity() for day in days):.1%}",
            f"{percentile(lengths, 50) / 60:.0f} min",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
