"""The life of a session: saves, suspension, resume, finish and deletion."""

from itertools import pairwise

import pytest
from pydantic.alias_generators import to_camel

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator.decide.session.actions import (
    Apply,
    CreateSecret,
    Delete,
    Plan,
    SaveRequest,
    SetFinalizer,
)
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.spec.observed import ChildKey, PodProblem
from tinkercloud_testing.resources.session_conditions import is_true
from tinkercloud_testing.resources.session_world import (
    ENOUGH_ROUNDS,
    RAY_CLUSTER,
    SETTINGS,
    a_world,
)
from tinkercloud_testing.resources.sessions import a_session, a_status, changed, observed


@pytest.mark.parametrize("head", ["the head stops responding", "the store is away"])
@pytest.mark.parametrize("event", ["it is deleted", "a day passes"])
def test_the_last_save_request_of_a_session_is_repeated_but_not_forever(
    event: str, head: str
) -> None:
    world = a_world("short life", "it settles", head, event, "a client sends a request")
    began = world.known.now

    asked = 0
    while not (world.is_gone or "deletionTimestamp" in world.children[RAY_CLUSTER]["metadata"]):
        plan = world.operate()
        asked += any(isinstance(action, SaveRequest) for action in plan.actions)
        world.pass_time(plan.requeue_after_seconds or 0)

    patience = max(SETTINGS.last_checkpoint_seconds, SETTINGS.stop_seconds_of(None))
    assert asked > 2
    assert (world.known.now - began).total_seconds() <= patience


@pytest.mark.parametrize(
    ("history", "kind"),
    [(["it is deleted"], "checkpoint"), (["its owner suspends it"], "suspend")],
    ids=str,
)
def test_a_head_that_is_not_ready_for_a_moment_still_saves(history: list[str], kind: str) -> None:
    world = a_world("workers", "it settles", "the head fails its probes", "the operator reconciles")

    world.happen(*history)

    plans = [world.operate() for _ in range(2)]
    saves = [each for plan in plans for each in plan.actions if isinstance(each, SaveRequest)]
    assert {each.kind for each in saves} == {kind}


def test_a_head_that_has_never_been_ready_is_not_asked_to_save() -> None:
    world = a_world("workers")
    while not ((head := world.observe().head) and head.is_started):
        world.happen("the operator reconciles", "KubeRay works", "a pod advances")
    world.happen("the head fails its probes", "it is deleted")

    plan = world.operate()

    assert not any(isinstance(action, SaveRequest) for action in plan.actions)


@pytest.mark.parametrize("looks", range(1, 6))
def test_a_session_resumed_while_stopping_gets_a_new_head(looks: int) -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    world.happen(*["the operator reconciles"] * looks, "its owner resumes it", "it settles")

    assert world.status.phase == "Ready"
    assert world.status.restarts == 0


def test_the_stop_timeout_starts_with_the_stop() -> None:
    world = a_world("workers", "it settles", "the trainers are lost", "the operator reconciles")
    world.happen("half an hour passes", "the head stops responding", "its owner suspends it")

    world.happen(
        "the operator reconciles",
        "the operator reconciles",
        "a minute passes",
        "the operator reconciles",
    )

    assert "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]
    world.happen("the head responds again", "it settles")
    assert world.status.phase == "Suspended"
    assert world.status.saved_incarnation == world.status.incarnation


def test_a_completed_save_is_recorded_before_the_head_is_deleted() -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    while not any(isinstance(a, Delete) for a in reconcile(world.observe(), SETTINGS).actions):
        world.operate()

    world.happen("the operator crashes after a write", "it settles")
    world.happen("its owner resumes it", "it settles")

    assert world.status.restarts == 0


@pytest.mark.parametrize("writes", range(3))
def test_the_ray_cluster_of_a_resumed_session_survives_an_operator_crash(
    writes: int,
) -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    while "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]:
        world.operate()
    world.happen("KubeRay works", "its owner resumes it")

    plans = [world.operate(writes), world.operate(writes)]
    while world.status.phase != "Ready" and len(plans) < ENOUGH_ROUNDS:
        plans.append(world.operate())
        world.happen("KubeRay works", "a pod advances")

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
"""Status fields of the oldest CRDs, which may not store later ones."""


@pytest.mark.parametrize(
    ("head", "event", "phase"),
    [
        ("the head responds again", "its owner suspends it", "Suspended"),
        ("the head responds again", "half an hour passes", "Suspended"),
        ("the head responds again", "a day passes", "Finished"),
        ("the head stops responding", "a day passes", "Finished"),
    ],
)
def test_a_session_stops_even_with_the_oldest_crds(head: str, event: str, phase: str) -> None:
    world = a_world("short life")
    known = {to_camel(name) for name in TrainingSessionStatus.model_fields}
    world.unknown_fields = frozenset(known - FIRST_FIELDS)
    world.happen("it settles", head, event)

    pauses: list[float | None] = []
    while world.status.phase != phase and len(pauses) < ENOUGH_ROUNDS:
        pause = world.operate().requeue_after_seconds
        pauses.append(pause)
        world.pass_time(min(pause or 0, 5))
        world.happen("KubeRay works", "a pod advances")

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


