"""The objects that the operator of a release leaves in a cluster: made by it, continued by tests.

`python -m tinkercloud_testing.storage.cluster_of_release FILE`, with `tests/support` in
`PYTHONPATH`, runs this tree's operator in a simulated cluster and writes the stored objects to
`FILE`. For the operator of another tree, run this file itself (`python -P`) with the tree's
`tests/support` and `*/src` in `PYTHONPATH`.
"""

import asyncio
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import yaml

from tinkercloud_testing.simulation.clients import Run
from tinkercloud_testing.simulation.histories import run
from tinkercloud_testing.simulation.virtual_time import VirtualLoop, until
from tinkercloud_testing.simulation.world import World

Json = dict[str, Any]

SEED = 1
_START_SECONDS = 1800.0
_QUIET_SECONDS = 400.0
_HEAD: Json = {"image": "worker:1", "suspendSeconds": 140, "durability": {"level": "local"}}
_RANKS: Json = {"backend": "megatron", "replicas": 2, "gpusPerReplica": 4}
_SHAPES: dict[str, Json] = {
    "alone": {},
    "ranks": {"trainer": _RANKS},
    "pool": {"sharing": "Shared", "pool": {"slotsPerCluster": 2, "maxClusters": 2}},
    "warm": {"warmSpares": 1},
    "engines": {
        "trainer": {**_RANKS, "replicas": 1},
        "sampler": {
            "backend": "sglang",
            "image": "sglang:1",
            "replicas": 2,
            "gpusPerReplica": 2,
            "colocated": True,
            "engines": {
                "adaptersClaimName": "adapters",
                "deviceClassName": "gpu.nvidia.com",
                "sharedMemory": "cpu",
            },
        },
    },
}
"""The fields of each BaseModel; the models are named like `Sim/Alone`. No later release has
`sharedMemory`."""
READY = ("alone-1", "ranks-1", "pool-1", "pool-2", "warm-1", "engines-1")
"""Sessions that are ready, of the BaseModel with the same beginning."""
SUSPENDED, WAITING = "ranks-2", "ranks-3"
"""Sessions that are suspended, and that wait for GPUs."""


def base_model(name: str) -> Json:
    """Return a BaseModel."""
    spec = {
        "modelName": f"Sim/{name.capitalize()}",
        "source": {"volume": {"claimName": "models", "path": name}},
        "maxContextLength": 4096,
        "head": _HEAD,
        "sessions": {"startDeadlineSeconds": 600},
        **_SHAPES[name],
    }
    return {"metadata": {"name": name}, "spec": spec}


async def _script(world: World) -> None:
    for name in _SHAPES:
        world.server.create("BaseModel", base_model(name))
    tenant = {"owners": ["ada"], "limits": {"sessions": 20}}
    world.server.create("Tenant", {"metadata": {"name": "lab"}, "spec": tenant})
    world.nodes.add("gpu", 8)
    world.nodes.add("cpu", 0)
    await _train(world, SUSPENDED)
    world.server.update("TrainingSession", SUSPENDED, {"spec": {"suspend": True}})
    assert await until(lambda: not world.pods(session=SUSPENDED), _START_SECONDS)
    for name in READY:
        await _train(world, name)
    _create(world, WAITING)
    world.clients_act.clear()
    await asyncio.sleep(_QUIET_SECONDS)
    await world.operator.kill()
    assert world.violations == [], world.violations


def _create(world: World, name: str) -> Any:
    model = name.partition("-")[0]
    asked = Run(name, "ada", f"Sim/{model.capitalize()}", is_shared=model == "pool")
    return world.add_client(asked)


async def _train(world: World, name: str) -> None:
    client = _create(world, name)
    assert await until(lambda: client.steps > 2, _START_SECONDS), (name, world.trace[-20:])


def make(file: Path) -> None:
    """Write the stored objects, and when they were stored, as compressed YAML."""
    worlds = []

    def world_of(loop: VirtualLoop) -> World:
        worlds.append(World(loop, SEED, knows_owners=True))
        return worlds[0]

    content: Json = {}

    async def script(world: World) -> None:
        await _script(world)
        server = world.server
        content["seconds"] = world.loop.time()
        content["version"] = server.version
        content["objects"] = {kind: [*items.values()] for kind, items in server.objects.items()}
        content["applied"] = [
            {"uid": uid, "part": part, "fields": fields}
            for (uid, part), fields in vars(server)["_applied"].items()
        ]

    run(SEED, script, world_of)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Without members of enumerations and shared parts.
    text = yaml.safe_dump(json.loads(json.dumps(content)))
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
