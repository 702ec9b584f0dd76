"""Heads of an installation that are killed, with their disks or nodes: the SDK's loops continue.

`make test-cluster-kills` runs them, with 30 kills at seeded moments. CI does not: there,
`test_head_pod.py` loses a container, a pod and a node.
"""

import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import tinker

from tinkercloud_testing.clients.training_loops import Loop
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import (
    START_SECONDS,
    Installation,
    an_installation,
    make_volumes,
    values_of_one_node,
)
from tinkercloud_testing.cluster.installed_heads import InstalledHead
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.lost_nodes import PLACEMENT, FurtherNodes
from tinkercloud_testing.cluster.nodes.node import RealNode
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.small_models.models import save, tiny_llama

KILLS = int(os.environ.get("TINKERCLOUD_TEST_KILLS", "1"))
TURNS = 30
"""Turns of 10 steps each, with and without a journal."""
SEED = int(os.environ.get("TINKERCLOUD_TEST_SEED", "1"))
Kill = Callable[[InstalledHead], None]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 + 180 * KILLS)]


def a_model(name: str, head: Mapping[str, Any], **spec: Any) -> Mapping[str, Any]:
    return {
        "name": name,
        "spec": {
            "modelName": f"tiny/{name}",
            "source": {"volume": {"claimName": "models", "path": "tiny"}},
            "maxContextLength": 512,
            "head": {
                "image": "tinkercloud.test/worker:test",
                "resources": {"cpu": "250m", "memory": "3Gi"},
                **head,
            },
            "trainer": {"dtype": "float32"},
            **spec,
        },
    }


