"""Histories: sequences of events that follow from a seed, and what they lead to.

`python -m tinkercloud_testing.simulation.histories --seed 0 --count 1000` runs many of them, and
prints the events and the trace of each that fails. `make histories` does that.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import structlog

from tinkercloud_testing.resources.sessions import TRAINERS, a_base_model_manifest
from tinkercloud_testing.simulation.checks import leftovers, violations
from tinkercloud_testing.simulation.cluster.api_server import Json
from tinkercloud_testing.simulation.events import EVENTS, STARTS
from tinkercloud_testing.simulation.virtual_time import VirtualLoop, operator_time, run_virtually
from tinkercloud_testing.simulation.world import World

_PAUSES = (0.05, 0.5, 2.0, 5.0, 15.0, 40.0, 90.0)
"""Seconds between two events."""


@dataclass
class Outcome:
    """What a history has led to."""

    seed: int
    events: Sequence[str]
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    steps: int = 0
    """Steps of clients that were acknowledged."""
    writes: int = 0
    """Writes of the operator."""
    excused: list[str] = field(default_factory=list)
    """Losses of what nothing survives."""

    def report(self) -> str:
        """Return the seed, the violations, the events and the trace."""
        found = "\n  ".join(self.violations)
        happened = "\n  ".join(self.events)
        trace = "\n".join(self.trace)
        return (
            f"history {self.seed} violates:\n  {found}\nits events:\n  {happened}\n"
            f"its trace:\n{trace}"
        )


def base_models(rng: Random) -> list[Json]:
    """Return the BaseModels of a history."""
    durability = {"level": rng.choice(["local", "local", "local", "remote", "none"])}
    sessions: Json = {"startDeadlineSeconds": 600}
    if rng.random() < 0.4:
        sessions["idle"] = {"timeoutSeconds": rng.choice([300, 900])}
    head = {"image": "worker:1", "suspendSeconds": 140, "durability": durability}
    common: Json = {"head": head, "sessions": sessions}
    ranks = TRAINERS | {"replicas": rng.choice([1, 2]), "gpusPerReplica": 4}
    pool: Json = {
        "minClusters": rng.choice([0, 1]),
        "maxClusters": rng.choice([1, 2, 3]),
        "slotsPerCluster": rng.choice([2, 3]),
        "scaleUpAfterSeconds": rng.choice([0, 30]),
        "scaleDownAfterSeconds": rng.choice([60, 600]),
    }
    shared: Json = {"sharing": "Shared", "pool": pool, "trainer": TRAINERS | {"replicas": 1}}
    limits: Json = {"limits": {"maxSessionsPerOwner": 3}} if rng.random() < 0.3 else {}
    return [
        a_base_model_manifest("alone", modelName="Sim/Alone", **common, **limits),
        a_base_model_manifest("ranks", modelName="Sim/Ranks", trainer=ranks, **common),
        a_base_model_manifest("pool", modelName="Sim/Pool", **common, **shared),
        a_base_model_manifest("warm", modelName="Sim/Warm", warmSpares=1, **common),
    ]


def events_of(seed: int, number: int, without: Sequence[str] = ()) -> list[str]:
    """Return the names of a history's events."""
    rng = Random(seed)
    known = [event for event in EVENTS.values() if event.name not in without]
    weights = [event.weight for event in known]
    # Without sessions most events have no effect.
    first = rng.sample([event.name for event in known if event.name in STARTS], k=2)
    chosen = (event.name for event in rng.choices(known, weights, k=number - 3))
    return [*first, "some time passes", *chosen]


Script = Callable[[World], Awaitable[None]]


def run(seed: int, script: Script, world_of: Callable[[VirtualLoop], World]) -> Outcome:
    """Run a script in a new world.

    Args:
        seed: of the operator's random numbers.
        script: what happens.
        world_of: makes the world.
    """
    outcome = Outcome(seed, ())
    loop = VirtualLoop()
    world = world_of(loop)

    async def main() -> None:
        try:
            world.start()
            await script(world)
        finally:
            outcome.violations, outcome.trace = world.violations, world.trace
            outcome.steps = sum(client.steps for client in world.clients)
            outcome.writes = len(world.network.writes)
            outcome.excused = [each for client in world.clients for each in client.excused]

    with operator_time(loop, world.clock, seed):
        run_virtually(loop, main())
    return outcome


def run_history(seed: int, number: int, without: Sequence[str] = ()) -> Outcome:
    """Run a history of so many events, and check everything after it has settled."""
    events = events_of(seed, number, without)
    rng = Random(-seed - 1)

    async def script(world: World) -> None:
        for manifest in base_models(rng):
            world.server.create("BaseModel", manifest)
        for name, gpus in (("gpu-1", 8), ("gpu-2", 8), ("gpu-3", 8), ("cpu-1", 0), ("cpu-2", 0)):
            world.nodes.add(name, gpus)
        for name in events:
            world.note(f"EVENT {name}")
            EVENTS[name].happen(world)
            pause = world.random.choice(_PAUSES) + world.wait_longer
            world.wait_longer = 0.0
            await asyncio.sleep(pause)
        await settle_and_check(world)

    def world_of(loop: VirtualLoop) -> World:
        world = World(loop, seed, knows_owners=rng.random() < 0.5)
        world.nodes.most_models = rng.choice([2, 8])
        return world

    outcome = run(seed, script, world_of)
    outcome.events = events
    return outcome


async def settle_and_check(world: World) -> None:
    """Check a world at rest, after its clients have trained again, and after its end."""
    await world.settle()
    world.violations += violations(world)
    await world.use()
    await world.settle()
    world.violations += violations(world)
    await world.tear_down()
    world.violations += leftovers(world)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let the operator log nothing during a block."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def main() -> None:
    """Run histories, and exit with 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--count", type=int, default=100, help="number of histories")
    parser.add_argument("--events", type=int, default=30, help="number of events of each")
    parser.add_argument("--without", action="append", default=[], help="a kind of event to omit")
    parser.add_argument("--trace", action="store_true", help="print the trace of each that fails")
    chosen = parser.parse_args()
    with silence():
        failed = _run_many(chosen)
    sys.exit(failed)


def _run_many(chosen: argparse.Namespace) -> bool:
    """Run histories and print those that fail; return whether one does."""
    counts: Counter[str] = Counter()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        outcome = run_history(seed, chosen.events, chosen.without)
        counts.update(
            histories=1,
            failed=bool(outcome.violations),
            steps=outcome.steps,
            writes=outcome.writes,
            excused=len(outcome.excused),
        )
        if counts["histories"] % 25 == 0:
            sys.stderr.write(f"{counts['histories']} histories, {counts['failed']} failed\n")
        if outcome.violations:
            outcome.trace = outcome.trace if chosen.trace else ["(with --trace)"]
            sys.stdout.write(outcome.report() + "\n")
            sys.stdout.flush()
    sys.stdout.write(" ".join(f"{name} {n}" for name, n in counts.items()) + "\n")
    return bool(counts["failed"])


if __name__ == "__main__":
    main()
