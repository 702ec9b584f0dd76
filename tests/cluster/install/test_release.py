"""A release in a registry: installed with three lines of values, upgraded and rolled back.

By hand, with `make release-check`: it builds images of two commits.

The tests depend on each other: each continues from the state that the previous one left.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest
import tinker
import yaml
from tinker import types

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.program_images import (
    TARGETS,
    layout_folder,
    program_image,
)
from tinkercloud_testing.cluster.installation import (
    RELEASE,
    START_SECONDS,
    Installation,
    a_tiny_model,
    an_installation,
    make_volumes_with_a_tiny_model,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.node import RealNode
from tinkercloud_testing.cluster.nodes.node_config import REGISTRY
from tinkercloud_testing.cluster.releases import Release, a_registry, publish, tree_of
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.charts import ROOT

TESTS_RELEASES = "TINKERCLOUD_TEST_RELEASE" in os.environ
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not TESTS_RELEASES, reason="takes long: make release-check"),
]

VALUES = """\
apiServer: { modelClaims: [models] }
database: { volume: { existingClaim: catalog } }
checkpoints: { volume: { existingClaim: checkpoints } }
"""
MODEL = "tiny/llama"
INDEX = "application/vnd.oci.image.index.v1+json"
SERVICE = ("api-server", "operator")
TEXT = a_text([1, 2, 3, 4], weights=[1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Releases:
    previous: Release
    current: Release


@pytest.fixture(scope="module")
def releases(own_node: RealNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    """Publish the service of the previous commit, and everything of this one."""
    folder = tmp_path_factory.mktemp("registry")
    own_node.load(*[program_image(name) for name in TARGETS])
    tree = tree_of("HEAD~1", folder / "previous")
    subprocess.run([tree / "tools/images/build.sh", *SERVICE], cwd=tree, check=True)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    (tree / ".uv").symlink_to(ROOT / ".uv")
    subprocess.run([tree / "tools/sbom.sh", tree / "build/sbom"], cwd=tree, check=True)
    with a_registry(folder):
        previous = publish(tree, "--targets", *SERVICE)
        layout = f"--layout={layout_folder()}"
        yield Releases(previous, publish(ROOT, layout, "--targets", *TARGETS.values()))


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    kuberay: KubeRay,
    releases: Releases,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Install the previous release, and offer a model."""
    folder = tmp_path_factory.mktemp("release")
    make_volumes_with_a_tiny_model(folder)
    values = yaml.safe_load(VALUES)
    with an_installation(cluster, folder, values, releases.previous) as installed:
        cluster.apply(
            {
                "apiVersion": "tinkercloud.dev/v1alpha1",
                "kind": "BaseModel",
                "metadata": {"name": "tiny", "namespace": installed.namespace},
                "spec": a_tiny_model(MODEL, releases.current)["spec"],
            }
        )
        yield installed


@dataclass
class Story:
    """State that later tests use."""

    training: tinker.TrainingClient | None = None
    loss: float = float("nan")
    pods: str = ""


@pytest.fixture(scope="module")
def story() -> Story:
    return Story()


def images_of(installation: Installation) -> set[str]:
    """Return the images of the running pods of the service."""
    part_of_release = "--selector=app.kubernetes.io/instance=" + RELEASE
    pods = json.loads(installation.kubectl("get", "pods", part_of_release, "--output=json"))
    return {
        container["image"]
        for pod in pods["items"]
        if "deletionTimestamp" not in pod["metadata"]
        for container in pod["spec"]["containers"]
    }


def loss_of(training: tinker.TrainingClient) -> float:
    output = training.forward([TEXT], "cross_entropy").result()
    return float(output.metrics["loss:sum"])


def session_pods(installation: Installation) -> str:
    selector = "--selector=tinkercloud.dev/session"
    return installation.kubectl("get", "pods", selector, "--output=name")


def wait_until_rolled_out(installation: Installation, release: Release) -> None:
    for deployment in ("api", "operator"):
        rolled = f"deployment/{RELEASE}-{deployment}"
        installation.kubectl("rollout", "status", rolled, f"--timeout={START_SECONDS}s")
    expected = {release.images[target] for target in SERVICE}
    wait_until(lambda: images_of(installation) == expected, f"{expected}", START_SECONDS)


def test_three_lines_of_values_install_a_release_by_digest(
    installation: Installation, releases: Releases
) -> None:
    assert images_of(installation) == {releases.previous.images[name] for name in SERVICE}
    assert all("@sha256:" in image for image in images_of(installation))


def test_its_bills_of_materials_are_attached_to_the_images(releases: Releases) -> None:
    for reference in releases.current.images.values():
        repository, _, digest = reference.removeprefix(f"{REGISTRY}/").partition("@")
        url = f"http://{REGISTRY}/v2/{repository}/manifests/{digest.replace(':', '-')}"
        with urlopen(Request(url, headers={"Accept": INDEX}), timeout=60) as answer:
            [attached] = json.load(answer)["manifests"]

        assert attached["artifactType"] == "application/vnd.cyclonedx+json"


def test_a_session_trains_with_the_previous_release(
    installation: Installation, story: Story
) -> None:
    client = installation.client()

    story.training = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    story.training.forward_backward([TEXT], "cross_entropy").result()
    story.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    story.loss, story.pods = loss_of(story.training), session_pods(installation)

    assert story.pods


def test_an_upgrade_replaces_the_service_and_no_session(
    installation: Installation, releases: Releases, story: Story
) -> None:
    assert story.training is not None
    charts = releases.current.charts

    installation.helm("upgrade", "tinkercloud-crds", *charts["tinkercloud-crds"])
    pending = story.training.forward([TEXT], "cross_entropy")
    values = f"--values={installation.values}"
    installation.helm("upgrade", RELEASE, *charts["tinkercloud"], values)
    wait_until_rolled_out(installation, releases.current)

    assert float(pending.result().metrics["loss:sum"]) == story.loss
    assert loss_of(story.training) == story.loss
    assert session_pods(installation) == story.pods


def test_a_rollback_brings_the_previous_service_back_and_the_session_trains_on(
    installation: Installation, releases: Releases, story: Story
) -> None:
    assert story.training is not None

    installation.helm("rollback", RELEASE)
    wait_until_rolled_out(installation, releases.previous)

    assert loss_of(story.training) == story.loss
    story.training.forward_backward([TEXT], "cross_entropy").result()
    story.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert loss_of(story.training) < story.loss
    assert session_pods(installation) == story.pods
