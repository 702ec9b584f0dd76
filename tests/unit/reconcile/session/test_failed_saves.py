"""A session keeps its pods while its state cannot be saved, unless it has to end."""

import pytest

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.decide.session.actions import SaveRequest
from tinkercloud_testing.resources.session_conditions import is_true
from tinkercloud_testing.resources.session_world import (
    HEAD_SERVICE,
    RAY_CLUSTER,
    SETTINGS,
    STORE_ERROR,
    World,
    a_world,
)
from tinkercloud_testing.resources.sessions import a_base_model

HOUR = 3600
STOPS = ["its owner suspends it", "half an hour passes", "a node is cordoned"]


def operate_for(world: World, seconds: float) -> int:
    """Let the operator look whenever it wants to; return the number of save requests."""
    end, asked = world.known.now.timestamp() + seconds, 0
    while world.known.now.timestamp() < end and not world.is_gone:
        plan = world.operate()
        asked += any(isinstance(action, SaveRequest) for action in plan.actions)
        pause = plan.requeue_after_seconds
        world.pass_time(60 if pause is None else min(pause, 60))
    return asked


def a_killed_head(level: str, stop: str) -> World:
    """Return a session that stops just after the container of its head was killed."""
    head = {"image": "worker:1", "durability": {"level": level}}
    world = World(a_base_model(head=head))
    world.happen("it settles", "containers restart", stop)
    return world


def is_kept(world: World) -> bool:
    """Return whether the session's RayCluster exists and is not being deleted."""
    cluster = world.children.get(RAY_CLUSTER)
    return cluster is not None and "deletionTimestamp" not in cluster["metadata"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("head", ["the store is away", "the head stops responding"])
def test_a_suspension_keeps_the_pods_until_the_head_has_saved(stop: str, head: str) -> None:
    world = a_world("workers", "it settles", head, stop)

    operate_for(world, 900)
    kept = is_kept(world)
    world.happen("the store is back", "the head responds again", "it settles")

    assert kept
    assert world.status.saved_incarnation is not None
    assert world.status.restarts == 0


@pytest.mark.parametrize("stop", ["its owner suspends it", "a node is cordoned", "it is deleted"])
def test_a_head_that_loads_after_it_was_killed_is_waited_for_if_its_disk_may_have_runs(
    stop: str,
) -> None:
    world = a_killed_head("local", stop)

    operate_for(world, 20)
    kept = is_kept(world) and not world.is_gone
    world.happen("a pod advances")
    operate_for(world, 20)

    assert kept
    assert world.known.answers.completed_saves, "the head was not asked once it had loaded"


def test_a_head_that_loads_and_keeps_no_journals_is_not_waited_for() -> None:
    world = a_killed_head("none", "its owner suspends it")

    operate_for(world, 20)

    assert not is_kept(world)


def test_a_head_that_never_loads_again_is_waited_for_until_the_start_deadline() -> None:
    world = a_killed_head("local", "its owner suspends it")

    operate_for(world, 3500)
    kept = is_kept(world)
    operate_for(world, 200)

    assert kept
    assert not is_kept(world)


def test_a_head_in_a_new_pod_that_loads_is_not_waited_for() -> None:
    world = a_killed_head("local", "the head is lost")
    world.happen("a pod advances", "KubeRay works", "a pod advances", "its owner suspends it")

    operate_for(world, 20)

    assert not is_kept(world)


@pytest.mark.parametrize("stop", STOPS)
def test_a_session_that_can_not_be_saved_is_stalled_with_the_words_of_the_store(stop: str) -> None:
    world = a_world("workers", "it settles", "the store is away", stop)

    operate_for(world, 60)

    stalled = find(world.status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", Reason.SAVE_FAILED)
    assert STORE_ERROR in stalled.message
    assert "the pods are kept and" in stalled.message
    assert world.status.phase == "Suspending"


def test_a_save_that_succeeds_in_the_end_ends_the_stall() -> None:
    world = a_world("workers", "it settles", "the store is away", "its owner suspends it")
    operate_for(world, 300)

    world.happen("the store is back")
    operate_for(world, 60)

    assert not is_kept(world)
    assert not is_true(world.status, ConditionType.STALLED)


def test_a_failing_save_is_repeated_with_growing_pauses() -> None:
    world = a_world("workers", "it settles", "the store is away", "its owner suspends it")

    assert operate_for(world, 80) == 5
    assert operate_for(world, 600) == 10


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        ("it is deleted", SETTINGS.last_checkpoint_seconds),
        ("a day passes", SETTINGS.stop_seconds_of(None)),
    ],
)
def test_a_session_that_ends_waits_for_the_store_for_a_limited_time(
    event: str, seconds: int
) -> None:
    world = a_world("short life", "it settles", "the store is away", event)

    asked = operate_for(world, seconds - 2)
    kept = is_kept(world) and not world.is_gone
    operate_for(world, 10)

    assert asked > 2
    assert kept
    assert world.is_gone or not is_kept(world)


