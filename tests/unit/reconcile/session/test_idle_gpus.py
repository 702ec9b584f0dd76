"""From when the GPUs of a session, a pool's cluster or a warm spare count as idle."""

from datetime import datetime, timedelta

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_testing.resources.session_world import SETTINGS, World, a_world
from tinkercloud_testing.resources.sessions import TRAINERS, a_base_model, a_session

FIVE_MINUTES = timedelta(minutes=5)


def idle_since(world: World) -> str | None:
    """Return what the operator says once it has done all that it has to do now."""
    world.settle()
    return world.status.idle_since


def ready_at(world: World) -> datetime:
    world.settle()
    return max(
        datetime.fromisoformat(each.last_transition_time) for each in world.status.conditions
    )


@pytest.mark.parametrize(
    "spec",
    [
        a_session(),
        a_session(role="Sampler", lora=None),
        a_session(role="Pool", owner=labels.POOL_OWNER, lora=None),
        a_session(role="Spare", owner=labels.POOL_OWNER, lora=None),
    ],
    ids=lambda spec: spec.role,
)
def test_gpus_are_idle_from_five_minutes_after_the_last_use_until_the_next(
    spec: TrainingSessionSpec,
) -> None:
    world = World(a_base_model(trainer=TRAINERS))
    world.change(spec=spec)
    started = ready_at(world)
    world.change(now=started + timedelta(minutes=3))
    world.use()
    idle_at = world.known.now + FIVE_MINUTES

    world.settle()
    wakes = reconcile(world.observe(), SETTINGS).requeue_after_seconds
    world.change(now=idle_at - timedelta(seconds=1))
    before = idle_since(world)
    world.change(now=idle_at)
    at_once = idle_since(world)
    world.pass_time(600)
    later = idle_since(world)
    world.use()

    assert wakes == 300
    assert before is None
    assert at_once == later == timestamp(idle_at)
    assert idle_since(world) is None


def test_gpus_of_a_spare_are_idle_five_minutes_after_it_is_ready() -> None:
    world = World(a_base_model(trainer=TRAINERS))
    world.change(spec=a_session(role="Spare", owner=labels.POOL_OWNER, lora=None))
    idle_at = ready_at(world) + FIVE_MINUTES

    world.pass_time(3600)

    assert idle_since(world) == timestamp(idle_at)


def test_a_running_program_uses_the_gpus_of_its_session() -> None:
    world = a_world("program", "it settles")
    world.pass_time(3600)
    while_running = idle_since(world)
    world.happen("the program succeeds", "it settles")
    ended = world.known.now

    world.pass_time(600)

    assert while_running is None
    since = idle_since(world)
    assert since is not None
    assert datetime.fromisoformat(since) - FIVE_MINUTES <= ended


@pytest.mark.parametrize("event", ["its owner suspends it", "it is deleted"])
def test_a_session_that_ends_has_no_idle_gpus(event: str) -> None:
    world = a_world("workers", "it settles")
    world.pass_time(600)
    assert idle_since(world) is not None

    world.happen(event, "the operator reconciles")

    assert world.status.idle_since is None
