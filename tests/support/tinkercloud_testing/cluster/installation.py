"""The service as installed by users: both charts in a separate namespace."""

import contextlib
import os
import subprocess
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
import yaml

from tinkercloud_testing.clients.sdk_clients import SdkClients
from tinkercloud_testing.cluster.image_build.programs import binary
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.volumes import a_volume
from tinkercloud_testing.cluster.releases import UNPUBLISHED, Release
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.small_models.models import save, tiny_llama

RELEASE = "tinkercloud"
START_SECONDS = 600
"""Timeout for pods on a busy machine."""
ALL_KINDS = (
    "trainingsessions,basemodels,rayclusters,pods,services,secrets,configmaps,networkpolicies,"
    "poddisruptionbudgets,deployments,roles,rolebindings,jobs,leases"
)
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_VOLUMES = ("models", "checkpoints", "catalog")


@dataclass(frozen=True)
class Installation:
    """A release in its own namespace."""

    cluster: Cluster
    namespace: str
    values: Path
    source: Release = UNPUBLISHED
    clients: SdkClients = field(default_factory=SdkClients)

    def helm(self, *arguments: str) -> str:
        """Run Helm in the namespace of the release and return its output, or fail with it."""
        command = (str(binary("helm")), *arguments, f"--namespace={self.namespace}")
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the namespace of the release and return its output."""
        return self.cluster.kubectl(*arguments, f"--namespace={self.namespace}")

    @property
    def url(self) -> str:
        """The URL of the Service of the API server."""
        service = self.cluster.get("service", f"{RELEASE}-api", self.namespace)
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    @property
    def key(self) -> str:
        """The API key that the chart created."""
        secret = self.cluster.get("secret", f"{RELEASE}-bootstrap-key", self.namespace)
        return b64decode(secret["data"]["key"]).decode()

    def client(self) -> tinker.ServiceClient:
        """Return an SDK client of this installation."""
        return self.clients.make(self.url, self.key)

    def sessions(self) -> list[dict[str, Any]]:
        """Return its TrainingSessions."""
        return list(self.cluster.objects("trainingsessions", self.namespace))

    def delete_session(self, name: str) -> None:
        """Delete a TrainingSession and wait until all of its objects are deleted."""
        self.kubectl("delete", "trainingsession", name, f"--timeout={START_SECONDS}s")
        left = f"--selector=tinkercloud.dev/session={name}"

        def is_gone() -> bool:
            return not self.kubectl("get", ALL_KINDS, left, "--output=name").strip()

        wait_until(is_gone, "no child of the deleted session", START_SECONDS)


def values_of_one_node(*base_models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chart values for a cluster with one node.

    Args:
        base_models: the name and the spec of each base model.
    """
    return {
        "apiServer": {
            "modelClaims": ["models"],
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        },
        "operator": {
            "replicas": 1,
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        },
        "database": {"volume": {"existingClaim": "catalog"}},
        "sessions": {"lastCheckpointSeconds": 120},
        "checkpoints": {"volume": {"existingClaim": "checkpoints"}},
        "baseModels": list(base_models),
    }


def a_secret(name: str, namespace: str, entries: Mapping[str, str]) -> dict[str, Any]:
    """Return a Secret."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": dict(entries),
    }


def make_volumes(folder: Path) -> Path:
    """Create the folders of the node for the volumes of pods; return that of the models."""
    # Only this user can read the parent folders.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    for name in _VOLUMES:
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    return folder / "models"


def make_volumes_with_a_tiny_model(folder: Path) -> None:
    """Create the folders for the volumes of pods, with a model in the folder `tiny` of theirs."""
    tiny = save(tiny_llama(), make_volumes(folder) / "tiny")
    for path in tiny.iterdir():
        path.chmod(0o644)


def a_tiny_model(name: str, release: Release) -> dict[str, Any]:
    """Return a base model for that of `make_volumes_with_a_tiny_model`, as values of the chart.

    Args:
        name: its name for clients.
        release: the release whose head serves it.
    """
    return {
        "name": "tiny",
        "spec": {
            "modelName": name,
            "source": {"volume": {"claimName": "models", "path": "tiny"}},
            "maxContextLength": 512,
            "head": {
                "image": release.image("worker"),
                "resources": {"cpu": "250m", "memory": "3Gi"},
            },
            "trainer": {"dtype": "float32"},
        },
    }


@contextlib.contextmanager
def an_installation(
    cluster: Cluster,
    folder: Path,
    values: Mapping[str, Any],
    source: Release = UNPUBLISHED,
    **secrets: Mapping[str, str],
) -> Iterator[Installation]:
    """Install the service in the steps of docs/operate/installation.md.

    Args:
        cluster: a cluster with KubeRay and a node with the images.
        folder: the folder passed to `make_volumes`.
        values: the values of the chart.
        source: what is installed.
        secrets: the entries of the Secrets named in the values.
    """
    with (
        cluster.a_namespace("tinkercloud", **_RESTRICTED) as namespace,
        contextlib.ExitStack() as stack,
    ):
        volumes = [part for name in _VOLUMES for part in a_volume(name, namespace, folder / name)]
        cluster.apply(*volumes, *[a_secret(name, namespace, secrets[name]) for name in secrets])
        path = folder / "values.yaml"
        path.write_text(yaml.safe_dump(_with_images(values, source)))
        release = Installation(cluster, namespace, path, source)
        stack.callback(release.clients.close)
        # Other tests of this run may have applied the definitions already.
        taken = ("--take-ownership", "--force-conflicts", "--wait")
        definitions = source.charts["tinkercloud-crds"]
        release.helm("upgrade", "--install", "tinkercloud-crds", *definitions, *taken)
        release.helm("install", RELEASE, *source.charts["tinkercloud"], f"--values={path}")
        for deployment in ("api", "operator"):
            available = f"deployment/{RELEASE}-{deployment}"
            cluster.wait_for(available, "condition=Available", namespace, START_SECONDS)
        yield release


def _with_images(values: Mapping[str, Any], source: Release) -> dict[str, Any]:
    """Return values of the chart with those of the source's images."""
    images = {part: {**values.get(part, {}), **source.values[part]} for part in source.values}
    return {**values, **images}
