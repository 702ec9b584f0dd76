"""The slots of clusters whose heads have measured how many models fit."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_operator.decide.pool.head_answers import HeadMemory, head_memory
from tinkercloud_operator.decide.pool.pool_facts import pool_facts
from tinkercloud_operator.decide.pool.pool_model import PoolFacts, Refusal
from tinkercloud_operator.decide.pool.pool_moves import MAX_MOVES
from tinkercloud_operator.decide.pool.slots_plan import plan_pool, pool_status
from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_testing.resources.sessions import (
    MODEL_NAME,
    a_base_model_manifest,
    a_session_manifest,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
RANK_BYTES = 1000
ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Accepted"}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "lastTransitionTime": "2026-01-01T11:00:00Z",
}


def a_session(name: str, **spec: Any) -> Any:
    """Return a session with what the Kubernetes API sets."""
    made = a_session_manifest(name, **spec)
    made["metadata"] |= {"uid": name, "creationTimestamp": "2026-01-01T11:00:00Z"}
    return made


def a_cluster(name: str, *, is_ready: bool = True, drain: str = "") -> Any:
    """Return a cluster whose head has the name as its incarnation."""
    made = a_session(name, role="Pool", lora=None)
    made["metadata"]["annotations"] = {labels.DRAIN: drain}
    return made | {"status": {"incarnation": name, "conditions": [READY] if is_ready else []}}


def a_sampler(name: str, cluster: str, **status: Any) -> Any:
    placed = a_session(name, role="Sampler", sharing="Shared", lora=None, poolCluster=cluster)
    return placed | {"status": status}


def a_run(name: str, cluster: str | None = None, rank: int = 8, silent_minutes: int = 0) -> Any:
    run = a_session(
        name,
        sharing="Shared",
        modelId=f"{name}:train:0",
        poolCluster=cluster,
        lora={"rank": rank},
    )
    run["metadata"]["finalizers"] = [labels.FINALIZER]
    used = timestamp(NOW - timedelta(minutes=silent_minutes))
    run["metadata"]["annotations"] = {labels.LAST_ACTIVITY: used}
    return run | {"status": {"conditions": [ACCEPTED]}}


def facts_of(*sessions: Any, measured: Mapping[str, HeadMemory], **pool: int) -> PoolFacts:
    """Return the facts about a pool whose clusters have sixteen slots."""
    pool = {"maxClusters": 4, "slotsPerCluster": 16, "scaleUpAfterSeconds": 0} | pool
    offered = a_base_model_manifest("model", sharing="Shared", pool=pool)
    return pool_facts(
        MODEL_NAME,
        offered,
        sessions,
        deleting=frozenset(),
        given_away=frozenset(),
        taken_back=frozenset(),
        failed={},
        now=NOW,
        measured=measured,
    )


def most_sessions(*sessions: Any, measured: dict[str, int]) -> dict[str, int | None]:
    """Return how many sessions fit on each cluster."""
    known = {name: HeadMemory(most) for name, most in measured.items()}
    facts = facts_of(*sessions, measured=known)
    return {each.name: each.most_sessions for each in facts.clusters}


def a_full_head(*held: str, room_for_ranks: int) -> HeadMemory:
    """Return the memory of a head with models of rank 64, and room for a number of ranks."""
    capacity = HeadCapacity(
        models=len(held),
        model_bytes=64 * RANK_BYTES,
        pass_bytes=0,
        free_bytes=room_for_ranks * RANK_BYTES,
        more_models=room_for_ranks // 64,
        held=held,
        rank_bytes=RANK_BYTES,
    )
    return HeadMemory(len(held) + room_for_ranks // 64, capacity, held)


def test_samplers_take_none_of_the_memory_until_they_have_finished() -> None:
    sessions = [
        a_cluster("a"),
        a_sampler("one", "a"),
        a_sampler("two", "a"),
        a_sampler("finished", "a", finishedTime="2026-01-01T11:30:00Z"),
    ]

    assert most_sessions(*sessions, measured={"a": 4}) == {"a": 6}


def test_a_head_that_has_measured_nothing_is_taken_to_be_like_the_smallest_other() -> None:
    clusters = [a_cluster("a"), a_cluster("b"), a_cluster("new")]

    assert most_sessions(*clusters, measured={"a": 4, "b": 3}) == {"a": 4, "b": 3, "new": 3}
    assert most_sessions(*clusters, measured={}) == {"a": None, "b": None, "new": None}


def test_a_small_run_gets_a_place_where_one_like_the_largest_does_not_fit() -> None:
    sessions = [a_cluster("a"), a_run("large", "a", 64), a_run("small"), a_run("other", rank=64)]

    plan = plan_pool(
        facts_of(*sessions, measured={"a": a_full_head("large:train:0", room_for_ranks=20)})
    )

    assert plan.places == {"small": "a"}
    # The other one fits no cluster that there is.
    assert len(plan.create) == 1


def test_runs_that_a_head_does_not_have_yet_take_its_memory_by_their_own_ranks() -> None:
    memory = {"a": a_full_head("large:train:0", room_for_ranks=20)}
    there = [a_cluster("a"), a_run("large", "a", 64), a_run("on-its-way", "a", 8)]
    waiting = [a_run(f"waiting-{number}", rank=5) for number in range(4)]

    plan = plan_pool(facts_of(*there, *waiting, measured=memory))

    assert plan.places == {"waiting-0": "a", "waiting-1": "a"}


def test_a_run_that_is_larger_than_all_waits_for_another_cluster_rather_than_fail() -> None:
    memory = {"a": a_full_head("large:train:0", room_for_ranks=100)}

    plan = plan_pool(
        facts_of(a_cluster("a"), a_run("large", "a", 64), a_run("huge", rank=128), measured=memory)
    )

    assert plan.places == {}
    assert len(plan.create) == 1


def test_an_empty_head_gets_a_run_and_says_itself_if_it_is_too_large() -> None:
    memory = {"a": a_full_head(room_for_ranks=1)}

    plan = plan_pool(facts_of(a_cluster("a"), a_run("huge", rank=128), measured=memory))

    assert plan.places == {"huge": "a"}


def test_a_run_on_a_drained_cluster_gets_a_new_one_if_the_memory_of_others_has_no_room() -> None:
    there = [
        a_cluster("a"),
        a_run("large", "a", 64),
        a_cluster("drained", drain="true"),
        a_run("huge", "drained", 128),
    ]
    memory = {
        "a": a_full_head("large:train:0", room_for_ranks=100),
        "drained": a_full_head("huge:train:0", room_for_ranks=0),
    }

    plan = plan_pool(facts_of(*there, measured=memory))

    assert (plan.moves.start, len(plan.create)) == ({}, 1)
    new = a_cluster(plan.create[0], is_ready=False)
    assert plan_pool(facts_of(*there, new, measured=memory)).create == ()


def test_no_cluster_is_emptied_if_the_memory_of_others_has_no_room_for_all_of_its_runs() -> None:
    there = [a_cluster("a"), a_run("one", "a"), a_run("two", "a"), a_run("three", "a")]
    there += [a_cluster("b"), a_run("small", "b", 8), a_run("huge", "b", 128)]
    held = {"a": ["one", "two", "three"], "b": ["small", "huge"]}

    def moves(room_for_ranks: int) -> Mapping[str, str]:
        # For small models, the memory has room for all slots.
        memory = {
            name: replace(
                a_full_head(*(f"{run}:train:0" for run in runs), room_for_ranks=room_for_ranks),
                most_models=16,
            )
            for name, runs in held.items()
        }
        return plan_pool(facts_of(*there, measured=memory, minClusters=1)).moves.start

    assert moves(room_for_ranks=135) == {}
    assert moves(room_for_ranks=136) == {"small": "a", "huge": "a"}


def two_on_a_head_of_one(**measured: Any) -> tuple[list[Any], dict[str, HeadMemory]]:
    """Return a cluster with two runs of rank 8, whose head has one and no room for the other."""
    sessions = [a_cluster("a"), a_run("one", "a"), a_run("two", "a")]
    return sessions, {"a": a_full_head("one:train:0", room_for_ranks=7), **measured}


def test_a_placed_run_without_room_gets_another_cluster_and_says_why_it_waits() -> None:
    there, memory = two_on_a_head_of_one()

    plan = plan_pool(facts_of(*there, measured=memory))
    starting = a_cluster(plan.create[0], is_ready=False)
    meanwhile = plan_pool(facts_of(*there, starting, measured=memory))
    at_most = facts_of(*there, measured=memory, maxClusters=1)

    assert (len(plan.create), meanwhile.create) == (1, ())
    assert (plan.moves.start, meanwhile.moves.start) == ({}, {})
    [(name, message)] = meanwhile.waiting.items()
    assert name == "two"
    assert message == (
        "the memory of pool cluster a has no room for its adapter of rank 8 (8000 bytes), with 1"
        " models there; it is moved when another has room: waiting for a cluster of the pool to be"
        f" ready: {plan.create[0]}"
    )
    full = plan_pool(at_most)
    assert (full.create, full.changes_at) == ((), NOW + timedelta(minutes=5))
    assert "pool.maxClusters is 1" in full.waiting["two"]
    status = pool_status(at_most)
    assert status is not None
    assert status.waiting == 1


def test_nothing_is_started_or_moved_for_a_run_whose_client_is_silent() -> None:
    _, memory = two_on_a_head_of_one(b=a_full_head("three:train:0", room_for_ranks=8))
    there = [a_cluster("a"), a_run("one", "a"), a_run("two", "a", silent_minutes=5)]

    alone = plan_pool(facts_of(*there, measured=memory))
    other = plan_pool(facts_of(*there, a_cluster("b"), a_run("three", "b"), measured=memory))

    assert (alone.create, alone.waiting, other.moves.start) == ((), {}, {})


def test_a_placed_run_without_room_is_moved_to_a_cluster_that_has_some() -> None:
    there, memory = two_on_a_head_of_one(b=a_full_head("three:train:0", room_for_ranks=8))
    there += [a_cluster("b"), a_run("three", "b")]

    plan = plan_pool(facts_of(*there, a_run("new"), measured=memory))

    # It gets the room before a new run.
    assert (plan.moves.start, plan.places) == ({"two": "b"}, {})
    assert plan.waiting.keys() == {"new"}


def test_runs_that_their_head_has_are_not_moved_although_it_has_room_for_no_more() -> None:
    there = [a_cluster("a"), a_run("one", "a"), a_run("two", "a"), a_cluster("b")]
    held = ("one:train:0", "two:train:0")
    memory = {"a": a_full_head(*held, room_for_ranks=0), "b": a_full_head(room_for_ranks=200)}

    plan = plan_pool(facts_of(*there, measured=memory, minClusters=2))

    assert (plan.moves.start, plan.waiting, plan.create) == ({}, {}, ())


def test_a_placed_run_stays_if_its_own_head_has_room_again() -> None:
    there, memory = two_on_a_head_of_one(b=a_full_head(room_for_ranks=200))
    memory["a"] = a_full_head("one:train:0", room_for_ranks=8)

    plan = plan_pool(facts_of(*there, a_cluster("b"), measured=memory, minClusters=2))

    assert (plan.moves.start, plan.waiting) == ({}, {})


def test_a_run_without_room_is_moved_although_its_head_does_not_know_sizes_by_rank() -> None:
    there, _ = two_on_a_head_of_one()
    there += [a_cluster("b"), a_run("three", "b")]
    memory = {
        "a": HeadMemory(1, held=("one:train:0",)),
        "b": HeadMemory(2, held=("three:train:0",)),
    }

    plan = plan_pool(facts_of(*there, measured=memory))

    assert plan.moves.start == {"two": "b"}


def test_more_runs_without_room_than_move_at_a_time_start_no_cluster_they_do_not_need() -> None:
    lacking = [a_run(f"more-{number}", "a") for number in range(MAX_MOVES + 1)]
    there, memory = two_on_a_head_of_one(b=a_full_head("three:train:0", room_for_ranks=200))
    there += [*lacking, a_cluster("b"), a_run("three", "b")]

    plan = plan_pool(facts_of(*there, measured=memory))

    assert (len(plan.moves.start), plan.create) == (MAX_MOVES, ())
    assert len(plan.waiting) == 2
    assert all("other runs are moved first" in why for why in plan.waiting.values())


def test_a_run_without_room_that_its_head_cannot_give_away_says_both() -> None:
    there, memory = two_on_a_head_of_one(b=a_full_head(room_for_ranks=200))
    facts = facts_of(*there, a_cluster("b"), measured=memory)
    refusal = Refusal("the store is full", NOW + timedelta(seconds=60))
    sessions = [replace(each, refusal=refusal) for each in facts.sessions]

    plan = plan_pool(replace(facts, sessions=sessions))

    assert (plan.moves.start, plan.create) == ({}, ())
    assert "has no room" in plan.waiting["two"]
    assert "the store is full" in plan.waiting["two"]


def test_runs_that_fit_nowhere_do_not_delay_the_others_of_a_drained_cluster() -> None:
    there = [a_cluster("drained", drain="true"), a_cluster("b"), a_run("there", "b")]
    huge = [a_run(f"huge-{number}", "drained", 128) for number in range(MAX_MOVES)]
    names = [each["spec"]["modelId"] for each in huge]
    memory = {
        "drained": a_full_head(*names, "small:train:0", room_for_ranks=0),
        "b": a_full_head("there:train:0", room_for_ranks=100),
    }

    plan = plan_pool(facts_of(*there, *huge, a_run("small", "drained"), measured=memory))

    assert plan.moves.start == {"small": "b"}


def test_a_head_that_has_said_nothing_yet_gets_one_run_at_a_time_if_others_say_sizes() -> None:
    there = [a_cluster("a"), a_run("large", "a", 64), a_cluster("new")]
    waiting = [a_run(f"huge-{number}", rank=128) for number in range(4)]
    memory = {"a": a_full_head("large:train:0", room_for_ranks=100)}

    assert plan_pool(facts_of(*there, *waiting, measured=memory)).places == {"huge-0": "new"}
    placed = a_run("huge-0", "new", 128)
    assert plan_pool(facts_of(*there, placed, *waiting[1:], measured=memory)).places == {}

    memory["new"] = a_full_head("huge-0:train:0", room_for_ranks=200)
    later = plan_pool(facts_of(*there, placed, *waiting[1:], measured=memory))
    assert later.places == {"huge-1": "new"}


def test_an_empty_head_gets_as_many_runs_as_its_sizes_have_room_for() -> None:
    empty = HeadCapacity(0, 0, 0, 300 * RANK_BYTES, held=(), rank_bytes=RANK_BYTES)
    memory = head_memory(a_status([], empty), None)
    assert memory is not None
    waiting = [a_run(f"huge-{number}", rank=128) for number in range(4)]

    plan = plan_pool(facts_of(a_cluster("a"), *waiting, measured={"a": memory}))

    assert plan.places == {"huge-0": "a", "huge-1": "a"}


def a_status(models: list[str], capacity: HeadCapacity | None) -> HeadStatus:
    return HeadStatus(
        head="head",
        generation="0",
        model_name=MODEL_NAME,
        ready=True,
        models=models,
        samplers=0,
        pending_requests=0,
        idle_seconds=0.0,
        capacity=capacity,
    )


def test_a_model_that_is_being_created_is_not_counted_twice() -> None:
    capacity = HeadCapacity(1, 10, 0, 30, more_models=3, held=("one",))

    memory = head_memory(a_status(["new", "one"], capacity), None)

    assert memory is not None
    assert memory.most_models == 4


@pytest.mark.parametrize("before", [None, HeadMemory(4)])
def test_a_head_without_models_has_the_number_that_it_had(before: HeadMemory | None) -> None:
    memory = head_memory(a_status([], HeadCapacity(0, 0, 0, 30, held=(), rank_bytes=10)), before)

    assert (memory.most_models if memory is not None else None) == (4 if before else None)
