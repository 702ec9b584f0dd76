"""The operator killed at each of its writes: the next one continues where it stopped.

A session goes through a step of its lifecycle, its operator is killed at the n-th write, another
is started, and the result must be the same as without the crash. This is repeated for every n until
a step makes fewer writes than that. Their number depends on the timing of pods, so it is not
assumed. Several namespaces run this concurrently, each with its own operator.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import install_definitions
from tinkercloud_testing.cluster.controllers.training_sessions import Sessions, a_base_model
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.faulty_api import Trap
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.worlds import World, a_world
from tinkercloud_testing.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

MOMENTS = (
    ("asked", "answered") if os.environ.get("TINKERCLOUD_TEST_FAULTS") == "full" else ("answered",)
)
"""When the operator is killed: just before or just after a write reaches the API server. Killing it
before a write leaves the cluster in the same state as after the previous write."""
WORLDS = 6
IDLE_SESSIONS = 2
"""Sessions created in advance for each world and idle action; tests wait if they need more."""
IDLE_SECONDS = 60
"""The minimum idle timeout of a session."""
ENDLESS_SECONDS = 300
"""An upper limit for every wait, on a busy machine too."""
RUNNING_CHILDREN = 12
"""RayCluster, head, two trainers, sampler; Services of the head and of the engine, Secret and its
marker, ConfigMap, NetworkPolicy, budget."""
POOL_MODEL = "Qwen/Qwen3-4B"
SUSPENDED_CHILDREN = 2
"""Secret and its marker."""


@dataclass(frozen=True)
class Worlds:
    """Namespaces with one thread each: programs end with the thread that started them."""

    worlds: list[World]
    threads: ThreadPoolExecutor


@pytest.fixture(scope="module")
def worlds(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path
) -> Iterator[Worlds]:
    install_definitions(cluster)
    kwok.add("crashes-0", gpus=400)
    with ThreadPoolExecutor(WORLDS) as threads, ExitStack() as stack:
        contexts = [a_world(cluster, cluster_folder, "crashes") for _ in range(WORLDS)]
        made = list(threads.map(stack.enter_context, contexts))
        # They reach the idle timeout while other tests run.
        list(threads.map(make_idle_sessions, made))
        yield Worlds(made, threads)
        for world in made:
            world.operator.program.start()
            where = ("-n", world.sessions.namespace)
            cluster.kubectl("delete", "tsess", "--all", *where, "--wait=false")


def make_idle_sessions(world: World) -> None:
    world.operator.program.start()
    kinds = product(("Suspend", "Delete"), MOMENTS, range(IDLE_SESSIONS))
    names = [make_idle(world.sessions, kind[0], idle_session(*kind)) for kind in kinds]
    for name in names:
        wait_for(world.sessions, name, "condition=Ready")


def make_idle(sessions: Sessions, action: str, name: str, **spec: object) -> str:
    """Apply a session to be culled; only a session with a client is ever deleted."""
    client = {"modelId": f"{name}:train:0"} if action == "Delete" else {}
    return sessions.make(name, **client, **spec)


def idle_session(action: str, moment: str, number: int) -> str:
    """Return the name of a session to be culled."""
    return f"idle-{action.lower()}-{moment}-{number}"


@dataclass(frozen=True)
class Step:
    """One step in the lifecycle of a session."""

    begin: Callable[[Sessions, str], object]
    goal: str
    """The condition for `kubectl wait`."""
    children: int
    """The number of objects with the label of the session after the step."""


def suspended(*, is_asked: bool) -> Callable[[Sessions, str], object]:
    """Return a function that suspends or resumes a session as its owner."""
    return lambda sessions, name: sessions.make(name, suspend=is_asked)


def idle(action: str) -> Callable[[Sessions, str], object]:
    """Return a function that makes a session idle after a minute without use."""
    policy = {"timeoutSeconds": IDLE_SECONDS, "action": action}
    return lambda sessions, name: make_idle(sessions, action, name, idle=policy)


def share(sessions: Sessions, name: str) -> None:
    """Create a run that has no pods of its own."""
    sessions.make(name, baseModel=POOL_MODEL, sharing="Shared", modelId=f"{name}:train:0")


CREATE = Step(Sessions.make, "condition=Ready", RUNNING_CHILDREN)
SUSPEND = Step(suspended(is_asked=True), "condition=Suspended", SUSPENDED_CHILDREN)
RESUME = Step(suspended(is_asked=False), "condition=Ready", RUNNING_CHILDREN)
DELETE = Step(Sessions.delete, "delete", 0)
CULL_TO_SUSPEND = Step(idle("Suspend"), "condition=Suspended", SUSPENDED_CHILDREN)
SHARE = Step(share, "condition=Ready", 0)
DRAIN = Step(Sessions.drain, "delete", 0)
CULL_TO_DELETE = Step(idle("Delete"), "delete", 0)


@dataclass(frozen=True)
class Crash:
    """When an operator is killed."""

    write: int
    moment: str


def is_killed(world: World, name: str, step: Step, crash: Crash) -> bool:
    """Run a step, kill the operator at a write, start the next one and check the result.

    Returns:
        Whether the step made that many writes, so that the operator was killed.
    """
    first = len(world.api.writes)
    trap = Trap(crash.write, crash.moment, world.operator.program.kill)
    world.api.trap = trap
    with ThreadPoolExecutor(1) as waiting:
        step.begin(world.sessions, name)
        reached = waiting.submit(wait_for, world.sessions, name, step.goal)
        wait_until(lambda: is_over(world, trap, reached), step.goal, ENDLESS_SECONDS)
        was_killed = trap.disarm()
        world.operator.program.start()
        reached.result()

    left = f"{step.children} children of {name}"
    wait_until(lambda: len(world.sessions.children(name)) == step.children, left, ENDLESS_SECONDS)
    made = Counter(write.path for write in world.api.writes[first:] if write.status == 201)
    assert set(made.values()) <= {1}, f"created twice: {made}"
    return was_killed


def wait_for(sessions: Sessions, name: str, goal: str) -> None:
    what = f"trainingsession/{name}"
    sessions.cluster.wait_for(what, goal, sessions.namespace, ENDLESS_SECONDS)


def is_over(world: World, trap: Trap, reached: Future[None]) -> bool:
    """Whether an operator was killed, or reached the goal and completed its last write."""
    return trap.has_sprung or (reached.done() and world.api.writes_under_way == 0)


def crashes(worlds: Worlds, moment: str, life: Callable[[World, Crash], bool]) -> int:
    """Go through lives whose operators are killed at the first write, at the second, and so on.

    Args:
        worlds: where; each takes the next number when it is done with one.
        moment: of the crashes.
        life: goes through one life; returns whether it took so many writes.

    Returns:
        the largest number of a write that there was.
    """
    numbers = count(1)

    def live(world: World) -> int:
        world.operator.program.start()
        most = 0
        while life(world, Crash(number := next(numbers), moment)):
            most = number
        return most

    return max(worlds.threads.map(live, worlds.worlds))


@pytest.mark.parametrize("moment", MOMENTS)
def test_creation_and_deletion_complete_if_the_operator_is_killed_at_any_write(
    worlds: Worlds, moment: str
) -> None:
    def life(world: World, crash: Crash) -> bool:
        name = f"made-{crash.write}"
        killed = [is_killed(world, name, step, crash) for step in (CREATE, DELETE)]
        return any(killed)

    most = crashes(worlds, moment, life)

    sys.stdout.write(f"create, delete: killed at each of up to {most} writes\n")
    assert most > 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_suspension_and_resumption_complete_if_the_operator_is_killed_at_any_write(
    worlds: Worlds, moment: str
) -> None:
    def life(world: World, crash: Crash) -> bool:
        world.sessions.make("slept")
        wait_for(world.sessions, "slept", "condition=Ready")
        killed = [is_killed(world, "slept", step, crash) for step in (SUSPEND, RESUME)]
        return any(killed)

    most = crashes(worlds, moment, life)

    sys.stdout.write(f"suspend, resume: killed at each of up to {most} writes\n")
    assert most > 2


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("action", ["Suspend", "Delete"])
def test_culling_completes_if_the_operator_is_killed_at_any_write(
    worlds: Worlds, action: str, moment: str
) -> None:
    step = {"Suspend": CULL_TO_SUSPEND, "Delete": CULL_TO_DELETE}[action]
    culled: Counter[str] = Counter()

    def life(world: World, crash: Crash) -> bool:
        name = idle_session(action, moment, culled[world.sessions.namespace])
        culled[world.sessions.namespace] += 1
        make_idle(world.sessions, action, name)
        wait_for(world.sessions, name, "condition=Ready")
        return is_killed(world, name, step, crash)

    most = crashes(worlds, moment, life)

    sys.stdout.write(f"idle, to {action}: killed at each of up to {most} writes\n")
    assert most > 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_pool_has_one_cluster_for_a_run_if_the_operator_is_killed_at_any_write(
    worlds: Worlds, moment: str
) -> None:
    offer_a_pool(worlds)

    def life(world: World, crash: Crash) -> bool:
        name = f"shared-{crash.write}"
        is_killed_early = is_killed(world, name, SHARE, crash)
        assert len(pool_clusters(world)) == 1
        is_killed_late = is_killed(world, name, DELETE, crash)
        wait_until(lambda: not pool_clusters(world), "no cluster left", ENDLESS_SECONDS)
        return is_killed_early or is_killed_late

    most = crashes(worlds, moment, life)

    sys.stdout.write(f"pool: killed at each of up to {most} writes\n")
    assert most > 4


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_run_of_a_drained_cluster_is_moved_if_the_operator_is_killed_at_any_write(
    worlds: Worlds, moment: str
) -> None:
    offer_a_pool(worlds)

    def life(world: World, crash: Crash) -> bool:
        world.operator.program.start()
        name = f"moved-{crash.write}"
        share(world.sessions, name)
        wait_for(world.sessions, name, "condition=Ready")
        [drained] = pool_clusters(world)
        was_killed = is_killed(world, drained, DRAIN, crash)
        run = world.sessions.cluster.get("trainingsession", name, world.sessions.namespace)
        assert [run["spec"]["poolCluster"]] == pool_clusters(world)
        assert labels.MOVING_TO not in run["metadata"].get("annotations", {})
        wait_for(world.sessions, name, "condition=Ready")
        world.sessions.delete(name)
        wait_until(lambda: not pool_clusters(world), "no cluster left", ENDLESS_SECONDS)
        return was_killed

    most = crashes(worlds, moment, life)

    sys.stdout.write(f"move: killed at each of up to {most} writes\n")
    assert most > 4


def offer_a_pool(worlds: Worlds) -> None:
    """Let runs of a model share clusters, of which there are as few as possible."""
    sizes = {"minClusters": 0, "maxClusters": 2}
    pool = {**sizes, "scaleUpAfterSeconds": 0, "scaleDownAfterSeconds": 0}
    shared: dict[str, Any] = {"modelName": POOL_MODEL, "sharing": "Shared", "pool": pool}
    for world in worlds.worlds:
        namespace = world.sessions.namespace
        world.sessions.cluster.apply(a_base_model(namespace, "pool", **shared))


def pool_clusters(world: World) -> list[str]:
    sessions = world.sessions.cluster.objects("trainingsessions", world.sessions.namespace)
    return [each["metadata"]["name"] for each in sessions if each["spec"]["role"] == "Pool"]
