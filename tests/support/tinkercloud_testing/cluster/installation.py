"""The service as a user installs it: both charts, into a namespace of their own."""

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

from tinkercloud_testing.charts import CHART, CRD_CHART
from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.program_images import program_image
from tinkercloud_testing.cluster.programs import binary
from tinkercloud_testing.cluster.volumes import a_volume
from tinkercloud_testing.sdk_clients import SdkClients
from tinkercloud_testing.waiting import wait_until

RELEASE = "tinkercloud"
START_SECONDS = 600
"""For pods on a busy machine."""
ALL_KINDS = (
    "trainingsessions,basemodels,rayclusters,pods,services,secrets,configmaps,networkpolicies,"
    "poddisruptionbudgets,deployments,roles,rolebindings,jobs,leases"
)
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_VOLUMES = ("models", "checkpoints", "catalog")


@dataclass(frozen=True)
class Installation:
    """A release in a namespace of its own."""

    cluster: Cluster
    namespace: str
    values: Path
    clients: SdkClients = field(default_factory=SdkClients)

    def helm(self, *arguments: str) -> str:
        """Run Helm on the release's namespace and return what it printed; fail with that."""
        command = (str(binary("helm")), *arguments, f"--namespace={self.namespace}")
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl on the release's namespace and return what it printed."""
        return self.cluster.kubectl(*arguments, f"--namespace={self.namespace}")

    @property
    def url(self) -> str:
        """Where the API server is reached: its Service."""
        service = self.cluster.get("service", f"{RELEASE}-api", self.namespace)
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    @property
    def key(self) -> str:
        """The key that the chart made."""
        secret = self.cluster.get("secret", f"{RELEASE}-bootstrap-key", self.namespace)
        return b64decode(secret["data"]["key"]).decode()

    def client(self) -> tinker.ServiceClient:
        """Return an SDK client of it."""
        return self.clients.make(self.url, self.key)

    def sessions(self) -> list[dict[str, Any]]:
        """Return its TrainingSessions."""
        return list(self.cluster.objects("trainingsessions", self.namespace))

    def delete_session(self, name: str) -> None:
        """Delete a TrainingSession, and wait until nothing of it is left."""
        self.kubectl("delete", "trainingsession", name, f"--timeout={START_SECONDS}s")
        left = f"--selector=tinkercloud.dev/session={name}"

        def is_gone() -> bool:
            return not self.kubectl("get", ALL_KINDS, left, "--output=name").strip()

        wait_until(is_gone, "no child of the deleted session", START_SECONDS)


def image_values(name: str) -> dict[str, str]:
    """Return the chart's values of an image that no registry has."""
    repository, tag = program_image(name).name.rsplit(":", 1)
    return {"repository": repository, "tag": tag}


def values_of_one_node(*base_models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a cluster of one node.

    Args:
        base_models: name and spec of each.
    """
    return {
        "apiServer": {
            "image": image_values("api-server"),
            "modelClaims": ["models"],
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        },
        "operator": {
            "image": image_values("operator"),
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
    """Make the folders of the node that pods use, which outlive them; return the models'."""
    # The folders above are this user's alone.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    for name in _VOLUMES:
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    return folder / "models"


@contextlib.contextmanager
def an_installation(
    cluster: Cluster, folder: Path, values: Mapping[str, Any], **secrets: Mapping[str, str]
) -> Iterator[Installation]:
    """Install what a user would, in the order that docs/operate/installation.md gives.

    Args:
        cluster: where KubeRay is, and a node that has the images.
        folder: of `make_volumes`.
        values: of the chart.
        secrets: entries of the Secrets that the values name.
    """
    with (
        cluster.a_namespace("tinkercloud", **_RESTRICTED) as namespace,
        contextlib.ExitStack() as stack,
    ):
        volumes = [part for name in _VOLUMES for part in a_volume(name, namespace, folder / name)]
        cluster.apply(*volumes, *[a_secret(name, namespace, secrets[name]) for name in secrets])
        path = folder / "values.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        release = Installation(cluster, namespace, path)
        stack.callback(release.clients.close)
        # Other tests of the run may have applied the definitions before.
        taken = ("--take-ownership", "--force-conflicts")
        release.helm("upgrade", "--install", "tinkercloud-crds", str(CRD_CHART), *taken)
        release.helm("install", RELEASE, str(CHART), f"--values={path}")
        for deployment in ("api", "operator"):
            available = f"deployment/{RELEASE}-{deployment}"
            cluster.wait_for(available, "condition=Available", namespace, START_SECONDS)
        yield release
