"""Reconciling as a function: whatever happens, in whatever order, it ends where it should."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkercloud_operator.decide.actions import Plan
from tinkercloud_operator.decide.reconcile import reconcile
from tinkercloud_testing.session_conditions import reached
from tinkercloud_testing.session_world import (
    EVENTS,
    OFFERS,
    RAY_CLUSTER,
    SETTINGS,
    a_world,
    ranks_in_pods,
    wanted_pods,
)

GROWTH = ("the operator looks", "KubeRay works", "a pod gets on", "Kueue admits")
CHANGES = ("its owner wants one trainer", "its owner wants all trainers", "the BaseModel shrinks")
HEADS = (
    "the head stops responding",
    "the head responds again",
    "a pod gets on",
    "containers restart",
)

offers = st.sampled_from(sorted(OFFERS))
histories = st.lists(st.sampled_from(sorted(EVENTS)), max_size=25)
short_histories = st.lists(st.sampled_from(sorted(EVENTS)), max_size=5)
thorough = settings(max_examples=100, suppress_health_check=list(HealthCheck))


@thorough
@given(offers, histories)
def test_it_comes_to_rest_whatever_happened(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer, *history)

    world.settle()

    again = Plan() if world.is_gone else reconcile(world.observe(), SETTINGS)
    assert again.actions == ()
    assert again.status is None


@thorough
@given(offers, histories)
def test_at_rest_nothing_is_to_be_done_before_the_time_it_names_and_something_then(
    offer: str, history: Sequence[str]
) -> None:
    world = a_world(offer, *history)
    named = world.settle().requeue_after_seconds

    world.pass_time(max(0, named - 1) if named is not None else 10 * 365 * 86400)

    assert world.is_gone or reconcile(world.observe(), SETTINGS).actions == ()
    assert world.is_gone or reconcile(world.observe(), SETTINGS).status is None
    world.pass_time(1)
    then = reconcile(world.observe(), SETTINGS)
    assert world.is_gone or named is None or then.actions or then.status


@thorough
@given(offers, histories)
def test_at_rest_a_session_has_all_its_pods_or_none(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer, *history, "the BaseModel is back")

    world.settle()

    cluster = world.children.get(RAY_CLUSTER)
    wanted = wanted_pods(cluster) if cluster is not None else []
    is_at_rest = world.status.phase in {"Suspended", "Finished", "Failed"}
    assert world.is_gone or sorted(world.pods) == sorted(wanted)
    assert world.is_gone or (cluster is None) == is_at_rest
    assert world.is_gone or cluster is None or world.has_secret
    assert world.is_gone or world.status.phase in {
        "Ready",
        "Suspended",
        "Finished",
        "Failed",
    }


@thorough
@given(offers, short_histories, st.sampled_from(CHANGES), short_histories)
def test_at_rest_pods_have_room_for_the_ranks_that_the_head_counted_when_it_began(
    offer: str, before: Sequence[str], change: str, after: Sequence[str]
) -> None:
    world = a_world(offer, "it settles", *before, change, *after, "the BaseModel is back")

    world.settle()

    has_begun = not world.is_gone and RAY_CLUSTER in world.children and world.told is not None
    told = world.told["trainer"].get("ranks", 0) if has_begun and world.told else 0
    assert not has_begun or ranks_in_pods(world) == told


@thorough
@given(offers, histories)
def test_at_rest_a_suspended_session_has_no_pods_even_without_its_base_model(
    offer: str, history: Sequence[str]
) -> None:
    world = a_world(offer, *history, "its owner suspends it")

    world.settle()

    assert world.is_gone or RAY_CLUSTER not in world.children
    assert world.is_gone or world.pods == {}


@thorough
@given(offers, st.lists(st.sampled_from(GROWTH), max_size=60))
def test_conditions_only_rise_while_nothing_fails(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer)

    heights = [0]
    for event in history:
        world.happen(event)
        heights.append(sum(reached(world.status)))

    assert heights == sorted(heights)


@thorough
@given(offers, histories, st.lists(st.sampled_from(HEADS), min_size=20, max_size=20))
def test_a_deleted_session_is_let_go_in_bounded_time_whatever_its_head_does(
    offer: str, history: Sequence[str], head: Sequence[str]
) -> None:
    world = a_world(offer, "it settles", *history, "the head stops responding", "it is deleted")

    events = iter(head)
    patience = SETTINGS.last_checkpoint_seconds + 6
    end = world.session.now + timedelta(seconds=patience)
    while not world.is_gone:
        assert world.session.now <= end
        plan = world.operate()
        world.happen(next(events))
        world.pass_time(min(plan.requeue_after_seconds or 0, 4))


LIVES: Mapping[str, Sequence[str]] = {
    "create": (),
    "ready": ("it settles", "containers restart"),
    "suspend": ("it settles", "its owner suspends it"),
    "resume": ("it settles", "its owner suspends it", "it settles", "its owner resumes it"),
    "delete": ("it settles", "it is deleted"),
    "cull": ("it settles", "half an hour passes"),
}


@pytest.mark.parametrize("writes", range(10))
@pytest.mark.parametrize("life", LIVES)
def test_an_operator_that_dies_after_any_write_is_taken_over_from(life: str, writes: int) -> None:
    undisturbed, disturbed = a_world("workers", *LIVES[life]), a_world("workers", *LIVES[life])

    undisturbed.settle()
    disturbed.operate(writes)
    disturbed.settle()

    assert disturbed.is_gone == undisturbed.is_gone
    assert disturbed.children == undisturbed.children
    assert disturbed.pods.keys() == undisturbed.pods.keys()
    assert disturbed.status.phase == undisturbed.status.phase
