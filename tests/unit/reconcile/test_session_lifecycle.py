"""One session's life after another: what becomes of it, what it is told, what is told of it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from pydantic.alias_generators import to_camel

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.decide.actions import (
    Apply,
    CreateSecret,
    Delete,
    Plan,
    SaveRequest,
    SetFinalizer,
)
from tinkercloud_operator.decide.reconcile import reconcile
from tinkercloud_operator.spec.snapshot import ChildKey, PodProblem
from tinkercloud_testing.session_conditions import is_true
from tinkercloud_testing.session_world import ENOUGH_ROUNDS, RAY_CLUSTER, SETTINGS, a_world
from tinkercloud_testing.sessions import a_session, a_status, observed


@pytest.mark.parametrize("history", [["it is deleted"], ["its owner suspends it"]], ids=str)
def test_a_head_that_does_not_answer_is_asked_again_but_not_for_ever(history: list[str]) -> None:
    world = a_world("workers", "it settles", "the head stops responding", *history)
    began = world.session.now

    asked = 0
    while not (world.is_gone or "deletionTimestamp" in world.children[RAY_CLUSTER]["metadata"]):
        plan = world.operate()
        asked += any(isinstance(action, SaveRequest) for action in plan.actions)
        world.pass_time(plan.requeue_after_seconds or 0)

    patience = max(SETTINGS.last_checkpoint_seconds, SETTINGS.stop_seconds)
    assert asked > 2
    assert (world.session.now - began).total_seconds() <= patience


@pytest.mark.parametrize("looks", range(1, 6))
def test_a_session_that_is_wanted_again_while_it_stops_gets_another_head(looks: int) -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    world.happen(*["the operator looks"] * looks, "its owner resumes it", "it settles")

    assert world.status.phase == "Ready"
    assert world.status.restarts == 0


def test_a_head_is_waited_for_as_long_as_it_takes_to_stop_however_long_it_was_not_ready() -> None:
    world = a_world("workers", "it settles", "the trainers are lost", "the operator looks")
    world.happen("half an hour passes", "the head stops responding", "its owner suspends it")

    world.happen(
        "the operator looks", "the operator looks", "a minute passes", "the operator looks"
    )

    assert "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]
    world.happen("the head responds again", "it settles")
    assert world.status.phase == "Suspended"
    assert world.status.saved_incarnation == world.status.incarnation


def test_what_a_head_has_saved_is_written_down_before_it_goes() -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    while not any(isinstance(a, Delete) for a in reconcile(world.observe(), SETTINGS).actions):
        world.operate()

    world.happen("the operator dies after a write", "it settles")
    world.happen("its owner resumes it", "it settles")

    assert world.status.restarts == 0


@pytest.mark.parametrize("writes", range(3))
def test_the_cluster_of_a_session_that_was_wanted_again_outlives_an_operator_that_made_it(
    writes: int,
) -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    while "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]:
        world.operate()
    world.happen("KubeRay works", "its owner resumes it")

    plans = [world.operate(writes), world.operate(writes)]
    while world.status.phase != "Ready" and len(plans) < ENOUGH_ROUNDS:
        plans.append(world.operate())
        world.happen("KubeRay works", "a pod gets on")

    assert world.status.phase == "Ready"
    assert not any(isinstance(action, Delete) for plan in plans for action in plan.actions)


FIRST_FIELDS = {
    "observedGeneration",
    "phase",
    "conditions",
    "endpoint",
    "incarnation",
    "rayCluster",
    "workers",
    "gpus",
    "lastActivityTime",
    "latestCheckpoint",
    "restarts",
    "savedIncarnation",
    "finishedTime",
    "message",
}
"""Of the status, in the first definitions; what came later may not be kept."""


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        ("its owner suspends it", "Suspended"),
        ("half an hour passes", "Suspended"),
        ("a day passes", "Finished"),
    ],
)
@pytest.mark.parametrize("head", ["the head responds again", "the head stops responding"])
def test_a_session_stops_though_the_served_definitions_are_the_first(
    event: str, phase: str, head: str
) -> None:
    world = a_world("short life")
    known = {to_camel(name) for name in TrainingSessionStatus.model_fields}
    world.unknown_fields = frozenset(known - FIRST_FIELDS)
    world.happen("it settles", head, event)

    pauses: list[float | None] = []
    while world.status.phase != phase and len(pauses) < ENOUGH_ROUNDS:
        pause = world.operate().requeue_after_seconds
        pauses.append(pause)
        world.pass_time(min(pause or 0, 5))
        world.happen("KubeRay works", "a pod gets on")

    assert world.status.phase == phase
    assert (0, 0) not in pairwise(pauses)
    assert world.pods == {}


def test_a_resumed_session_gets_its_pods_back() -> None:
    world = a_world("workers", "it settles", "its owner suspends it", "it settles")
    assert world.pods == {}

    world.happen("its owner resumes it", "it settles")

    assert world.status.phase == "Ready"
    assert len(world.pods) == 4
    assert world.status.restarts == 0


@pytest.mark.parametrize("offer", ["workers", "engines", "colocated engines"])
def test_a_suspended_session_keeps_its_secret_and_nothing_else(offer: str) -> None:
    world = a_world(offer, "it settles")
    assert len(world.children) > 4

    world.happen("its owner suspends it", "it settles")

    assert world.has_secret
    assert set(world.children) == {ChildKey("ConfigMap", "one-token")}


def test_what_surrounds_pods_is_there_as_long_as_they_are() -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    policy = ChildKey("NetworkPolicy", "one")

    while world.pods:
        assert policy in world.children
        world.operate()
        world.happen("KubeRay works", "a pod gets on")

    world.settle()
    assert policy not in world.children


def test_the_token_of_a_session_outlives_its_suspension() -> None:
    world = a_world("workers", "it settles", "its owner suspends it", "it settles")
    world.change(spec=a_session())

    plan = reconcile(world.observe(), SETTINGS)

    assert not any(isinstance(action, CreateSecret) for action in plan.actions)
    assert any(isinstance(action, Apply) for action in plan.actions)


def test_a_session_suspended_for_idleness_comes_back_when_it_is_used() -> None:
    world = a_world("workers", "it settles", "half an hour passes", "it settles")
    assert world.pods == {}

    world.happen("a client comes", "it settles")

    assert world.status.phase == "Ready"


def test_a_session_that_waits_while_its_base_model_is_away_is_not_started_by_its_return() -> None:
    world = a_world("workers", "it settles", "half an hour passes", "it settles")

    world.happen("the BaseModel goes", "it settles", "the BaseModel is back", "it settles")

    assert world.status.phase == "Suspended"
    assert world.pods == {}


def test_a_session_that_was_refused_for_long_starts_once_it_is_allowed() -> None:
    world = a_world("workers", "the BaseModel goes", "it settles", "a day passes", "it settles")

    world.happen("the BaseModel is back", "it settles")

    assert world.status.phase == "Ready"


def test_a_session_that_was_queued_for_long_starts_once_it_is_admitted() -> None:
    looks = ["the operator looks", "a day passes"] * 3
    world = a_world("queue", *looks)
    assert world.status.phase == "Queued"

    world.settle()

    assert world.observe().has_pods


def test_what_runs_goes_on_without_its_base_model() -> None:
    world = a_world("workers", "it settles", "the BaseModel goes", "it settles")

    assert world.status.phase == "Ready"
    assert len(world.pods) == 4


def test_an_ended_session_is_deleted_in_time_even_without_its_base_model() -> None:
    world = a_world("for a client, short life", "it settles", "a day passes", "it settles")
    assert world.status.phase == "Finished"

    world.happen("the BaseModel goes", "a day passes", "it settles")

    assert world.is_gone


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("KubeRay is removed", Reason.KUBERAY_MISSING),
        ("children are refused", Reason.APPLY_FAILED),
    ],
)
@pytest.mark.parametrize("offer", ["workers", "queue"])
def test_what_keeps_pods_from_being_made_is_told_before_the_queue(
    offer: str, event: str, reason: Reason
) -> None:
    world = a_world(offer, event, "the operator looks", "the operator looks")

    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    assert ready.reason == reason
    assert is_true(world.status, ConditionType.STALLED)


def test_a_message_of_any_length_fits_the_status() -> None:
    world = a_world("workers", "it settles")
    world.break_pods(PodProblem(Reason.CRASH_LOOP, "x" * 5000))

    world.operate()

    assert len(world.status.message or "") == 1024


def test_a_head_that_ended_unasked_is_counted_once() -> None:
    world = a_world("workers", "it settles", "containers restart", "it settles")

    assert world.status.restarts == 1


def test_the_finalizer_is_held_before_there_is_anything_to_save() -> None:
    surroundings, pods = reconcile(observed(), SETTINGS).stages

    assert SetFinalizer(present=True) in surroundings
    assert any(isinstance(action, CreateSecret) for action in surroundings)
    assert any(isinstance(a, Apply) and a.manifest["kind"] == "RayCluster" for a in pods)


def test_a_sampler_holds_no_finalizer_because_it_has_nothing_to_save() -> None:
    plan = reconcile(observed(spec=a_session(role="Sampler", lora=None)), SETTINGS)

    assert not any(isinstance(action, SetFinalizer) for action in plan.actions)
    assert any(isinstance(action, Apply) for action in plan.actions)


def test_the_same_news_is_announced_once() -> None:
    refused = observed(base_model=None)
    told = reconcile(refused, SETTINGS)
    assert told.event is not None
    assert told.event.is_warning

    again = reconcile(replace(refused, status=told.status or a_status()), SETTINGS)

    assert again == Plan()


def test_nothing_is_made_beside_what_an_earlier_session_of_the_name_had() -> None:
    plan = reconcile(observed(predecessors={RAY_CLUSTER: {"metadata": {}}}), SETTINGS)

    assert plan.actions == (SetFinalizer(present=True),)
    assert plan.status is not None
    assert "deleted session with the same name" in (plan.status.message or "")
