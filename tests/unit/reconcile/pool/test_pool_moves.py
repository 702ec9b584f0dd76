"""Which runs of a pool are moved, and random histories of whole pools with crashing operators."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_crds.base_model import Pool
from tinkercloud_operator.decide.pool.pool_model import Cluster, PoolFacts, PoolSession, Refusal
from tinkercloud_operator.decide.pool.pool_moves import MAX_MOVES, Moves, is_emptied
from tinkercloud_operator.decide.pool.slots_plan import PoolPlan, plan_pool

pytestmark = pytest.mark.timeout(300)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
POOL = Pool(
    min_clusters=1,
    max_clusters=3,
    slots_per_cluster=4,
    scale_up_after_seconds=30,
    scale_down_after_seconds=900,
)


def a_cluster(name: str, **fields: Any) -> Cluster:
    ready = Cluster(name, is_ready=True, is_stopping=False, unused_since=NOW, incarnation=name)
    return replace(ready, **fields)


def a_session(name: str, cluster: str, *, age: float = 5000, **fields: Any) -> PoolSession:
    since = NOW - timedelta(seconds=age)
    placed = PoolSession(name, "ada", cluster, since, model_id=f"{name}:train:0")
    return replace(placed, **fields)


def sessions(cluster: str, number: int, **fields: Any) -> list[PoolSession]:
    return [a_session(f"{cluster}-run-{index}", cluster, **fields) for index in range(number)]


def plan(
    clusters: Sequence[Cluster], on_them: Sequence[PoolSession], pool: Pool | None = POOL
) -> PoolPlan:
    return plan_pool(PoolFacts("pool", pool, clusters, on_them, NOW))


def test_the_runs_of_a_drained_cluster_are_moved_and_then_it_is_deleted() -> None:
    drained, other = a_cluster("a", is_draining=True), a_cluster("b")

    first = plan([drained, other], sessions("a", 2))
    asked = plan([drained, other], sessions("a", 2, moving_to="b"))
    given = plan([drained, other], sessions("a", 2, moving_to="b", has_left=True))
    empty = plan([drained, other], sessions("b", 2))

    assert first.moves.start == {"a-run-0": "b", "a-run-1": "b"}
    assert (asked.moves.start, asked.moves.ask) == ({}, ("a-run-0", "a-run-1"))
    assert asked.moves.changes_at is not None
    assert given.moves.arrive == {"a-run-0": "b", "a-run-1": "b"}
    assert [each.delete for each in (first, asked, given, empty)] == [(), (), (), ("a",)]


def emptied(clusters: Sequence[Cluster], on_them: Sequence[PoolSession]) -> bool:
    facts = PoolFacts("pool", POOL, clusters, on_them, NOW)
    return is_emptied(facts, plan_pool(facts).moves, "a")


def test_the_runs_of_a_cluster_on_a_cordoned_node_are_moved_before_it_is_suspended() -> None:
    clusters = [a_cluster("a", is_cordoned=True), a_cluster("b")]

    first, asked = plan(clusters, sessions("a", 2)), sessions("a", 2, moving_to="b")

    assert first.moves.start == {"a-run-0": "b", "a-run-1": "b"}
    assert (first.create, first.delete) == ((), ())
    assert emptied(clusters, sessions("a", 2))
    assert emptied(clusters, asked)
    assert emptied(clusters, [replace(each, has_left=True) for each in asked])
    assert not emptied(clusters, sessions("b", 2))


def test_a_cluster_on_a_cordoned_node_is_suspended_if_the_others_have_no_room() -> None:
    clusters, runs = [a_cluster("a", is_cordoned=True), a_cluster("b")], sessions("a", 2)

    assert not emptied(clusters, [*runs, *sessions("b", POOL.slots)])
    assert not emptied([clusters[0], a_cluster("b", is_ready=False)], runs)
    assert not emptied([clusters[0], a_cluster("b", is_cordoned=True)], runs)
    assert emptied(clusters, [*runs, *sessions("b", POOL.slots - 1)])


def test_no_session_is_placed_on_a_cluster_that_leaves_a_cordoned_node() -> None:
    waiting = a_session("new", "gone")

    placed = plan([a_cluster("a", is_cordoned=True), a_cluster("b")], [waiting])

    assert placed.places == {"new": "b"}
    assert plan([a_cluster("a", is_cordoned=True)], [waiting]).places == {}


def test_a_changed_base_model_starts_a_new_cluster_before_runs_leave_the_old_one() -> None:
    old = a_cluster("pool-0", is_outdated=True)
    runs = sessions("pool-0", 3)

    first = plan([old], runs)
    starting = plan([old, a_cluster("pool-1", is_ready=False)], runs)
    ready = plan([old, a_cluster("pool-1")], runs)
    left = plan([old, a_cluster("pool-1")], sessions("pool-1", 3))

    assert (first.create, first.delete, first.moves.start) == (("pool-1",), (), {})
    assert (starting.create, starting.delete, starting.moves.start) == ((), (), {})
    assert set(ready.moves.start.values()) == {"pool-1"}
    assert (left.create, left.delete) == ((), ("pool-0",))


def test_only_a_few_runs_are_moved_at_the_same_time() -> None:
    pool = POOL.model_copy(update={"slots_per_cluster": 16})
    runs = sessions("a", 10)

    started = plan([a_cluster("a", is_draining=True), a_cluster("b")], runs, pool)
    moving = [replace(each, moving_to=started.moves.start.get(each.name)) for each in runs]
    meanwhile = plan([a_cluster("a", is_draining=True), a_cluster("b")], moving, pool)

    assert len(started.moves.start) == MAX_MOVES
    assert meanwhile.moves.start == {}
    assert len(meanwhile.moves.ask) == MAX_MOVES


@pytest.mark.parametrize(
    ("on_b", "fields", "is_emptied"),
    [
        (1, {}, True),
        (3, {}, False),
        (1, {"age": 60}, False),
    ],
    ids=["there is room", "the next run would start a cluster", "a run was created just now"],
)
def test_an_almost_empty_cluster_is_emptied_into_others_that_have_room(
    on_b: int, fields: dict[str, float], is_emptied: bool
) -> None:
    runs = [*sessions("a", 1), *(a_session(f"b-{i}", "b", **fields) for i in range(on_b))]

    moves = plan([a_cluster("a"), a_cluster("b")], runs).moves

    assert moves.start == ({"a-run-0": "b"} if is_emptied else {})


def test_a_cluster_that_the_pool_must_have_is_not_emptied() -> None:
    pool = POOL.model_copy(update={"min_clusters": 2})

    moves = plan([a_cluster("a"), a_cluster("b")], sessions("a", 1), pool).moves

    assert moves.start == {}


def test_a_run_gets_another_target_if_the_first_one_ends_meanwhile() -> None:
    clusters = [a_cluster("a", is_draining=True), a_cluster("b", is_stopping=True), a_cluster("c")]

    moves = plan(clusters, sessions("a", 1, moving_to="b", has_left=True)).moves

    assert (moves.start, moves.arrive) == ({"a-run-0": "c"}, {})


def test_a_run_whose_target_is_lost_returns_if_there_is_no_other() -> None:
    source, full = a_cluster("a", is_draining=True), a_cluster("c")

    def moves(moving_to: str | None = "b", **fields: bool) -> Moves:
        run = a_session("run", "a", moving_to=moving_to, **fields)
        return plan([source, full], [run, *sessions("c", POOL.slots)]).moves

    for has_left in (False, True):
        lost = moves(has_left=has_left)
        assert (lost.start, lost.ask, lost.arrive) == ({"run": "a"}, (), {})
    asked = moves("a")
    assert (asked.start, asked.ask, asked.take_back) == ({}, (), ("run",))
    assert asked.changes_at is not None
    assert moves("a", is_back=True).cancel == ("run",)
    stays = moves(None)
    assert (stays.start, stays.homeless) == ({}, 1)


def test_a_run_that_returns_is_moved_on_if_there_is_room_meanwhile() -> None:
    clusters = [a_cluster("a", is_draining=True), a_cluster("b")]

    moves = plan(clusters, sessions("a", 1, moving_to="a")).moves

    assert (moves.start, moves.take_back) == ({"a-run-0": "b"}, ())


def test_a_drained_target_is_deleted_when_the_runs_on_their_way_to_it_return() -> None:
    """Else neither of two drained clusters would make room for a third one."""
    pool = POOL.model_copy(update={"max_clusters": 2})
    clusters = [a_cluster("a", is_draining=True), a_cluster("b", is_draining=True)]

    made = plan(clusters, sessions("a", 1, moving_to="b", has_left=True), pool)

    assert (made.moves.start, made.delete) == ({"a-run-0": "a"}, ("b",))


def test_a_run_waits_for_another_target_while_its_own_cluster_does_not_serve_either() -> None:
    run = a_session("run", "a", moving_to="b", has_left=True)

    made = plan([a_cluster("a", is_ready=False)], [run])

    assert (made.moves.start, made.moves.take_back, made.moves.homeless) == ({}, (), 1)


def test_a_cluster_on_a_cordoned_node_is_suspended_with_the_runs_that_return() -> None:
    assert not emptied([a_cluster("a", is_cordoned=True)], sessions("a", 1, moving_to="b"))
    assert not emptied([a_cluster("a", is_cordoned=True)], sessions("a", 1, moving_to="a"))


def test_a_run_whose_cluster_is_gone_while_it_is_moved_is_placed_on_its_target() -> None:
    runs = [*sessions("b", 3), *sessions("gone", 1, moving_to="b")]

    placed = plan([a_cluster("b")], runs)

    assert (placed.places, placed.moves.ask) == ({"gone-run-0": "b"}, ())


def test_samplers_are_moved_without_asking_their_head() -> None:
    sampler = replace(a_session("s", "a", moving_to="b"), model_id=None, has_left=True)

    moves = plan([a_cluster("a", is_draining=True), a_cluster("b")], [sampler]).moves

    assert (moves.ask, moves.arrive) == ((), {"s": "b"})


def test_a_run_that_its_head_could_not_give_away_stays_until_it_is_asked_again() -> None:
    clusters = [a_cluster("a", is_draining=True), a_cluster("b")]
    now, later = (Refusal("the store is full", NOW + timedelta(seconds=60 * n)) for n in (1, 0))

    def moves(**fields: Any) -> Moves:
        return plan(clusters, [a_session("run", "a", **fields)]).moves

    refused = moves(moving_to="b", refusal=now)
    assert (refused.cancel, refused.ask) == (("run",), ())
    stays = moves(refusal=now)
    assert (stays.start, stays.homeless, stays.changes_at) == ({}, 1, now.until)
    assert "the store is full" in refused.held["run"]
    assert stays.held == refused.held
    assert moves(refusal=later).start == {"run": "b"}
    again = moves(moving_to="b", refusal=later)
    assert (again.cancel, again.ask, again.held) == ((), ("run",), {})


def test_runs_that_could_not_be_given_away_do_not_delay_the_others() -> None:
    pool = POOL.model_copy(update={"slots_per_cluster": 16})
    refused = sessions("a", MAX_MOVES, refusal=Refusal("no", NOW + timedelta(seconds=1)))
    clusters = [a_cluster("a", is_draining=True), a_cluster("b")]

    moves = plan(clusters, [*refused, a_session("other", "a")], pool).moves

    assert moves.start == {"other": "b"}


@dataclass
class Run:
    """A run, and where its model is."""

    session: PoolSession
    live_on: str | None = None
    """The cluster whose head has its model in memory; None if it is in the store, or not created
    yet."""
    refused_by: str | None = None
    """The cluster whose head has given its model away, and does not serve it."""


@dataclass
class World:
    """A pool: its objects in Kubernetes, its heads, and an operator that may stop at any write."""

    pool: Pool
    now: datetime = NOW
    clusters: dict[str, Cluster] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    """What the head of its cluster was asked about a run and has not done: "give", or "take"."""
    num_runs: int = 0
    store_is_down: bool = False
    """Whether heads can't write models, and therefore don't give them away."""
    most_models: int = 9
    """How many models a head loads; it keeps those that it has."""

    def facts(self) -> PoolFacts:
        clusters = [self.measured(each) for each in self.clusters.values()]
        runs = [each.session for each in self.runs.values()]
        return PoolFacts("pool", self.pool, clusters, runs, self.now)

    def measured(self, cluster: Cluster) -> Cluster:
        """Return a cluster with what its head says of its memory."""
        held = self.held(cluster.name)
        return replace(
            cluster,
            most_sessions=max(self.most_models, len(held)),
            held=held,
            is_full=len(held) >= self.most_models,
            has_reported=True,
        )

    def held(self, cluster: str) -> frozenset[str]:
        return frozenset(name for name, run in self.runs.items() if run.live_on == cluster)

    def has_room(self, cluster: str, run: str) -> bool:
        held = self.held(cluster)
        return run in held or len(held) < self.most_models

    def plan(self) -> PoolPlan:
        return plan_pool(self.facts())

    def operate(self, writes: int) -> None:
        """Plan and execute, but stop after some writes."""
        made = self.plan()
        placed = {**made.places, **made.moves.arrive}
        todo: list[Callable[[], None]] = [
            *(partial(self.place, name, target) for name, target in placed.items()),
            *(partial(self.change, *each) for each in made.moves.start.items()),
            *(partial(self.change, name, None) for name in made.moves.cancel),
            *(partial(self.ask, name, "give") for name in made.moves.ask),
            *(partial(self.ask, name, "take") for name in made.moves.take_back),
            *(partial(self.delete, name) for name in made.delete),
            *(partial(self.create, name) for name in made.create),
        ]
        for write in todo[:writes]:
            write()
            self.check()

    def change(self, name: str, target: str | None) -> None:
        run = self.runs[name]
        if target is None:
            # Its requests are sent to the head of its cluster from now on.
            assert run.refused_by != run.session.cluster
            run.session = replace(run.session, has_left=False, is_back=False)
        run.session = replace(run.session, moving_to=target)

    def ask(self, name: str, what: str) -> None:
        if name not in self.asked:
            self.asked[name] = what
            run = self.runs[name]
            run.session = replace(run.session, has_left=False, is_back=False)

    def place(self, name: str, cluster: str) -> None:
        run = self.runs[name]
        # The run would be lost: the new cluster's head would find nothing in the store.
        assert run.live_on is None or run.live_on not in self.clusters
        run.session = replace(
            run.session,
            cluster=cluster,
            moving_to=None,
            has_left=False,
            is_back=False,
            refusal=None,
        )
        run.refused_by = None
        self.asked.pop(name, None)

    def delete(self, name: str) -> None:
        used = {run.session.cluster for run in self.runs.values()}
        assert self.clusters[name].has_failed or name not in used
        self.clusters[name] = replace(self.clusters[name], is_stopping=True, is_ready=False)

    def create(self, name: str) -> None:
        assert name not in self.clusters
        assert len(self.clusters) < self.pool.max_clusters
        self.clusters[name] = Cluster(name, False, False, self.now, incarnation=name)

    def check(self) -> None:
        """Check that no slot is taken twice."""
        taken: Counter[str] = Counter()
        for run in self.runs.values():
            wanted = {run.session.cluster, run.session.moving_to} & self.clusters.keys()
            taken.update(str(each) for each in wanted)
        assert all(number <= self.pool.slots for number in taken.values())

    def heads_answer(self) -> None:
        """Let heads resume the models of their runs, and give away those that they were asked."""
        for name, run in self.runs.items():
            session = run.session
            here = self.clusters.get(session.cluster or "")
            if here is None or not here.is_ready:
                continue
            did = self.asked.pop(name, None)
            if did == "give" and self.store_is_down and run.live_on == here.name:
                until = self.now + timedelta(seconds=60)
                run.session = replace(session, refusal=Refusal("the store is down", until))
            elif did is not None:
                stays = did == "take" and self.has_room(here.name, name)
                run.live_on = here.name if stays else None
                run.refused_by = here.name if did == "give" else None
                has_left = did == "give"
                run.session = replace(
                    session,
                    has_left=has_left,
                    is_back=not has_left,
                    refusal=None if has_left else session.refusal,
                )
            elif session.moving_to is None and self.has_room(here.name, name):
                run.live_on = here.name

    def happen(self, event: str, number: int) -> None:
        """Let something happen that the operator does not decide."""
        names = sorted(self.clusters)
        chosen = names[number % len(names)] if names else ""
        if event == "run":
            name = f"run-{self.num_runs}"
            self.num_runs += 1
            owner = f"owner-{number % 3}"
            self.runs[name] = Run(PoolSession(name, owner, None, self.now, model_id=name))
        elif event == "end" and self.runs:
            del self.runs[sorted(self.runs)[number % len(self.runs)]]
        elif event == "time":
            self.now += timedelta(seconds=[10, 100, 1000][number % 3])
        elif event == "memory":
            self.most_models = 1 + number % 4
        elif event == "store":
            self.store_is_down = not self.store_is_down
        elif event == "heads":
            self.heads_answer()
        elif event == "restart":
            self.restart()
        elif event == "change":
            self.clusters = {
                name: replace(each, is_outdated=True) for name, each in self.clusters.items()
            }
        elif chosen:
            self.happen_to(chosen, event)

    def restart(self) -> None:
        """Start another operator, which does not know what heads were asked and have done."""
        self.asked.clear()
        for run in self.runs.values():
            run.session = replace(run.session, has_left=False, is_back=False, refusal=None)

    def happen_to(self, name: str, event: str) -> None:
        cluster = self.clusters[name]
        if event == "ready" and cluster.is_usable:
            self.clusters[name] = replace(cluster, is_ready=True, unused_since=self.now)
        elif event == "drain":
            self.clusters[name] = replace(cluster, is_draining=True)
        elif event == "kill" or (event == "gone" and not cluster.is_ready):
            del self.clusters[name]
            self.unload(name)
        elif event == "unload":
            self.unload(name)

    def unload(self, name: str) -> None:
        """End a head, or suspend its models; its runs continue from their saved state."""
        for run in self.runs.values():
            if run.live_on == name:
                run.live_on = None

    def settle(self) -> None:
        """Let everything that was started end, once the store works and pauses are over."""
        self.store_is_down = False
        refusals = [run.session.refusal for run in self.runs.values()]
        self.now = max([self.now, *(each.until for each in refusals if each is not None)])
        before = None
        for _ in range(200):
            if before == (before := repr((self.clusters, self.runs, self.asked))):
                return
            for name, cluster in list(self.clusters.items()):
                self.happen_to(name, "gone" if cluster.is_stopping else "ready")
            self.heads_answer()
            self.operate(1000)


EVENTS = ("run", "run", "run", "end", "time", "heads", "heads", "ready", "ready", "change", "drain")
OTHERS = ("gone", "kill", "store", "memory", "unload", "restart", *["operate"] * 3, "crash")
some_events = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, *OTHERS]),
        st.integers(0, 8),
    ),
    max_size=60,
)
some_pools = st.builds(
    Pool,
    min_clusters=st.integers(0, 2),
    max_clusters=st.integers(2, 4),
    slots_per_cluster=st.integers(1, 4),
    spare_slots=st.sampled_from([0, 0, 2]),
    scale_up_after_seconds=st.sampled_from([0, 30]),
    scale_down_after_seconds=st.sampled_from([0, 900]),
)


@given(some_pools, some_events, st.sampled_from([None, None, 1, 2]))
def test_in_no_history_is_a_run_lost_or_a_slot_taken_twice_and_all_moves_end(
    pool: Pool, events: list[tuple[str, int]], most_models: int | None
) -> None:
    world = World(pool)
    for event, number in events:
        if event in {"operate", "crash"}:
            world.operate(1000 if event == "operate" else number)
        else:
            world.happen(event, number)
        world.check()
    world.settle()
    if most_models is not None:
        world.most_models = most_models
        for name in world.clusters:
            world.unload(name)

    world.settle()

    assert [run.session.moving_to for run in world.runs.values()] == [None] * len(world.runs)
    last = world.plan()
    assert (last.create, last.delete, last.places, last.moves.start) == ((), (), {}, {})
    for run in world.runs.values():
        assert run.session.name in last.waiting or run.live_on == run.session.cluster
