"""TrainingSessions and BaseModels with simulated pods, and operations on them."""

from dataclasses import dataclass
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT
from tinkercloud_testing.harness.waiting import wait_until

MODEL = "Qwen/Qwen3-8B"
CHILD_KINDS = "rayclusters,pods,services,secrets,configmaps,networkpolicies,poddisruptionbudgets"
SOON_SECONDS = 240
"""Longer than anything takes on a busy machine, and shorter than the resync of the operator: a
change within this time was caused by an event."""


@dataclass(frozen=True)
class Sessions:
    """Creates and reads the TrainingSessions of one namespace."""

    cluster: Cluster
    namespace: str

    def make(self, name: str, **spec: object) -> str:
        """Create or change a session."""
        self.cluster.apply(a_session(self.namespace, name, **spec))
        return name

    def make_ready(self, name: str, **spec: object) -> str:
        """Create or change a session and wait until it is Ready."""
        self.make(name, **spec)
        self.wait_for(name, "condition=Ready")
        return name

    def delete(self, name: str) -> None:
        """Delete a session without waiting for the deletion."""
        self.cluster.delete("trainingsession", name, self.namespace)

    def drain(self, name: str) -> None:
        """Ask the operator to move all runs from a pool cluster."""
        where = ("-n", self.namespace, "--overwrite")
        self.cluster.kubectl("annotate", "tsess", name, f"{labels.DRAIN}=true", *where)

    def wait_for(self, name: str, condition: str) -> None:
        """Wait with `kubectl wait`."""
        what = f"trainingsession/{name}"
        self.cluster.wait_for(what, condition, self.namespace, SOON_SECONDS)

    def wait_for_reason(self, name: str, reason: str) -> None:
        """Wait until its Ready condition has this reason."""
        wait_until(lambda: self.reason(name) == reason, f"{name} is {reason}", SOON_SECONDS)

    def status(self, name: str) -> dict[str, Any]:
        """Return its status, which is empty at first."""
        found = self.cluster.get("trainingsession", name, self.namespace)
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return one of its conditions, or an empty one if it is not set."""
        conditions: list[dict[str, Any]] = self.status(name).get("conditions", [])
        return next((item for item in conditions if item["type"] == kind), {})

    def reason(self, name: str) -> str:
        """Return the reason of its Ready condition."""
        return str(self.condition(name, "Ready").get("reason", ""))

    def children(self, name: str, kinds: str = CHILD_KINDS) -> list[str]:
        """Return the objects with its label as `Kind/name`."""
        selector = f"tinkercloud.dev/session={name}"
        found = self.cluster.objects(kinds, self.namespace, selector)
        return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in found)

    def wait_until_nothing_is_left(self, name: str) -> None:
        """Wait until the session and all objects with its label are deleted."""
        self.wait_for(name, "delete")
        wait_until(lambda: not self.children(name), f"no child of {name}", SOON_SECONDS)


def a_session(namespace: str, name: str, **spec: object) -> dict[str, Any]:
    """Return a TrainingSession."""
    wanted = {"baseModel": MODEL, "owner": "ada", "lora": {"rank": 8}} | spec
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": namespace},
        "spec": wanted,
    }


def a_base_model(namespace: str, name: str = "qwen3-8b", **spec: object) -> dict[str, Any]:
    """Return a BaseModel with a head, two trainers and a sampler on simulated nodes."""
    wanted: dict[str, Any] = {
        "modelName": MODEL,
        "source": {"volume": {"claimName": "models", "path": "model"}},
        "maxContextLength": 4096,
        "head": {"image": "tinkercloud-worker"},
        "trainer": {"backend": "megatron", "replicas": 2, "gpusPerReplica": 1},
        "sampler": {"backend": "sglang", "image": "sglang", "replicas": 1, "gpusPerReplica": 1},
        "placement": PLACEMENT,
    }
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "BaseModel",
        "metadata": {"name": name, "namespace": namespace},
        "spec": wanted | spec,
    }


def a_volume(namespace: str) -> list[dict[str, Any]]:
    """Return the volume of the files of BaseModels, and its claim."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": "simulated"}
    volume = f"models-{namespace}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": "/nowhere"},
                "claimRef": {"namespace": namespace, "name": "models"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": {
                **common,
                "volumeName": volume,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    ]
