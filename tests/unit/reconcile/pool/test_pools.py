"""What a pool needs: clusters by need, places by slots, nothing that flaps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_crds.base_model import Pool
from tinkercloud_operator.decide.pool.pool_model import Cluster, PoolFacts, PoolSession
from tinkercloud_operator.decide.pool.slots_plan import PoolPlan, plan_pool, pool_status

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NAMES = [f"pool-tiny-{index}" for index in range(5)]
POOL = Pool(
    min_clusters=0,
    max_clusters=3,
    slots_per_cluster=2,
    scale_up_after_seconds=30,
    scale_down_after_seconds=900,
)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def a_cluster(name: str, *, is_ready: bool = True, unused_seconds: float = 0) -> Cluster:
    return Cluster(name, is_ready, is_stopping=False, unused_since=ago(unused_seconds))


def a_session(
    name: str, cluster: str | None = None, *, owner: str = "ada", waited_seconds: float = 0
) -> PoolSession:
    return PoolSession(name, owner, cluster, ago(waited_seconds), model_id=f"{name}:train:0")


def facts(
    *clusters: Cluster, sessions: Sequence[PoolSession] = (), pool: Pool | None = POOL
) -> PoolFacts:
    return PoolFacts("pool-tiny", pool, clusters, sessions, NOW)


def executed(before: PoolFacts, plan: PoolPlan) -> PoolFacts:
    """Return the facts after a plan was executed."""
    stopped = [
        replace(each, is_stopping=each.is_stopping or each.name in plan.delete)
        for each in before.clusters
    ]
    started = [Cluster(name, False, False, before.now) for name in plan.create]
    to = {**plan.places, **plan.moves.arrive}
    placed = [
        replace(
            each,
            cluster=to.get(each.name, each.cluster),
            moving_to=None
            if each.name in {*to, *plan.moves.cancel}
            else plan.moves.start.get(each.name, each.moving_to),
        )
        for each in before.sessions
    ]
    return replace(before, clusters=[*stopped, *started], sessions=placed)


def settled(known: PoolFacts) -> PoolFacts:
    """Return the facts after a plan was executed, and the one for clusters that sessions left."""
    after = executed(known, plan_pool(known))
    return executed(after, plan_pool(after))


@st.composite
def some_facts(draw: st.DrawFn) -> PoolFacts:
    smallest = draw(st.integers(0, 3))
    pool = Pool(
        min_clusters=smallest,
        max_clusters=draw(st.integers(max(1, smallest), 4)),
        slots_per_cluster=draw(st.integers(1, 3)),
        spare_slots=draw(st.sampled_from([0, 0, 1, 4])),
        scale_up_after_seconds=draw(st.sampled_from([0, 30])),
        scale_down_after_seconds=draw(st.sampled_from([0, 900])),
    )
    seconds = st.sampled_from([0.0, 29.0, 30.0, 899.0, 900.0, 5000.0])
    rarely = st.sampled_from([False, False, True])
    clusters = [
        Cluster(
            name,
            is_ready=draw(st.booleans()),
            is_stopping=draw(st.booleans()),
            unused_since=ago(draw(seconds)),
            is_outdated=draw(rarely),
            has_failed=draw(rarely),
            is_suspended=draw(rarely),
            is_draining=draw(rarely),
            most_sessions=draw(st.sampled_from([None, None, 1, 2, 9])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    places = st.sampled_from([None, None, *NAMES])
    sessions = [
        PoolSession(
            f"run-{index}",
            draw(st.sampled_from(["ada", "bob"])),
            draw(places),
            ago(draw(seconds)) if draw(st.booleans()) else None,
            moving_to=draw(st.sampled_from([None, None, None, *NAMES])),
            has_left=draw(st.booleans()),
            is_back=draw(st.booleans()),
            model_id=draw(st.sampled_from([f"run-{index}:train:0", "m", None])),
        )
        for index in range(draw(st.integers(0, 8)))
    ]
    offered = draw(st.sampled_from([pool, pool, None]))
    closed = draw(st.sampled_from([None, None, ago(-60)]))
    return PoolFacts("pool-tiny", offered, clusters, sessions, NOW, closed)


def load(known: PoolFacts) -> "Counter[str]":
    return Counter(session.cluster for session in known.sessions if session.cluster is not None)


@given(some_facts())
def test_no_cluster_with_sessions_is_deleted(known: PoolFacts) -> None:
    plan = plan_pool(known)

    used = {*load(known), *plan.places.values()}
    assert not (used - failed(known)) & {*plan.delete}


def failed(known: PoolFacts) -> set[str]:
    return {each.name for each in known.clusters if each.has_failed}


@given(some_facts())
def test_a_failed_cluster_is_deleted_at_once(known: PoolFacts) -> None:
    stopping = {each.name for each in known.clusters if each.is_stopping}

    assert failed(known) <= {*plan_pool(known).delete} | stopping


@given(some_facts())
def test_there_are_never_more_clusters_than_allowed_nor_fewer_than_wanted(known: PoolFacts) -> None:
    plan = plan_pool(known)

    least = known.pool.min_clusters if known.pool is not None else 0
    most = known.pool.max_clusters if known.pool is not None else 0
    # A suspended cluster offers no slots, like one that is drained.
    out = {each.name for each in known.clusters if each.is_draining or each.is_suspended}
    usable = sum(not (each.is_stopping or each.name in out) for each in known.clusters)
    if plan.create:
        assert len(known.clusters) + len(plan.create) <= most
    deleted = {*plan.delete} - failed(known) - out
    if deleted:
        outdated = sum(each.is_outdated for each in known.clusters if each.name in deleted)
        assert usable - len(deleted) >= least - min(1, outdated)
    if not plan.create and usable < least and not known.is_closed:
        assert len(known.clusters) >= most


@given(some_facts())
def test_sessions_are_placed_on_ready_clusters_with_free_slots(known: PoolFacts) -> None:
    plan = plan_pool(known)

    by_name = {each.name: each for each in known.clusters}
    after = load(executed(known, plan))
    for name in {*plan.places.values()}:
        assert by_name[name].is_ready
        assert not by_name[name].is_stopping
        assert known.pool is not None
        assert after[name] <= known.pool.slots
    runs = {each.name for each in known.sessions if each.model_id is not None}
    for name in {place for run, place in plan.places.items() if run in runs}:
        on_it = [each for each in executed(known, plan).sessions if each.cluster == name]
        most = by_name[name].most_sessions
        assert most is None or sum(each.name in runs for each in on_it) <= most


@given(some_facts())
def test_every_waiting_session_gets_a_place_or_a_reason(known: PoolFacts) -> None:
    plan = plan_pool(known)

    existing = {each.name for each in known.clusters}
    waiting = {
        each.name
        for each in known.sessions
        if each.waits_since is not None and each.cluster not in existing
    }
    assert {*plan.places, *plan.waiting} == waiting
    assert not {*plan.places} & {*plan.waiting}
    assert all(plan.waiting.values())


def with_reserved_slots(known: PoolFacts, plan: PoolPlan) -> set[str]:
    """Return the sessions that were being moved, and are placed on the slot that they had there."""
    return {
        each.name
        for each in known.sessions
        if each.moving_to is not None and plan.places.get(each.name) == each.moving_to
    }


@given(some_facts())
def test_the_older_sessions_of_an_owner_are_placed_first(known: PoolFacts) -> None:
    plan = plan_pool(known)

    reserved = with_reserved_slots(known, plan)
    for owner in ("ada", "bob"):
        own = [
            each.name
            for each in known.sessions
            if each.owner == owner and each.name not in reserved
        ]
        order = [name for name in own if name in {*plan.places, *plan.waiting}]
        assert order == [name for name in (*plan.places, *plan.waiting) if name in own]


@given(some_facts())
def test_no_owner_gets_a_place_before_another_who_has_fewer_and_waits(known: PoolFacts) -> None:
    plan = plan_pool(known)

    after, reserved = executed(known, plan), with_reserved_slots(known, plan)
    names = {each.name for each in after.clusters}
    held = Counter(
        each.owner for each in after.sessions if each.cluster in names and each.name not in reserved
    )
    starved = {each.owner for each in known.sessions if each.name in plan.waiting}
    favored = {
        each.owner
        for each in known.sessions
        if each.name in plan.places and each.name not in reserved
    }
    assert all(held[lucky] <= held[waits] + 1 for lucky in favored for waits in starved)


@given(some_facts())
def test_a_plan_that_was_executed_leaves_nothing_to_do(known: PoolFacts) -> None:
    again = plan_pool(settled(known))

    assert (again.create, again.delete, again.places) == ((), (), {})
    assert (again.moves.start, again.moves.cancel) == ({}, ())


@given(some_facts())
def test_a_cluster_beyond_the_minimum_is_added_only_after_the_wait(known: PoolFacts) -> None:
    plan = plan_pool(known)

    usable = [each for each in known.clusters if each.offers_slots and each.name not in plan.delete]
    if known.pool is None or not usable:
        return
    wait = timedelta(seconds=known.pool.scale_up_after_seconds)
    due = [
        each
        for each in known.sessions
        if each.name in plan.waiting
        and each.waits_since is not None
        and each.waits_since + wait <= NOW
    ]
    outdated = {each.name for each in known.clusters if each.is_outdated}
    to_move_on = plan.moves.homeless or outdated & {*plan.places.values()}
    if len(usable) + len(plan.create) > known.pool.min_clusters and plan.create:
        assert due or known.pool.spare_slots or to_move_on


@given(some_facts())
def test_spare_slots_are_free_or_the_pool_is_as_large_as_it_may_be(known: PoolFacts) -> None:
    after = executed(known, plan_pool(known))

    if known.pool is None or known.is_closed or not (known.sessions and is_in_use(after)):
        return
    used, size = load(after), known.pool.slots
    usable = [each.name for each in after.clusters if not each.is_stopping]
    free = sum(max(0, size - used[name]) for name in usable)
    assert free >= known.pool.spare_slots or len(after.clusters) >= known.pool.max_clusters


def is_in_use(known: PoolFacts) -> bool:
    names = {each.name for each in known.clusters}
    return any(each.cluster in names or each.waits_since is not None for each in known.sessions)


@given(some_facts())
def test_a_cluster_within_the_maximum_is_deleted_only_after_it_was_unused(known: PoolFacts) -> None:
    plan = plan_pool(known)

    if known.pool is None:
        return
    usable = [each for each in known.clusters if not each.is_stopping]
    since = ago(known.pool.scale_down_after_seconds)
    early = [
        each
        for each in usable
        if each.name in {*plan.delete} - failed(known)
        and each.unused_since > since
        and not (each.is_outdated or each.is_draining)
    ]
    assert len(early) <= max(0, len(usable) - known.pool.max_clusters)


@given(some_facts())
def test_a_plan_changes_by_itself_only_when_it_says_so(known: PoolFacts) -> None:
    before = settled(known)
    due = plan_pool(before).changes_at
    later = NOW + timedelta(days=1) if due is None else due - timedelta(seconds=1)
    assert due is None or due > NOW

    plan = plan_pool(replace(before, now=max(NOW, later)))

    assert (plan.create, plan.delete, plan.places) == ((), (), {})


def test_the_first_run_of_an_empty_pool_starts_a_cluster_at_once() -> None:
    plan = plan_pool(facts(sessions=[a_session("one")]))

    assert plan.create == ("pool-tiny-0",)
    assert plan.waiting == {
        "one": "waiting for a cluster of the pool to be ready: pool-tiny-0",
    }


def test_a_pool_with_a_minimum_is_warm_before_the_first_run() -> None:
    pool = POOL.model_copy(update={"min_clusters": 2})

    assert plan_pool(facts(pool=pool)).create == ("pool-tiny-0", "pool-tiny-1")


def test_a_run_waits_for_a_slot_before_another_cluster_is_started() -> None:
    full = [a_session("one", NAMES[0]), a_session("two", NAMES[0])]
    waits = a_session("three", waited_seconds=10)

    plan = plan_pool(facts(a_cluster(NAMES[0]), sessions=[*full, waits]))

    assert plan.create == ()
    assert plan.changes_at == NOW + timedelta(seconds=20)
    waited = a_session("three", waited_seconds=30)
    plan = plan_pool(facts(a_cluster(NAMES[0]), sessions=[*full, waited]))
    assert plan.create == ("pool-tiny-1",)


def test_a_cluster_is_started_before_the_spare_slots_are_taken() -> None:
    pool = POOL.model_copy(update={"spare_slots": 1})
    one, two = a_session("one", NAMES[0]), a_session("two", NAMES[0])

    assert plan_pool(facts(a_cluster(NAMES[0]), sessions=[one], pool=pool)).create == ()
    grown = plan_pool(facts(a_cluster(NAMES[0]), sessions=[one, two], pool=pool))
    assert grown.create == ("pool-tiny-1",)


def test_the_cluster_of_the_spare_slots_is_kept_until_the_pool_is_no_longer_in_use() -> None:
    pool = POOL.model_copy(update={"spare_slots": 1})
    full = [a_session("one", NAMES[0]), a_session("two", NAMES[0])]
    spare = a_cluster(NAMES[1], unused_seconds=5000)

    kept = plan_pool(facts(a_cluster(NAMES[0]), spare, sessions=full, pool=pool))
    unused = plan_pool(facts(a_cluster(NAMES[0], unused_seconds=900), spare, pool=pool))

    assert (kept.create, kept.delete) == ((), ())
    assert {*unused.delete} == {*NAMES[:2]}


def test_slots_of_clusters_that_start_count_before_more_are_started() -> None:
    starting = a_cluster(NAMES[0], is_ready=False)
    waiting = [a_session(f"run-{index}", waited_seconds=60) for index in range(3)]

    assert plan_pool(facts(starting, sessions=waiting[:2])).create == ()
    assert plan_pool(facts(starting, sessions=waiting)).create == ("pool-tiny-1",)


def test_a_full_pool_says_what_would_help() -> None:
    pool = POOL.model_copy(update={"max_clusters": 1})
    sessions = [a_session("one", NAMES[0]), a_session("two", NAMES[0]), a_session("three")]

    plan = plan_pool(facts(a_cluster(NAMES[0]), sessions=sessions, pool=pool))

    assert plan.waiting == {
        "three": "all 2 slots of the pool's clusters are taken, and there may be no more clusters"
        " (pool.maxClusters is 1); another session must end, or an administrator can raise it"
    }


def test_a_run_says_why_the_cluster_that_it_waits_for_does_not_start() -> None:
    broken = replace(a_cluster(NAMES[0], is_ready=False), problem="ImagePullBackOff")

    plan = plan_pool(facts(broken, sessions=[a_session("one")]))

    assert plan.waiting["one"] == (
        "waiting for a cluster of the pool to be ready: pool-tiny-0 (ImagePullBackOff)"
    )


def test_a_new_run_goes_to_the_cluster_of_its_owner_and_otherwise_to_the_least_loaded() -> None:
    pool = POOL.model_copy(update={"slots_per_cluster": 8})
    sessions = [
        a_session("one", NAMES[0]),
        a_session("two", NAMES[0]),
        a_session("three", NAMES[1], owner="bob"),
        a_session("of ada"),
        a_session("of eve", owner="eve"),
    ]

    plan = plan_pool(facts(a_cluster(NAMES[0]), a_cluster(NAMES[1]), sessions=sessions, pool=pool))

    assert plan.places == {"of ada": NAMES[0], "of eve": NAMES[1]}


def test_an_owner_who_floods_the_pool_does_not_delay_another_one() -> None:
    flood = [a_session(f"flood-{index}") for index in range(10)]

    plan = plan_pool(facts(a_cluster(NAMES[0]), sessions=[*flood, a_session("late", owner="bob")]))

    assert plan.places == {"flood-0": NAMES[0], "late": NAMES[0]}


def test_a_run_whose_cluster_is_gone_gets_another_place() -> None:
    plan = plan_pool(facts(a_cluster(NAMES[1]), sessions=[a_session("one", NAMES[0])]))

    assert plan.places == {"one": NAMES[1]}


def test_a_run_stays_on_a_cluster_that_is_not_ready() -> None:
    known = facts(
        a_cluster(NAMES[0], is_ready=False),
        a_cluster(NAMES[1]),
        sessions=[a_session("a", NAMES[0])],
    )

    plan = plan_pool(known)

    assert (plan.places, plan.waiting) == ({}, {})


def test_the_sessions_of_a_failed_cluster_get_places_on_another_one() -> None:
    broken = replace(a_cluster(NAMES[0], is_ready=False), has_failed=True)
    sessions = [a_session("one", NAMES[0]), a_session("two", waited_seconds=60)]
    known = facts(broken, sessions=sessions)

    plan = plan_pool(known)

    assert plan.delete == (NAMES[0],)
    assert plan.create == ("pool-tiny-1",)
    gone = facts(a_cluster(NAMES[1]), sessions=sessions)
    assert plan_pool(gone).places == {"one": NAMES[1], "two": NAMES[1]}


def test_the_slots_of_a_suspended_cluster_do_not_count() -> None:
    suspended = replace(a_cluster(NAMES[0], is_ready=False), is_suspended=True)

    plan = plan_pool(facts(suspended, sessions=[a_session("one", waited_seconds=60)]))

    assert (plan.create, plan.delete) == (("pool-tiny-1",), ())


def test_an_unused_cluster_is_deleted_when_its_time_is_over() -> None:
    plan = plan_pool(facts(a_cluster(NAMES[0], unused_seconds=600)))

    assert plan.delete == ()
    assert plan.changes_at == NOW + timedelta(seconds=300)
    assert plan_pool(facts(a_cluster(NAMES[0], unused_seconds=900))).delete == (NAMES[0],)


def test_a_cluster_that_starts_slowly_is_kept_while_a_run_waits_for_it() -> None:
    slow = a_cluster(NAMES[0], is_ready=False, unused_seconds=5000)

    assert plan_pool(facts(slow, sessions=[a_session("one")])).delete == ()
    assert plan_pool(facts(slow)).delete == (NAMES[0],)


def test_a_suspended_cluster_without_sessions_goes_first_when_the_pool_becomes_smaller() -> None:
    suspended = replace(a_cluster(NAMES[0], is_ready=False), is_suspended=True)
    kept = a_session("kept", NAMES[0])
    smaller = POOL.model_copy(update={"max_clusters": 1})

    plan = plan_pool(facts(suspended, a_cluster(NAMES[1]), pool=smaller))
    held = plan_pool(facts(suspended, a_cluster(NAMES[1]), sessions=[kept], pool=smaller))
    within = plan_pool(facts(suspended, a_cluster(NAMES[1])))

    assert plan.delete == (NAMES[0],)
    assert held.delete == (NAMES[1],)
    assert within.delete == ()


@pytest.mark.parametrize("pool", [None, Pool(min_clusters=0, max_clusters=1)])
def test_a_smaller_pool_loses_its_empty_clusters_at_once_and_keeps_the_others(
    pool: Pool | None,
) -> None:
    known = facts(
        a_cluster(NAMES[0]), a_cluster(NAMES[1]), sessions=[a_session("a", NAMES[0])], pool=pool
    )

    plan = plan_pool(known)

    assert (plan.create, plan.delete) == ((), (NAMES[1],))


def test_the_status_counts_clusters_models_and_slots() -> None:
    sessions = [a_session("one", NAMES[0]), a_session("two", NAMES[0]), a_session("three")]
    starting = replace(a_cluster(NAMES[1], is_ready=False), gpus=2)
    known = facts(replace(a_cluster(NAMES[0]), gpus=2), starting, sessions=sessions)

    status = pool_status(known)

    assert status is not None
    assert (status.cluster_summary, status.slot_summary) == ("1/2", "2/4")
    assert (status.models, status.waiting, status.gpus) == (2, 1, 4)
    assert status.slots_by_cluster == {NAMES[0]: 2, NAMES[1]: 2}
    assert pool_status(facts(pool=None)) is None


def test_no_name_of_a_cluster_is_used_twice() -> None:
    pool = POOL.model_copy(update={"min_clusters": 3})

    plan = plan_pool(facts(a_cluster(NAMES[1]), pool=pool))

    assert plan.create == ("pool-tiny-0", "pool-tiny-2")
    assert len({*chain(plan.create, [NAMES[1]])}) == 3


def test_a_closed_pool_gets_no_cluster_until_it_opens_again() -> None:
    opens = NOW + timedelta(minutes=5)
    waits = a_session("one", waited_seconds=60)
    closed = replace(facts(sessions=[waits]), closed_until=opens)

    plan = plan_pool(closed)

    assert (plan.create, plan.changes_at) == ((), opens)
    assert "closed" in plan.waiting["one"]
    assert plan_pool(replace(closed, now=opens)).create == ("pool-tiny-0",)


def test_outdated_clusters_are_replaced_one_after_the_other_once_they_are_empty() -> None:
    pool = POOL.model_copy(update={"min_clusters": 2})
    old = [replace(a_cluster(name), is_outdated=True) for name in NAMES[:2]]

    first = plan_pool(facts(*old, pool=pool))
    used = plan_pool(facts(*old, sessions=[a_session("one", NAMES[0])], pool=pool))
    meanwhile = plan_pool(executed(facts(*old, pool=pool), first))

    assert (first.delete, first.create) == ((NAMES[0],), ("pool-tiny-2",))
    assert used.delete == (NAMES[1],)
    assert (meanwhile.delete, meanwhile.create) == ((), ())


def test_a_run_goes_to_an_outdated_cluster_only_if_no_other_has_a_slot() -> None:
    old, new = replace(a_cluster(NAMES[0]), is_outdated=True), a_cluster(NAMES[1])
    full = [a_session("one", NAMES[1]), a_session("two", NAMES[1])]

    assert plan_pool(facts(old, new, sessions=[a_session("a")])).places == {"a": NAMES[1]}
    assert plan_pool(facts(old, new, sessions=[*full, a_session("a")])).places == {"a": NAMES[0]}


def test_a_cluster_whose_memory_is_full_gets_no_session_although_it_has_slots() -> None:
    full = replace(a_cluster(NAMES[0]), most_sessions=1)
    known = facts(full, sessions=[a_session("one", NAMES[0]), a_session("two", waited_seconds=30)])

    plan = plan_pool(known)
    status = pool_status(known)

    assert plan.places == {}
    assert plan.create == (NAMES[1],)
    assert status is not None
    assert status.slot_summary == "1/1"


def test_a_full_cluster_that_measures_more_memory_gets_the_session_that_waits() -> None:
    roomy = replace(a_cluster(NAMES[0]), most_sessions=9)
    known = facts(
        roomy, sessions=[a_session("one", NAMES[0]), a_session("two"), a_session("three")]
    )

    assert plan_pool(known).places == {"two": NAMES[0]}


def test_no_session_is_moved_to_a_cluster_whose_memory_is_full() -> None:
    left = replace(a_cluster(NAMES[0]), is_draining=True)
    full = replace(a_cluster(NAMES[1]), most_sessions=1)
    known = facts(left, full, sessions=[a_session("one", NAMES[0]), a_session("two", NAMES[1])])

    plan = plan_pool(known)

    assert plan.moves.start == {}
    assert plan.create == (NAMES[2],)


def test_a_sampler_takes_a_slot_but_no_memory_of_the_trainer() -> None:
    full = replace(a_cluster(NAMES[0]), most_sessions=1)
    sampler = replace(a_session("sampler"), model_id=None)

    plan = plan_pool(facts(full, sessions=[a_session("one", NAMES[0]), sampler]))

    assert plan.places == {"sampler": NAMES[0]}


def test_as_many_clusters_are_started_as_sessions_need_whose_memory_is_like_that_of_others() -> (
    None
):
    changed = {"slots_per_cluster": 8, "max_clusters": 9, "scale_up_after_seconds": 0}
    pool = POOL.model_copy(update=changed)
    full = replace(a_cluster(NAMES[0]), most_sessions=2)
    on_it = [a_session(f"placed-{index}", NAMES[0]) for index in range(2)]
    waiting = [a_session(f"waiting-{index}") for index in range(5)]

    assert len(plan_pool(facts(full, sessions=[*on_it, *waiting], pool=pool)).create) == 3


def test_a_session_of_a_deleted_pool_cluster_gets_another_place_after_its_head() -> None:
    until = NOW + timedelta(seconds=215)
    known = facts(a_cluster("pool-tiny-1"), sessions=[a_session("one", "pool-tiny-0")])

    waiting = plan_pool(replace(known, ending={"pool-tiny-0": until}))

    assert waiting.places == {}
    assert "pool-tiny-0 was deleted, but its head is still running" in waiting.waiting["one"]
    assert waiting.changes_at == until
    assert plan_pool(known).places == {"one": "pool-tiny-1"}
