"""A pool in an installation: the SDK, two owners, and one pool cluster in real pods.

The tests depend on each other: each continues from the state that the previous one left.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import (
    RELEASE,
    START_SECONDS,
    Installation,
    an_installation,
    make_volumes_with_a_tiny_model,
    values_of_one_node,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.node import RealNode
from tinkercloud_testing.harness.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "tiny/llama"
MANY = 40
SHARED: dict[str, Any] = {
    "name": "tiny",
    "spec": {
        "modelName": MODEL,
        "source": {"volume": {"claimName": "models", "path": "tiny"}},
        "maxContextLength": 512,
        "sharing": "Shared",
        "pool": {"minClusters": 1, "maxClusters": 1, "slotsPerCluster": 64},
        "head": {
            "image": "tinkercloud.test/worker:test",
            "resources": {"cpu": "250m", "memory": "3Gi"},
        },
        "trainer": {"dtype": "float32"},
    },
}


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    kuberay: KubeRay,
    real_node: RealNode,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Install the service with a model that has a pool, and wait until the pool is warm."""
    folder = tmp_path_factory.mktemp("pools")
    make_volumes_with_a_tiny_model(folder)
    real_node.load(*map(program_image, ("api-server", "operator", "worker")))
    with an_installation(cluster, folder, values_of_one_node(SHARED)) as release:
        wait_until(lambda: bool(clusters(release)), "a pool cluster", START_SECONDS)
        [name] = clusters(release)
        cluster.wait_for(f"tsess/{name}", "condition=Ready", release.namespace, START_SECONDS)
        yield release


def clusters(installation: Installation) -> list[str]:
    return [
        session["metadata"]["name"]
        for session in installation.sessions()
        if session["spec"]["role"] == "Pool"
    ]


def places(installation: Installation) -> dict[str, str | None]:
    """Return the cluster of each run."""
    return {
        session["spec"]["owner"]: session["spec"].get("poolCluster")
        for session in installation.sessions()
        if session["spec"]["role"] == "Trainer"
    }


@dataclass
class Story:
    """State that later tests use."""

    runs: dict[str, tinker.TrainingClient] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    @property
    def first_loss(self) -> float:
        """The loss of a run that has not been trained."""
        return self.losses[0]


@pytest.fixture(scope="module")
def story(installation: Installation) -> Story:
    where = ("exec", f"--namespace={installation.namespace}", f"deployment/{RELEASE}-api", "--")
    command = (*where, "python", "-m", "tinkercloud_api", "keys", "create", "--json")
    said = {owner: installation.cluster.kubectl(*command, owner) for owner in ("ada", "bob")}
    return Story(keys={owner: str(json.loads(text)["key"]) for owner, text in said.items()})