@pytest.mark.parametrize("event", ["it is deleted", "a day passes"])
def test_a_session_that_ends_waits_as_long_as_its_base_model_says(event: str) -> None:
    head = {"image": "worker:1", "suspendSeconds": 1080}
    world = World(a_base_model(head=head, sessions={"maxLifetimeSeconds": 7200}))
    world.happen("it settles", "the store is away", event)

    operate_for(world, 1000)
    kept = is_kept(world) and not world.is_gone
    operate_for(world, 120)

    assert kept
    assert world.is_gone or not is_kept(world)


def test_a_session_whose_lifetime_ends_while_it_can_not_be_saved_gets_the_full_time_again() -> None:
    world = a_world("short life", "it settles", "the store is away", "its owner suspends it")
    operate_for(world, 900)
    world.pass_time(2 * HOUR - (world.known.now - world.known.session.created).total_seconds())

    operate_for(world, SETTINGS.stop_seconds_of(None) - 2)
    kept = is_kept(world)
    operate_for(world, 10)

    assert kept
    assert not is_kept(world)


def test_a_deleted_session_says_why_its_last_checkpoint_is_missing() -> None:
    world = a_world("workers", "it settles", "the store is away", "it is deleted")

    operate_for(world, 10)

    assert STORE_ERROR in (world.status.message or "")


@pytest.mark.parametrize(
    ("role", "stop"),
    [
        ("Trainer", "its owner suspends it"),
        ("Trainer", "half an hour passes"),
        ("Sampler", "it is deleted"),
        ("Pool", "a node is cordoned"),
        ("Pool", "it is deleted"),
        ("Spare", "it is deleted"),
    ],
)
@pytest.mark.parametrize("lost", ["the Service is deleted", "the Secret is deleted"])
def test_what_a_save_request_needs_is_created_again_while_a_session_stops(
    lost: str, role: str, stop: str
) -> None:
    world = a_world("workers", "it settles")
    world.change(spec=world.known.session.spec.model_copy(update={"role": role}))
    world.happen("the operator reconciles", stop, lost)

    operate_for(world, 40)

    assert world.known.answers.completed_saves, world.known.answers.failed_saves
    assert world.is_gone or not is_kept(world)


@pytest.mark.parametrize("stop", ["its owner suspends it", "it is deleted"])
def test_all_that_pods_need_is_kept_while_a_save_takes_long(stop: str) -> None:
    world = a_world("workers", "it settles", "the head stops responding", stop)
    operate_for(world, 2)
    kept = set(world.children)
    for kind in ("Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"):
        world.lose_child(kind)

    operate_for(world, 2)

    assert set(world.children) == kept
    assert world.observe().children.has_secret


def test_a_session_whose_pods_end_gets_nothing_back_that_is_deleted() -> None:
    world = a_world("workers", "it settles", "its owner suspends it")
    operate_for(world, 10)
    assert not is_kept(world)
    world.happen("the Service is deleted", "the operator reconciles")

    assert HEAD_SERVICE not in world.children


def test_a_lost_head_ends_the_wait() -> None:
    world = a_world("workers", "it settles", "the store is away", "its owner suspends it")
    operate_for(world, 60)

    world.happen("the head is lost", "a pod advances", "the operator reconciles")

    assert not is_kept(world)
