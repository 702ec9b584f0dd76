"""A session whose head exits again and again releases its pods until it is retried."""

import pytest

from tinkercloud_crds.conditions import ConditionType, find
from tinkercloud_testing.resources.session_world import RAY_CLUSTER, World
from tinkercloud_testing.resources.sessions import a_base_model

LIMIT = 10


def ready_reason(world: World) -> str:
    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    return ready.reason


def running(**sessions: object) -> World:
    """Return a session that is ready and in use."""
    world = World(a_base_model(sessions=sessions) if sessions else a_base_model())
    world.settle()
    return world


def restart(world: World, times: int, *, pause: float = 0) -> None:
    """Let the head exit and come back, while a client uses it."""
    for _ in range(times):
        world.happen("containers restart", "a client sends a request", "it settles")
        world.pass_time(pause)


def test_a_head_that_exits_too_often_releases_its_pods_and_says_why() -> None:
    world = running()

    restart(world, LIMIT - 1)
    before = (world.status.phase, len(world.status.recent_restarts))
    restart(world, 1)

    assert before == ("Ready", LIMIT - 1)
    assert (world.status.phase, ready_reason(world)) == ("Failed", "RestartLimit")
    assert RAY_CLUSTER not in world.children
    assert world.status.gpus == 0
    assert "the head exited 10 times since" in (world.status.message or "")
    stalled = find(world.status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert stalled.status == "True"


def test_it_stays_so_whatever_its_clients_do_and_however_long() -> None:
    world = running()
    restart(world, LIMIT)

    for _ in range(30):
        world.pass_time(7200)
        world.happen("a client sends a request", "it settles")

    assert ready_reason(world) == "RestartLimit"
    assert RAY_CLUSTER not in world.children


def test_exits_that_lie_apart_do_not_count_together() -> None:
    world = running(restart_window_seconds=600)

    restart(world, 5 * LIMIT, pause=100)

    assert world.status.phase == "Ready"
    assert world.status.restarts == 5 * LIMIT


def test_the_base_model_sets_the_limit() -> None:
    world = running(max_restarts=2)

    restart(world, 2)

    assert ready_reason(world) == "RestartLimit"


@pytest.mark.parametrize(
    "events",
    [["its owner retries it"], ["its owner suspends it", "it settles", "its owner resumes it"]],
)
def test_a_retried_session_runs_again_and_counts_from_zero(events: list[str]) -> None:
    world = running()
    restart(world, LIMIT)
    world.pass_time(7200)

    world.happen(*events, "it settles")
    retried = (world.status.phase, world.status.failing, world.status.recent_restarts)
    restart(world, LIMIT - 1)
    still = world.status.phase
    restart(world, 1)

    assert retried == ("Ready", None, [])
    assert still == "Ready"
    assert ready_reason(world) == "RestartLimit"


def test_a_session_whose_pods_could_not_start_is_retried_in_the_same_way() -> None:
    world = running()
    world.happen("containers restart", "images are missing")
    for _ in range(14):
        world.pass_time(300)
        world.happen("a client sends a request", "the operator reconciles")
    world.happen("it settles")
    failed = ready_reason(world)

    world.happen("its owner retries it", "it settles")

    assert failed == "StartFailed"
    assert world.status.phase == "Ready"


def test_an_earlier_retry_does_not_excuse_later_failures() -> None:
    world = running()
    world.happen("its owner retries it")

    restart(world, LIMIT)

    assert ready_reason(world) == "RestartLimit"
