"""Reconciliation as a function: it converges after any sequence of events."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkercloud_operator.decide.session.actions import Plan
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_testing.resources.session_conditions import reached
from tinkercloud_testing.resources.session_world import (
    EVENTS,
    OFFERS,
    RAY_CLUSTER,
    SETTINGS,
    a_world,
    ranks_in_pods,
    wanted_pods,
)

pytestmark = pytest.mark.timeout(300)

GROWTH = ("the operator reconciles", "KubeRay works", "a pod advances", "Kueue admits")
CHANGES = (
    "its owner requests one trainer",
    "its owner requests all trainers",
    "the BaseModel shrinks",
)
HEADS = (
    "the head stops responding",
    "the head responds again",
    "a pod advances",
    "containers restart",
)

offers = st.sampled_from(sorted(OFFERS))
histories = st.lists(st.sampled_from(sorted(EVENTS)), max_size=25)
short_histories = st.lists(st.sampled_from(sorted(EVENTS)), max_size=5)
thorough = settings(
    max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck)
)


@thorough
@given(offers, histories)
def test_a_session_settles_after_any_history(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer, *history)

    world.settle()

    again = Plan() if world.is_gone else reconcile(world.observe(), SETTINGS)
    assert again.actions == ()
    assert again.status is None


@thorough
@given(offers, histories)
def test_a_settled_session_needs_no_action_until_its_requeue_time(
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
def test_a_settled_session_has_all_of_its_pods_or_none(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer, *history, "the BaseModel is recreated")

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
def test_the_pods_of_a_settled_session_hold_the_ranks_in_the_head_configuration(
    offer: str, before: Sequence[str], change: str, after: Sequence[str]
) -> None:
    world = a_world(offer, "it settles", *before, change, *after, "the BaseModel is recreated")

    world.settle()

    has_started = (
        not world.is_gone and RAY_CLUSTER in world.children and world.head_config is not None
    )
    ranks = world.head_config["trainer"].get("ranks", 0) if has_started and world.head_config else 0
    assert not has_started or ranks_in_pods(world) == ranks


@thorough
@given(offers, histories)
def test_a_settled_suspended_session_has_no_pods_even_without_its_base_model(
    offer: str, history: Sequence[str]
) -> None:
    world = a_world(offer, *history, "its owner suspends it")

    world.settle()

    assert world.is_gone or RAY_CLUSTER not in world.children
    assert world.is_gone or world.pods == {}


@thorough
@given(offers, st.lists(st.sampled_from(GROWTH), max_size=60))
def test_no_condition_regresses_while_nothing_fails(offer: str, history: Sequence[str]) -> None:
    world = a_world(offer)

    heights = [0]
    for event in history:
        world.happen(event)
        heights.append(sum(reached(world.status)))

    assert heights == sorted(heights)


@thorough
@given(offers, histories, st.lists(st.sampled_from(HEADS), min_size=20, max_size=20))
def test_a_deleted_session_loses_its_finalizer_in_bounded_time(
    offer: str, history: Sequence[str], head: Sequence[str]
) -> None:
    world = a_world(offer, "it settles", *history, "the head stops responding", "it is deleted")

    events = iter(head)
    patience = SETTINGS.last_checkpoint_seconds + 6
    end = world.known.now + timedelta(seconds=patience)
    while not world.is_gone:
        assert world.known.now <= end
        plan = world.operate()
        world.happen(next(events))
        world.pass_time(min(plan.requeue_after_seconds or 0, 4))


HISTORIES: Mapping[str, Sequence[str]] = {
    "create": (),
    "ready": ("it settles", "containers restart"),
    "suspend": ("it settles", "its owner suspends it"),
    "resume": ("it settles", "its owner suspends it", "it settles", "its owner resumes it"),
    "delete": ("it settles", "it is deleted"),
    "cull": ("it settles", "half an hour passes"),
}


@pytest.mark.parametrize("writes", range(10))
@pytest.mark.parametrize("life", HISTORIES)
def test_another_operator_takes_over_after_a_crash_at_any_write(life: str, writes: int) -> None:
    undisturbed, disturbed = (
        a_world("workers", *HISTORIES[life]),
        a_world("workers", *HISTORIES[life]),
    )

    undisturbed.settle()
    disturbed.operate(writes)
    disturbed.settle()

    assert disturbed.is_gone == undisturbed.is_gone
    assert disturbed.children == undisturbed.children
    assert disturbed.pods.keys() == undisturbed.pods.keys()
    assert disturbed.status.phase == undisturbed.status.phase
