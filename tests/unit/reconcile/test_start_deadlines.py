"""Pods that can't run release their nodes after a while, and the session says why."""

import pytest

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.spec.snapshot import PodProblem
from tinkercloud_testing.session_world import RAY_CLUSTER, World
from tinkercloud_testing.sessions import a_base_model

HOUR = 3600


def reason(world: World) -> str:
    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    return ready.reason


def look(world: World, times: int = 6) -> None:
    """Let everybody work without ending the trouble."""
    for _ in range(times):
        world.kuberay()
        world.kubelet()
        if not world.is_gone:
            world.operate()


def begun(offer: str) -> World:
    """Return a session whose pods have been scheduled."""
    world = World(a_base_model(), is_declared=offer == "declared")
    for event in ("the operator looks", "KubeRay works", "a pod gets on", "the operator looks"):
        world.happen(event)
    world.use()
    return world


def use_for(world: World, seconds: int) -> None:
    """Let time pass in which a client asks for it."""
    for _ in range(seconds // 300):
        world.pass_time(300)
        world.use()
        world.operate()


def test_an_image_that_can_not_be_pulled_releases_the_nodes_after_the_deadline() -> None:
    world = begun("for a client")
    world.happen("images vanish")
    use_for(world, HOUR - 300)
    before = (reason(world), world.status.phase, RAY_CLUSTER in world.children)

    use_for(world, 600)
    look(world)

    assert before == ("ImagePullBackOff", "Failed", True)
    assert RAY_CLUSTER not in world.children
    assert (world.status.phase, reason(world)) == ("Failed", "StartFailed")
    assert "no such image" in (world.status.message or "")
    assert world.status.finished_time is not None
    assert world.status.gpus == 0


def test_it_says_so_until_its_time_to_live_is_over() -> None:
    world = begun("for a client")
    world.happen("images vanish")
    use_for(world, HOUR + 300)
    look(world)

    world.pass_time(3000)
    look(world)
    kept = (reason(world), "no such image" in (world.status.message or ""))
    world.pass_time(HOUR)
    look(world)

    assert kept == ("StartFailed", True)
    assert world.is_gone


def test_a_container_that_seems_well_between_crashes_counts_from_its_first() -> None:
    world = begun("for a client")
    crash = PodProblem(Reason.CRASH_LOOP, "container head: exit code 3")
    for _ in range(HOUR // 600 + 2):
        world.break_pods(crash)
        use_for(world, 300)
        world.break_pods(None)
        use_for(world, 300)
    look(world)

    assert reason(world) == "StartFailed"
    assert "exit code 3" in (world.status.message or "")


def test_a_session_that_becomes_ready_has_all_of_its_time_again() -> None:
    world = begun("for a client")
    world.happen("images vanish")
    use_for(world, HOUR - 600)

    world.happen("images are back", "it settles")

    assert world.status.phase == "Ready"
    assert world.status.failing is None


def test_waiting_for_nodes_does_not_count() -> None:
    world = begun("for a client")
    world.break_pods(PodProblem(Reason.UNSCHEDULABLE, "0/3 nodes are available"))

    use_for(world, 5 * HOUR)

    assert reason(world) == "Unschedulable"
    assert world.status.failing is None


@pytest.mark.parametrize("offer", ["declared", "for a client"])
def test_what_can_be_resumed_is_kept_and_tried_again_when_it_is_suspended_and_resumed(
    offer: str,
) -> None:
    world = begun(offer)
    world.settle()
    world.happen("containers restart", "images vanish")
    use_for(world, HOUR + 300)
    look(world)
    failed = (world.status.phase, reason(world), world.status.finished_time)

    world.use()
    look(world)
    still = reason(world)
    world.happen("its owner suspends it", "it settles", "its owner resumes it", "it settles")

    assert failed == ("Failed", "StartFailed", None)
    assert still == "StartFailed"
    assert world.status.phase == "Ready"


def test_a_declared_session_that_never_ran_is_kept_too() -> None:
    world = begun("declared")
    world.happen("images vanish")

    use_for(world, HOUR + 300)
    look(world)
    world.happen("images are back", "its owner suspends it", "it settles", "its owner resumes it")
    world.settle()

    assert world.status.phase == "Ready"