def test_support_objects_exist_as_long_as_the_pods() -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    policy = ChildKey("NetworkPolicy", "one")

    while world.pods:
        assert policy in world.children
        world.operate()
        world.happen("KubeRay works", "a pod advances")

    world.settle()
    assert policy not in world.children


def test_the_token_of_a_session_survives_a_suspension() -> None:
    world = a_world("workers", "it settles", "its owner suspends it", "it settles")
    world.change(spec=a_session())

    plan = reconcile(world.observe(), SETTINGS)

    assert not any(isinstance(action, CreateSecret) for action in plan.actions)
    assert any(isinstance(action, Apply) for action in plan.actions)


def test_an_idle_session_resumes_when_it_is_used() -> None:
    world = a_world("workers", "it settles", "half an hour passes", "it settles")
    assert world.pods == {}

    world.happen("a client sends a request", "it settles")

    assert world.status.phase == "Ready"


def test_an_idle_session_is_not_resumed_by_the_return_of_its_base_model() -> None:
    world = a_world("workers", "it settles", "half an hour passes", "it settles")

    world.happen(
        "the BaseModel is deleted", "it settles", "the BaseModel is recreated", "it settles"
    )

    assert world.status.phase == "Suspended"
    assert world.pods == {}


def test_a_session_rejected_for_long_starts_once_it_is_accepted() -> None:
    world = a_world(
        "workers", "the BaseModel is deleted", "it settles", "a day passes", "it settles"
    )

    world.happen("the BaseModel is recreated", "it settles")

    assert world.status.phase == "Ready"


def test_a_session_queued_for_long_starts_once_it_is_admitted() -> None:
    looks = ["the operator reconciles", "a day passes"] * 3
    world = a_world("queue", *looks)
    assert world.status.phase == "Queued"

    world.settle()

    assert world.observe().has_pods


def test_a_running_session_continues_without_its_base_model() -> None:
    world = a_world("workers", "it settles", "the BaseModel is deleted", "it settles")

    assert world.status.phase == "Ready"
    assert len(world.pods) == 4


def test_a_finished_session_is_deleted_on_time_without_its_base_model() -> None:
    world = a_world("for a client, short life", "it settles", "a day passes", "it settles")
    assert world.status.phase == "Finished"

    world.happen("the BaseModel is deleted", "a day passes", "it settles")

    assert world.is_gone


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("KubeRay is removed", Reason.KUBERAY_MISSING),
        ("children are rejected", Reason.APPLY_FAILED),
    ],
)
@pytest.mark.parametrize("offer", ["workers", "queue"])
def test_a_blocker_is_reported_before_the_queue(offer: str, event: str, reason: Reason) -> None:
    world = a_world(offer, event, "the operator reconciles", "the operator reconciles")

    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    assert ready.reason == reason
    assert is_true(world.status, ConditionType.STALLED)


def test_a_message_of_any_length_fits_the_status() -> None:
    world = a_world("workers", "it settles")
    world.break_pods(PodProblem(Reason.CRASH_LOOP, "x" * 5000))

    world.operate()

    assert len(world.status.message or "") == 1024


def test_an_unexpected_end_of_a_head_is_counted_once() -> None:
    world = a_world("workers", "it settles", "containers restart", "it settles")

    assert world.status.restarts == 1


def test_the_finalizer_is_added_before_the_pods() -> None:
    surroundings, pods = reconcile(observed(), SETTINGS).stages

    assert SetFinalizer(present=True) in surroundings
    assert any(isinstance(action, CreateSecret) for action in surroundings)
    assert any(isinstance(a, Apply) and a.manifest["kind"] == "RayCluster" for a in pods)


def test_a_sampling_session_has_no_finalizer() -> None:
    plan = reconcile(observed(spec=a_session(role="Sampler", lora=None)), SETTINGS)

    assert not any(isinstance(action, SetFinalizer) for action in plan.actions)
    assert any(isinstance(action, Apply) for action in plan.actions)


def test_the_same_event_is_posted_once() -> None:
    refused = observed(base_model=None)
    plan = reconcile(refused, SETTINGS)
    assert plan.event is not None
    assert plan.event.is_warning

    again = reconcile(changed(refused, status=plan.status or a_status()), SETTINGS)

    assert again == Plan()


def test_no_children_are_created_until_those_of_a_deleted_session_are_gone() -> None:
    plan = reconcile(observed(predecessors={RAY_CLUSTER: {"metadata": {}}}), SETTINGS)

    assert plan.actions == (SetFinalizer(present=True),)
    assert plan.status is not None
    assert "earlier session with the same name" in (plan.status.message or "")


def test_a_session_shows_that_its_run_is_not_durable_as_long_as_it_serves_requests() -> None:
    kind, reason = ConditionType.DURABILITY_DEGRADED, "the journal can't be written"
    world = a_world("workers", "it settles")
    assert find(world.status.conditions, kind) is None

    world.change(degraded=reason)
    world.settle()
    shown = find(world.status.conditions, kind)
    assert shown is not None
    assert (shown.status, shown.reason, shown.message) == ("True", Reason.WRITES_FAIL, reason)
    assert is_true(world.status, ConditionType.READY)

    world.happen("its owner suspends it", "it settles")
    assert find(world.status.conditions, kind) is None