POOL = {"minClusters": 1, "maxClusters": 1, "slotsPerCluster": 8}
MODELS = (
    a_model("remote", {"durability": {"level": "remote"}, "placement": PLACEMENT}),
    a_model("default", {}),
    a_model("none", {"durability": {"level": "none"}}),
    a_model("shared", {}, sharing="Shared", pool=POOL),
)


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    kuberay: KubeRay,
    own_node: RealNode,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Install the service with one model for each test."""
    folder = tmp_path_factory.mktemp("durable")
    tiny = save(tiny_llama(), make_volumes(folder) / "tiny")
    for path in tiny.iterdir():
        path.chmod(0o644)
    own_node.load(*map(program_image, ("api-server", "operator", "worker")))
    with an_installation(cluster, folder, values_of_one_node(*MODELS)) as release:
        yield release


def a_run(installation: Installation, model: str) -> tinker.TrainingClient:
    client = installation.client()
    return client.create_lora_training_client(f"tiny/{model}", rank=4, seed=1).result()


def session_of(installation: Installation, **spec: str) -> str:
    """Return the name of the only session with these fields."""
    [name] = [
        session["metadata"]["name"]
        for session in installation.sessions()
        if spec.items() <= session["spec"].items()
    ]
    return str(name)


def lose_the_node_of(head: InstalledHead, nodes: FurtherNodes, notice: str) -> None:
    """Lose the node of a head; it is replaced by another node."""
    pod = head.pod
    assert pod is not None
    name = pod["spec"]["nodeName"]
    nodes.lose(name)
    if notice == "deleted":
        nodes.delete(name)
    else:
        nodes.report_out_of_service(name)
    nodes.add()


def some_kills(nodes: FurtherNodes) -> Sequence[tuple[str, Kill]]:
    """Return seeded kills, of which the first one is a lost node."""
    kinds: Mapping[str, Kill] = {
        "node out of service": lambda head: lose_the_node_of(head, nodes, "out of service"),
        "container": InstalledHead.kill_container,
        "pod": InstalledHead.delete_pod,
        "node deleted": lambda head: lose_the_node_of(head, nodes, "deleted"),
    }
    names = list(kinds)
    chosen = [*names, *random.Random(SEED).choices(names, k=KILLS)][:KILLS]
    return [(name, kinds[name]) for name in chosen]


def wait_for_step(number: int, loop: Loop, training: Future[None]) -> None:
    """Wait until a loop has made so many steps, or has failed."""
    wait_until(lambda: training.done() or len(loop.curve) >= number, "the loop", START_SECONDS)
    if training.done():
        training.result()


def disturb(
    head: InstalledHead, kills: Sequence[tuple[str, Kill]], loop: Loop, training: Future[None]
) -> None:
    """Kill the heads of a loop at seeded moments, each once it is ready.

    Most have continued the loop by then; some still repeat steps.
    """
    moments, steps = random.Random(SEED), 0
    for name, kill in kills:
        wait_for_step(steps + moments.choice([0, 1, 3, 10]), loop, training)
        generation = head.generation()
        time.sleep(moments.uniform(0.05, 1))
        began, steps = time.monotonic(), len(loop.curve)
        kill(head)
        head.wait_until_replaced(generation)
        seconds = time.monotonic() - began
        sys.stdout.write(f"{name}, after step {steps}: ready after {seconds:.1f} s\n")
        sys.stdout.flush()


def test_a_loop_is_the_same_to_the_bit_however_often_its_container_pod_or_node_is_lost(
    installation: Installation, further_nodes: FurtherNodes
) -> None:
    further_nodes.add()
    disturbed = Loop(a_run(installation, "remote"))
    session = session_of(installation, baseModel="tiny/remote", role="Trainer")
    head, is_over = InstalledHead(installation, session), threading.Event()

    def train() -> None:
        while not is_over.is_set():
            disturbed.run(10)
        disturbed.run(10)

    with ThreadPoolExecutor() as threads:
        training: Future[None] = threads.submit(train)
        try:
            disturb(head, some_kills(further_nodes), disturbed, training)
        finally:
            is_over.set()
        training.result()
    sys.stdout.write(f"{KILLS} kills in {len(disturbed.curve)} steps\n")

    installation.delete_session(session)
    undisturbed = Loop(a_run(installation, "remote")).run(len(disturbed.curve))
    assert [number for _, number in disturbed.curve] == list(range(1, len(disturbed.curve) + 1))
    assert disturbed.curve == undisturbed


def restart(head: InstalledHead) -> None:
    generation = head.generation()
    head.kill_container()
    head.wait_until_replaced(generation)


def suspend(installation: Installation, session: str, is_wanted: str) -> None:
    patch = f'--patch={{"spec":{{"suspend":{is_wanted}}}}}'
    installation.kubectl("patch", "tsess", session, "--type=merge", patch)


def test_a_run_that_was_silent_since_its_container_was_killed_is_suspended_with_its_last_step(
    installation: Installation,
) -> None:
    run = Loop(a_run(installation, "default"))
    run.run(3)
    name = session_of(installation, baseModel="tiny/default", role="Trainer")
    head = InstalledHead(installation, name)
    restart(head)
    assert head.models() == []

    suspend(installation, name, "true")
    where = (installation.namespace, START_SECONDS)
    installation.cluster.wait_for(f"tsess/{name}", "condition=Suspended", *where)
    assert head.pod is None
    suspend(installation, name, "false")

    undisturbed = Loop(a_run(installation, "shared")).run(6)
    assert run.run(3) == undisturbed


def test_a_run_that_was_silent_since_its_container_was_killed_moves_with_its_last_step(
    installation: Installation,
) -> None:
    """The runs take turns: those that share a pass may differ by rounding."""
    active, silent = (Loop(a_run(installation, "shared")) for _ in range(2))
    active.run(3)
    silent.run(3)
    before = session_of(installation, baseModel="tiny/shared", role="Pool")
    head = InstalledHead(installation, before)
    restart(head)
    active.run(3)
    assert len(head.models()) == 1

    installation.kubectl("delete", "tsess", before, f"--timeout={START_SECONDS}s")

    assert silent.run(6) == active.run(3)
    undisturbed = Loop(a_run(installation, "shared")).run(9)
    assert silent.curve == undisturbed
    assert before != session_of(installation, baseModel="tiny/shared", role="Pool")


def test_the_journal_that_heads_have_by_default_changes_no_result(
    installation: Installation,
) -> None:
    """It prints what the journal costs, from steps with and without one in turns."""
    loops = {name: Loop(a_run(installation, name)) for name in ("none", "default")}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.run(10)
    for _ in range(TURNS):
        for name, loop in loops.items():
            began = time.perf_counter()
            loop.run(10)
            seconds[name].append((time.perf_counter() - began) / 10)
    without, with_journal = (statistics.median(each) for each in seconds.values())
    sys.stdout.write(
        f"a step in a pod: {1e3 * without:.2f} ms without a journal, {1e3 * with_journal:.2f} ms"
        f" with one: {with_journal / without:.3f} x\n"
    )

    assert loops["none"].curve == loops["default"].curve
