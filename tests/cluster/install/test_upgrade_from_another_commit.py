"""A service of an earlier commit is upgraded to this one, with real pods and live sessions.

By hand: `TINKERCLOUD_TEST_PREVIOUS` names the earlier commit, and
`TINKERCLOUD_TEST_ASSEMBLED_IMAGES` is set, as in `.ci/run`. The packages of that commit run with
the libraries of this one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
import yaml
from tinker import types

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.assembled_images import PROGRAMS, assembled_image
from tinkercloud_testing.cluster.image_build.program_images import ARE_ASSEMBLED
from tinkercloud_testing.cluster.installation import (
    RELEASE,
    START_SECONDS,
    Installation,
    a_tiny_model,
    an_installation,
    make_volumes_with_a_tiny_model,
    values_of_one_node,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.node import RealNode
from tinkercloud_testing.cluster.releases import UNPUBLISHED, Release, tree_of, unpublished

PREVIOUS = os.environ.get("TINKERCLOUD_TEST_PREVIOUS")
MODEL = "tiny/llama"
TEXT = a_text([1, 2, 3, 4], weights=[1.0, 1.0, 1.0])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        PREVIOUS is None or not ARE_ASSEMBLED,
        reason="needs TINKERCLOUD_TEST_PREVIOUS and TINKERCLOUD_TEST_ASSEMBLED_IMAGES",
    ),
]


@pytest.fixture(scope="module")
def earlier(own_node: RealNode, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Return the release of the earlier commit; the node has its images and the current ones."""
    tree = tree_of(str(PREVIOUS), tmp_path_factory.mktemp("earlier") / "tree")
    for name in PROGRAMS:
        own_node.load(assembled_image(name), assembled_image(name, tree, "earlier"))
    charts = tree / "charts"
    return unpublished("earlier", charts / "tinkercloud", charts / "tinkercloud-crds")


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster, kuberay: KubeRay, earlier: Release, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Install the service of the earlier commit with a tiny model."""
    folder = tmp_path_factory.mktemp("installation")
    make_volumes_with_a_tiny_model(folder)
    values = values_of_one_node(a_tiny_model(MODEL, earlier))
    with an_installation(cluster, folder, values, earlier) as installed:
        yield installed


@dataclass(frozen=True)
class Trained:
    """A run with a step taken, its session, its loss and a checkpoint."""

    client: tinker.TrainingClient
    session: str
    loss: float
    checkpoint: str


def train(installation: Installation, seed: int) -> Trained:
    known = {each["metadata"]["name"] for each in installation.sessions()}
    client = installation.client().create_lora_training_client(MODEL, rank=8, seed=seed).result()
    take_step(client)
    checkpoint = client.save_state("kept").result().path
    [session] = {each["metadata"]["name"] for each in installation.sessions()} - known
    return Trained(client, session, loss_of(client), checkpoint)


def take_step(client: tinker.TrainingClient) -> None:
    client.forward_backward([TEXT], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def loss_of(client: tinker.TrainingClient) -> float:
    return float(client.forward([TEXT], "cross_entropy").result().metrics["loss:sum"])


def pods_of(installation: Installation, session: str) -> str:
    """Return the pods of a session, with their unique ids and images."""
    columns = "custom-columns=:metadata.uid,:spec.containers[0].image"
    selector = f"--selector=tinkercloud.dev/session={session}"
    return installation.kubectl("get", "pods", selector, f"--output={columns}", "--no-headers")


def suspend(installation: Installation, session: str, *, is_suspended: bool) -> None:
    wanted = str(is_suspended).lower()
    patch = ("--type=merge", f'--patch={{"spec":{{"suspend":{wanted}}}}}')
    installation.kubectl("patch", "trainingsession", session, *patch)
    condition = f"condition={'Suspended' if is_suspended else 'Ready'}"
    what = f"trainingsession/{session}"
    installation.cluster.wait_for(what, condition, installation.namespace, START_SECONDS)


def upgrade(installation: Installation) -> None:
    values = yaml.safe_load(installation.values.read_text())
    values |= {part: values[part] | UNPUBLISHED.values[part] for part in UNPUBLISHED.values}
    values["baseModels"] = [a_tiny_model(MODEL, UNPUBLISHED)]
    path: Path = installation.values
    path.write_text(yaml.safe_dump(values))
    installation.helm("upgrade", "tinkercloud-crds", *UNPUBLISHED.charts["tinkercloud-crds"])
    installation.helm("upgrade", RELEASE, *UNPUBLISHED.charts["tinkercloud"], f"--values={path}")
    for deployment in ("api", "operator"):
        rolled = f"deployment/{RELEASE}-{deployment}"
        installation.kubectl("rollout", "status", rolled, f"--timeout={START_SECONDS}s")


def test_runs_of_an_earlier_commit_train_on_resume_and_are_restored_after_an_upgrade(
    installation: Installation,
) -> None:
    live, asleep = (train(installation, seed) for seed in (1, 2))
    suspend(installation, asleep.session, is_suspended=True)
    pods = pods_of(installation, live.session)

    pending = live.client.forward([TEXT], "cross_entropy")
    upgrade(installation)

    assert float(pending.result().metrics["loss:sum"]) == live.loss
    assert loss_of(live.client) == live.loss
    assert pods_of(installation, live.session) == pods
    assert ":earlier" in pods
    take_step(live.client)
    assert loss_of(live.client) < live.loss
    suspend(installation, asleep.session, is_suspended=False)
    assert loss_of(asleep.client) == asleep.loss
    known = {each["metadata"]["name"] for each in installation.sessions()}
    client = installation.client()
    restored = client.create_training_client_from_state_with_optimizer(live.checkpoint).result()
    assert loss_of(restored) == live.loss
    [newest] = {each["metadata"]["name"] for each in installation.sessions()} - known
    assert ":test" in pods_of(installation, newest)
