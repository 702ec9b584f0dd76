"""Pods that cannot start release their nodes after a while, and the status says why."""

import pytest

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.spec.observed import PodProblem
from tinkercloud_testing.resources.session_world import RAY_CLUSTER, World
from tinkercloud_testing.resources.sessions import a_base_model

HOUR = 3600


def reason(world: World) -> str:
    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    return ready.reason


def advance(world: World, times: int = 6) -> None:
    """Let every component work without fixing the problem."""
    for _ in range(times):
        world.kuberay()
        world.kubelet()
        if not world.is_gone:
            world.operate()


def scheduled(offer: str) -> World:
    """Return a session whose pods have been scheduled."""
    world = World(a_base_model(), is_declared=offer == "declared")
    for event in (
        "the operator reconciles",
        "KubeRay works",
        "a pod advances",
        "the operator reconciles",
    ):
        world.happen(event)
    world.use()
    return world


def use_for(world: World, seconds: int) -> None:
    """Let time pass while a client polls."""
    for _ in range(seconds // 300):
        world.pass_time(300)
        world.use()
        world.operate()


def test_an_image_that_can_not_be_pulled_releases_the_nodes_after_the_deadline() -> None:
    world = scheduled("for a client")
    world.happen("images are missing")
    use_for(world, HOUR - 300)
    before = (reason(world), world.status.phase, RAY_CLUSTER in world.children)

    use_for(world, 600)
    advance(world)

    assert before == ("ImagePullBackOff", "Failed", True)
    assert RAY_CLUSTER not in world.children
    assert (world.status.phase, reason(world)) == ("Failed", "StartFailed")
    assert "no such image" in (world.status.message or "")
    assert world.status.finished_time is not None
    assert world.status.gpus == 0


def test_the_reason_is_reported_until_the_ttl_passes() -> None:
    world = scheduled("for a client")
    world.happen("images are missing")
    use_for(world, HOUR + 300)
    advance(world)

    world.pass_time(3000)
    advance(world)
    kept = (reason(world), "no such image" in (world.status.message or ""))
    world.pass_time(HOUR)
    advance(world)

    assert kept == ("StartFailed", True)
    assert world.is_gone


def test_the_start_deadline_counts_from_the_first_crash() -> None:
    world = scheduled("for a client")
    crash = PodProblem(Reason.CRASH_LOOP, "container head: exit code 3")
    for _ in range(HOUR // 600 + 2):
        world.break_pods(crash)
        use_for(world, 300)
        world.break_pods(None)
        use_for(world, 300)
    advance(world)

    assert reason(world) == "StartFailed"
    assert "exit code 3" in (world.status.message or "")


def test_becoming_ready_resets_the_start_deadline() -> None:
    world = scheduled("for a client")
    world.happen("images are missing")
    use_for(world, HOUR - 600)

    world.happen("images are available", "it settles")

    assert world.status.phase == "Ready"
    assert world.status.failing is None


def test_waiting_for_nodes_does_not_count_towards_the_start_deadline() -> None:
    world = scheduled("for a client")
    world.break_pods(PodProblem(Reason.UNSCHEDULABLE, "0/3 nodes are available"))

    use_for(world, 5 * HOUR)

    assert reason(world) == "Unschedulable"
    assert world.status.failing is None


@pytest.mark.parametrize("offer", ["declared", "for a client"])
def test_a_resumable_session_is_kept_and_retried_after_suspend_and_resume(
    offer: str,
) -> None:
    world = scheduled(offer)
    world.settle()
    world.happen("containers restart", "images are missing")
    use_for(world, HOUR + 300)
    advance(world)
    failed = (world.status.phase, reason(world), world.status.finished_time)

    world.use()
    advance(world)
    still = reason(world)
    world.happen("its owner suspends it", "it settles", "its owner resumes it", "it settles")

    assert failed == ("Failed", "StartFailed", None)
    assert still == "StartFailed"
    assert world.status.phase == "Ready"


def test_a_declared_session_that_never_ran_is_kept_too() -> None:
    world = scheduled("declared")
    world.happen("images are missing")

    use_for(world, HOUR + 300)
    advance(world)
    world.happen(
        "images are available", "its owner suspends it", "it settles", "its owner resumes it"
    )
    world.settle()

    assert world.status.phase == "Ready"