def test_two_owners_train_and_sample_on_one_warm_cluster(
    installation: Installation, story: Story
) -> None:
    def create(owner: str) -> tinker.TrainingClient:
        began = time.monotonic()
        client = installation.clients.make(installation.url, story.keys[owner])
        training = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
        sys.stdout.write(f"{owner}: ready after {time.monotonic() - began:.2f} s\n")
        return training

    with ThreadPoolExecutor() as threads:
        story.runs = dict(zip(story.keys, threads.map(create, story.keys), strict=True))
        losses = list(threads.map(lambda run: [step(run), step(run)], story.runs.values()))
    samplers = [run.save_weights_and_get_sampling_client().result() for run in story.runs.values()]
    prompt = types.ModelInput.from_ints([5, 6, 7])
    sampled = [sampler.compute_logprobs(prompt).result() for sampler in samplers]

    [cluster] = clusters(installation)
    assert places(installation) == {"ada": cluster, "bob": cluster}
    pods = installation.kubectl("get", "pods", "--selector=tinkercloud.dev/session", "-o=name")
    assert len(pods.split()) == 1
    assert losses[0][1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert sampled[0] == pytest.approx(sampled[1], abs=1e-5)
    story.losses = losses[0]


def test_runs_continue_when_their_cluster_is_deleted(
    installation: Installation, story: Story
) -> None:
    [before] = clusters(installation)

    installation.kubectl("delete", "tsess", before, f"--timeout={START_SECONDS}s")
    wait_until(
        lambda: set(places(installation).values()).isdisjoint({before, None}),
        "the runs have another place",
        START_SECONDS,
    )
    [after] = clusters(installation)
    installation.cluster.wait_for(
        f"tsess/{after}", "condition=Ready", installation.namespace, START_SECONDS
    )
    losses = [step(run) for run in story.runs.values()]

    assert losses[0] < story.losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_end_of_a_run_frees_its_slot_and_leaves_a_checkpoint(
    installation: Installation, story: Story
) -> None:
    run = story.runs["bob"].model_id
    [name] = [
        session["metadata"]["name"]
        for session in installation.sessions()
        if session["spec"].get("modelId") == run
    ]

    installation.kubectl("delete", "tsess", name, f"--timeout={START_SECONDS}s")

    kept = installation.values.parent / "checkpoints" / "runs"
    assert list(kept.glob(f"{run}/weights/last-step-*/manifest.json"))
    status = installation.cluster.get("bm", "tiny", installation.namespace)["status"]
    wait_until(lambda: models_of(installation) == 1, f"one slot in use: {status}", START_SECONDS)
    assert step(story.runs["ada"]) > 0


def test_many_runs_of_one_owner_start_on_the_warm_cluster(
    installation: Installation, story: Story
) -> None:
    client = installation.clients.make(installation.url, story.keys["ada"])
    runs, seconds = [], []
    for _ in range(MANY):
        began = time.monotonic()
        runs.append(client.create_lora_training_client(MODEL, rank=4, seed=1).result())
        seconds.append(time.monotonic() - began)

    assert step(runs[-1]) == pytest.approx(story.first_loss, abs=1e-5)
    wait_until(lambda: models_of(installation) == 1 + MANY, "all of them counted", START_SECONDS)
    low, high = (sorted(seconds)[MANY * part // 100] for part in (50, 95))
    sys.stdout.write(f"ready after {low:.2f} s (p50), {high:.2f} s (p95)\n")


def models_of(installation: Installation) -> int:
    found = installation.cluster.get("basemodel", "tiny", installation.namespace)
    return int(found["status"]["pool"]["models"])


def test_a_run_takes_over_a_warm_spare_and_gets_its_pod(
    installation: Installation, story: Story
) -> None:
    spec = SHARED["spec"] | {"modelName": "tiny/warm", "sharing": "Dedicated", "warmSpares": 1}
    del spec["pool"]
    made = {"apiVersion": "tinkercloud.dev/v1alpha1", "kind": "BaseModel", "spec": spec}
    meta = {"metadata": {"name": "warm", "namespace": installation.namespace}}
    installation.cluster.apply(made | meta)
    wait_until(lambda: bool(free_spares(installation)), "a spare", START_SECONDS)
    [spare] = free_spares(installation)
    where = (installation.namespace, START_SECONDS)
    installation.cluster.wait_for(f"tsess/{spare}", "condition=Ready", *where)
    [pod] = pods_of(installation, spare)

    began = time.monotonic()
    client = installation.clients.make(installation.url, story.keys["ada"])
    run = client.create_lora_training_client("tiny/warm", rank=4, seed=1).result()
    sys.stdout.write(f"on a spare: ready after {time.monotonic() - began:.2f} s\n")

    assert step(run) == pytest.approx(story.first_loss, abs=1e-5)
    assert pods_of(installation, spare) == [pod]
    [placed] = [
        session["metadata"]["name"]
        for session in installation.sessions()
        if session["spec"].get("modelId") == run.model_id
    ]
    assert pods_of(installation, placed) == []
    installation.kubectl("delete", "basemodel", "warm", "--wait=false")
    installation.kubectl("delete", "tsess", placed, f"--timeout={START_SECONDS}s")
    wait_until(lambda: pods_of(installation, spare) == [], "the spare to end", START_SECONDS)


def free_spares(installation: Installation) -> list[str]:
    return [
        session["metadata"]["name"]
        for session in installation.sessions()
        if session["spec"]["role"] == "Spare"
        and session["metadata"]["ownerReferences"][0]["kind"] == "BaseModel"
    ]


def pods_of(installation: Installation, session: str) -> list[str]:
    selector = f"--selector=tinkercloud.dev/session={session}"
    return installation.kubectl("get", "pods", selector, "-o=name").split()


def test_uninstalling_leaves_no_cluster(installation: Installation) -> None:
    installation.helm("uninstall", RELEASE, "--wait", f"--timeout={START_SECONDS}s")

    wait_until(lambda: installation.sessions() == [], "no sessions", START_SECONDS)
