"""Short histories of one disturbance each, for every way in which a run can be served."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from tinkercloud_crds import labels
from tinkercloud_testing.resources.sessions import TRAINERS, a_base_model_manifest
from tinkercloud_testing.simulation.checks import violations
from tinkercloud_testing.simulation.clients import Client, Run
from tinkercloud_testing.simulation.cluster.api_server import Json
from tinkercloud_testing.simulation.cluster.heads import HeadSpeed
from tinkercloud_testing.simulation.histories import Outcome, run, settle_and_check
from tinkercloud_testing.simulation.virtual_time import VirtualLoop, until
from tinkercloud_testing.simulation.world import World

SHAPES: Mapping[str, Json] = {
    "a head alone": {},
    "ranks": {"trainer": TRAINERS},
    "a pool": {"sharing": "Shared", "pool": {"slotsPerCluster": 2, "maxClusters": 2}},
    "a spare": {"warmSpares": 1},
}
SLOW = HeadSpeed(load=10.0, save=100.0, step=0.5)
"""It saves well within its grace period of 155 seconds."""

Disturbance = Callable[[World, str], Awaitable[None]]
"""Gets the world, and the session whose pods serve the run."""


async def _delete_the_raycluster(world: World, serving: str) -> None:
    world.server.delete("RayCluster", serving)


async def _suspend_while_the_store_is_away(world: World, serving: str) -> None:
    """Suspend for longer than any grace period; the pods must be kept until the head can save.

    Meanwhile somebody deletes what the operator needs to ask the head.
    """
    world.store.is_away, world.store.away_until = True, float("inf")
    world.server.update("TrainingSession", serving, {"spec": {"suspend": True}})
    await asyncio.sleep(60.0)
    world.server.delete("Secret", f"{serving}-token")
    world.server.delete("Service", f"{serving}-head")
    await asyncio.sleep(840.0)
    world.end_outage()
    await asyncio.sleep(300.0)
    world.server.update("TrainingSession", serving, {"spec": {"suspend": False}})


async def _suspend_the_session_for_a_while(world: World, serving: str) -> None:
    """Suspend the session itself; a spare that serves it has to end, a cluster of a pool stays."""
    assert world.server.find("RayCluster", serving) is not None
    world.server.update("TrainingSession", "one", {"spec": {"suspend": True}})
    await asyncio.sleep(600.0)
    world.violations += violations(world)
    world.server.update("TrainingSession", "one", {"spec": {"suspend": False}})


async def _delete_the_secret(world: World, serving: str) -> None:
    world.server.delete("Secret", f"{serving}-token")


async def _start_more_runs_than_slots(world: World, serving: str) -> None:
    is_shared = serving.startswith("pool")
    for number in range(4):
        world.add_client(Run(f"more-{number}", "bob", "Sim/Model", is_shared=is_shared))


async def _lose_memory_for_a_second_run(world: World, serving: str) -> None:
    """Let the next heads hold one run, although two are placed on the cluster of a pool."""
    others = []
    if serving.startswith("pool"):
        others.append(world.add_client(Run("second", "ada", "Sim/Model", is_shared=True)))
    for client in others:
        await _train(world, client, 5)
    world.nodes.most_models = 1
    world.server.delete("RayCluster", serving)
    await asyncio.sleep(600.0)
    for client in others:
        await _train(world, client, client.steps + 7)


async def _drain_the_cluster(world: World, serving: str) -> None:
    """Ask for the sessions of a pool's cluster to be moved; other sessions ignore it."""
    drained = {"metadata": {"annotations": {labels.DRAIN: "true"}}}
    world.server.update("TrainingSession", serving, drained)
    await asyncio.sleep(300.0)


async def _kill_the_operator_while_the_head_saves(world: World, serving: str) -> None:
    world.server.update("TrainingSession", serving, {"spec": {"suspend": True}})
    await asyncio.sleep(30.0)
    await world.operator.kill()
    await asyncio.sleep(5.0)
    world.operator.start()
    await asyncio.sleep(300.0)
    world.server.update("TrainingSession", serving, {"spec": {"suspend": False}})


async def _drain_every_node(world: World, serving: str) -> None:
    assert world.server.find("RayCluster", serving) is not None
    for name in ("cpu", "gpu"):
        world.server.update("Node", name, {"spec": {"unschedulable": True}})
    await asyncio.sleep(300.0)
    for name in ("cpu", "gpu"):
        world.server.update("Node", name, {"spec": {"unschedulable": None}})


DISTURBANCES: Mapping[str, Disturbance] = {
    each.__name__.strip("_").replace("_", " "): each
    for each in (
        _delete_the_raycluster,
        _suspend_while_the_store_is_away,
        _suspend_the_session_for_a_while,
        _delete_the_secret,
        _start_more_runs_than_slots,
        _lose_memory_for_a_second_run,
        _drain_the_cluster,
        _kill_the_operator_while_the_head_saves,
        _drain_every_node,
    )
}


def run_script(disturbance: str, shape: str, *, knows_owners: bool) -> Outcome:
    """Train, disturb the session that serves the run, and train again; check everything.

    Args:
        disturbance: one of `DISTURBANCES`.
        shape: one of `SHAPES`.
        knows_owners: of `KubeRay`.
    """
    base_model = a_base_model_manifest("model", modelName="Sim/Model", **SHAPES[shape])

    async def script(world: World) -> None:
        world.server.create("BaseModel", base_model)
        world.nodes.add("gpu", 8)
        world.nodes.add("cpu", 0)
        if shape == "a spare":
            await until(lambda: any(it.is_ready for it in world.nodes.heads.values()), 120.0)
        client = world.add_client(Run("one", "ada", "Sim/Model", is_shared=shape == "a pool"))
        await _train(world, client, 23)
        if world.violations:
            return
        [serving] = [head for head in world.nodes.heads.values() if head.models]
        await DISTURBANCES[disturbance](world, serving.session)
        await _train(world, client, client.steps + 7)
        await settle_and_check(world)

    def world_of(loop: VirtualLoop) -> World:
        return World(loop, 1, knows_owners=knows_owners, speeds={"": SLOW})

    return run(1, script, world_of)


async def _train(world: World, client: Client, steps: int) -> None:
    if not await until(lambda: client.steps >= steps, 1800.0):
        world.violate(f"{client.run.name} does not get to step {steps}, but to {client.steps}")
