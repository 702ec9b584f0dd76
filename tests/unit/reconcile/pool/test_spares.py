"""What warm spares need: clusters that wait, and one session for each of them, ever."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_operator.decide.pool.spare_clusters import (
    Spare,
    SparesFacts,
    SparesPlan,
    Taker,
    plan_spares,
    spares_status,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NAMES = [f"spare-tiny-{index}" for index in range(4)]
SESSIONS = ["one", "two", "three"]


def a_spare(name: str = NAMES[0], *, is_ready: bool = True, taken_by: str | None = None) -> Spare:
    return Spare(name, is_ready, is_stopping=False, taken_by=taken_by, gpus=2)


def a_new_session(name: str = "one") -> Taker:
    return Taker(name, f"uid-{name}", None, may_take=True, needs_cluster=True)


def a_served_session(cluster: str, name: str = "one") -> Taker:
    return Taker(name, f"uid-{name}", cluster, may_take=False, needs_cluster=True)


def facts(
    *spares: Spare,
    takers: Sequence[Taker] = (),
    wanted: int = 1,
    short: int = 0,
    starting: int = 0,
) -> SparesFacts:
    return SparesFacts("spare-tiny", wanted, spares, takers, short, short + starting, NOW)


def executed(before: SparesFacts, plan: SparesPlan, writes: int = 100) -> SparesFacts:
    """Return the facts after the first writes of a plan; each take is two of them."""
    spares = {spare.name: spare for spare in before.spares}
    takers = {taker.name: taker for taker in before.takers}
    steps: list[tuple[str, str, str | None]] = []
    for session, spare in plan.take.items():
        steps += [("own", session, spare), ("place", session, spare)]
    steps += [("place", session, name) for session, name in plan.place.items()]
    steps += [("place", session, None) for session in plan.release]
    steps += [("delete", name, None) for name in plan.delete]
    steps += [("create", name, None) for name in plan.create]
    for what, subject, name in steps[:writes]:
        match what:
            case "own":
                assert name is not None
                assert spares[name].taken_by is None
                spares[name] = replace(spares[name], taken_by=takers[subject].uid)
            case "place":
                taker = takers[subject]
                takers[subject] = replace(taker, cluster=name, may_take=False)
            case "delete":
                spares[subject] = replace(spares[subject], is_stopping=True)
            case _:
                assert subject not in spares
                spares[subject] = a_spare(subject, is_ready=False)
    return replace(before, spares=[*spares.values()], takers=[*takers.values()])


@st.composite
def some_facts(draw: st.DrawFn) -> SparesFacts:
    owners = st.sampled_from([None, None, *(f"uid-{name}" for name in [*SESSIONS, "gone"])])
    rarely = st.sampled_from([False, False, False, True])
    spares = [
        Spare(
            name,
            draw(st.booleans()),
            draw(rarely),
            taken_by=draw(owners),
            is_outdated=draw(rarely),
            has_failed=draw(rarely),
        )
        for name in NAMES[: draw(st.integers(0, 4))]
    ]
    owned = [spare.taken_by for spare in spares if spare.taken_by]
    spares = [
        spare
        if spare.taken_by is None or owned.count(spare.taken_by) < 2
        else replace(spare, taken_by=None)
        for spare in spares
    ]
    takers = []
    for name in SESSIONS[: draw(st.integers(0, 3))]:
        own = next((each.name for each in spares if each.taken_by == f"uid-{name}"), None)
        cluster = draw(st.sampled_from([own, None, "spare-tiny-gone"]))
        may_take = cluster is None and draw(st.booleans())
        takers.append(Taker(name, f"uid-{name}", cluster, may_take, draw(st.booleans())))
    return facts(
        *spares,
        takers=takers,
        wanted=draw(st.integers(0, 3)),
        short=draw(st.sampled_from([0, 0, 1])),
    )


@given(some_facts(), st.integers(0, 8))
def test_no_spare_is_given_to_two_sessions_whenever_the_operator_is_killed(
    known: SparesFacts, writes: int
) -> None:
    interrupted = executed(known, plan_spares(known), writes)
    after = executed(interrupted, plan_spares(interrupted))

    for before, later in zip(known.spares, after.spares, strict=False):
        if before.taken_by is not None:
            assert later.taken_by == before.taken_by
    owned = [spare.taken_by for spare in after.spares if spare.taken_by is not None]
    assert len(owned) == len(set(owned))
    assert all(
        taker.cluster is None
        or any(
            spare.name == taker.cluster and spare.taken_by == taker.uid for spare in after.spares
        )
        for taker in after.takers
    )


@given(some_facts())
def test_only_ready_spares_of_the_current_specification_are_taken(known: SparesFacts) -> None:
    usable = {
        spare.name
        for spare in known.spares
        if spare.is_ready
        and spare.taken_by is None
        and not (spare.is_stopping or spare.is_outdated or spare.has_failed)
    }
    plan = plan_spares(known)

    assert {*plan.take.values()} <= usable
    assert len({*plan.take.values()}) == len(plan.take)
    assert all(taker.may_take for taker in known.takers if taker.name in plan.take)
    assert not {*plan.take.values(), *plan.place.values()} & {*plan.delete}


@given(some_facts())
def test_the_cluster_of_a_session_is_never_deleted_while_it_needs_it(known: SparesFacts) -> None:
    used = {
        taker.cluster
        for taker in known.takers
        if taker.needs_cluster
        and any(each.name == taker.cluster and not each.has_failed for each in known.spares)
    }

    assert not used & {*plan_spares(known).delete}


@settings(max_examples=200)
@given(some_facts())
def test_plans_lead_to_the_wanted_number_of_spares_and_then_change_nothing(
    known: SparesFacts,
) -> None:
    for _ in range(8):
        known = executed(known, plan_spares(known))
        gone = [spare for spare in known.spares if not spare.is_stopping]
        known = replace(known, spares=[replace(spare, is_ready=True) for spare in gone])

    assert plan_spares(known) == SparesPlan({}, {}, (), (), ())
    free = [spare for spare in known.spares if spare.taken_by is None]
    assert len(free) == (known.wanted if not known.sessions_short else 0)


def test_a_new_session_takes_over_a_spare_and_another_spare_replaces_it() -> None:
    plan = plan_spares(facts(a_spare(), takers=[a_new_session()]))

    assert plan.take == {"one": NAMES[0]}
    assert plan.create == (NAMES[1],)
    assert plan.delete == ()


def test_a_spare_that_is_not_ready_is_not_taken() -> None:
    assert plan_spares(facts(a_spare(is_ready=False), takers=[a_new_session()])).take == {}


def test_the_older_of_two_sessions_gets_the_last_spare() -> None:
    takers = [a_new_session("one"), a_new_session("two")]

    assert plan_spares(facts(a_spare(), takers=takers)).take == {"one": NAMES[0]}


def test_an_interrupted_take_is_completed() -> None:
    taken = a_spare(taken_by="uid-one")

    plan = plan_spares(facts(taken, takers=[a_new_session()], wanted=0))

    assert (plan.take, plan.place, plan.delete) == ({}, {"one": NAMES[0]}, ())


def test_a_spare_whose_session_has_ended_is_deleted_and_never_taken_again() -> None:
    plan = plan_spares(facts(a_spare(taken_by="uid-gone"), takers=[a_new_session()]))

    assert (plan.take, plan.delete) == ({}, (NAMES[0],))


def test_the_cluster_of_a_suspended_session_is_deleted_and_the_session_is_released() -> None:
    suspended = replace(a_served_session(NAMES[0]), needs_cluster=False)

    plan = plan_spares(facts(a_spare(taken_by="uid-one"), takers=[suspended], wanted=0))
    assert (plan.delete, plan.release) == ((NAMES[0],), ())
    assert plan_spares(facts(takers=[suspended], wanted=0)).release == ("one",)


def test_a_session_that_started_its_own_pods_loses_the_spare_that_it_owns() -> None:
    started = replace(a_new_session(), may_take=False)

    plan = plan_spares(facts(a_spare(taken_by="uid-one"), takers=[started], wanted=0))

    assert plan.delete == (NAMES[0],)


def test_spares_are_the_first_to_go_while_a_session_waits_for_nodes_or_quota() -> None:
    taken = a_spare(NAMES[1], taken_by="uid-one")
    short = facts(a_spare(), taken, takers=[a_served_session(NAMES[1])], wanted=2, short=1)

    plan = plan_spares(short)

    assert (plan.delete, plan.create) == ((NAMES[0],), ())
    status = spares_status(short)
    assert status is not None
    assert "1 sessions wait for nodes or quota" in status.message


def test_a_spare_that_made_room_is_replaced_once_the_session_has_its_pods() -> None:
    starting = facts(starting=1)

    assert plan_spares(starting).create == ()
    status = spares_status(starting)
    assert status is not None
    assert status.message == "no spare is started: 1 sessions get their pods first"
    assert plan_spares(facts()).create == (NAMES[0],)


def test_spares_stay_while_the_pods_of_a_session_are_being_created() -> None:
    assert plan_spares(facts(a_spare(), starting=1)).delete == ()


def test_outdated_spares_are_replaced_one_after_the_other() -> None:
    outdated = [replace(a_spare(name), is_outdated=True) for name in NAMES[:2]]

    known = facts(*outdated, wanted=2)
    assert plan_spares(known).delete == (NAMES[0],)
    known = executed(known, plan_spares(known))
    assert plan_spares(known).delete == ()


def test_fewer_wanted_spares_remove_those_that_are_not_ready_first() -> None:
    known = facts(a_spare(NAMES[0]), a_spare(NAMES[1], is_ready=False), wanted=1)

    assert plan_spares(known).delete == (NAMES[1],)


def test_no_spare_is_added_while_the_operator_is_being_uninstalled() -> None:
    closed = replace(facts(), closed_until=NOW + timedelta(minutes=5))

    assert plan_spares(closed).create == ()
    assert plan_spares(replace(closed, now=NOW + timedelta(minutes=6))).create == (NAMES[0],)


def test_the_status_counts_spares_those_that_are_taken_and_their_gpus() -> None:
    known = facts(
        a_spare(),
        a_spare(NAMES[1], is_ready=False),
        a_spare(NAMES[2], taken_by="uid-one"),
        wanted=2,
    )

    status = spares_status(known)

    assert status is not None
    assert (status.ready, status.clusters, status.taken, status.gpus) == (1, 2, 1, 4)
    assert status.summary == "1/2"
    assert spares_status(facts(wanted=0)) is None


def test_a_session_of_a_deleted_spare_gets_its_own_pods_after_its_head() -> None:
    until = NOW + timedelta(seconds=215)
    known = facts(takers=[a_served_session("spare-tiny-0")], wanted=0)

    waiting = plan_spares(replace(known, ending={"spare-tiny-0": until}))

    assert waiting.release == ()
    assert waiting.changes_at == until
    assert plan_spares(known).release == ("one",)
