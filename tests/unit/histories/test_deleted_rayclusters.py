"""A RayCluster that somebody else deletes: its head saves first, then another one starts."""

import pytest

from tinkercloud_testing.sessions import TRAINERS, a_base_model_manifest
from tinkercloud_testing.simulation.clients import Run
from tinkercloud_testing.simulation.heads import HeadSpeed
from tinkercloud_testing.simulation.histories import Outcome, run, settle_and_check
from tinkercloud_testing.simulation.virtual_time import VirtualLoop, until
from tinkercloud_testing.simulation.world import World

SHAPES = {
    "a head alone": {},
    "ranks": {"trainer": TRAINERS},
    "a pool": {"sharing": "Shared", "pool": {"slotsPerCluster": 2}},
    "a spare": {"warmSpares": 1},
}
SLOW = HeadSpeed(load=10.0, save=100.0, step=0.5)
"""It saves well within its grace period of 155 seconds."""


def after_a_deletion(shape: str, *, knows_owners: bool) -> Outcome:
    """Delete the RayCluster that serves a run of some steps; return what this leads to."""
    base_model = a_base_model_manifest("model", modelName="Sim/Model", **SHAPES[shape])

    async def script(world: World) -> None:
        world.server.create("BaseModel", base_model)
        world.nodes.add("gpu", 8)
        world.nodes.add("cpu", 0)
        if shape == "a spare":
            await until(lambda: bool(world.nodes.heads), 120.0)
            await until(lambda: all(it.is_ready for it in world.nodes.heads.values()), 60.0)
        client = world.add_client(Run("one", "ada", "Sim/Model", is_shared=shape == "a pool"))
        assert await until(lambda: client.steps >= 23, 600.0)
        [serving] = [head for head in world.nodes.heads.values() if head.models]
        world.server.delete("RayCluster", serving.session)
        assert await until(lambda: client.steps >= 30, 900.0)
        await settle_and_check(world)

    def world_of(loop: VirtualLoop) -> World:
        return World(loop, 1, knows_owners=knows_owners, speeds={"": SLOW})

    return run(1, script, world_of)


@pytest.mark.parametrize("knows_owners", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_is_lost_while_the_old_head_takes_long_to_save(
    shape: str, knows_owners: bool
) -> None:
    outcome = after_a_deletion(shape, knows_owners=knows_owners)

    assert outcome.violations == [], outcome.report()
