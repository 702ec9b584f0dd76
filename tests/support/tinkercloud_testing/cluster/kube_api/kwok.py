"""Simulated nodes: kwok stands in for their kubelets, so that pods cost nothing.

A simulated pod is Running and Ready immediately and disappears once it is deleted; no program runs
in it. Tests of programs inside pods need the real node.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.programs import (
    Program,
    accepts_connections,
    build_folder,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.harness.ports import free_port

_KEY = "kwok.x-k8s.io/node"
_LABELS = {"type": "kwok"}
PLACEMENT: Mapping[str, Any] = {
    "nodeSelector": _LABELS,
    "tolerations": [{"key": _KEY, "operator": "Exists", "effect": "NoSchedule"}],
}
"""The fields of a pod spec that place it on a simulated node; no other pods run there."""


@dataclass(frozen=True)
class KwokNodes:
    """A running kwok and the nodes that it simulates."""

    cluster: Cluster
    controller: Program
    names: set[str] = field(default_factory=set)
    """The names of the nodes."""

    def add(self, name: str, *, gpus: int = 8, labels: Mapping[str, str] | None = None) -> None:
        """Add a node with this many GPUs, or change one, and wait until it is ready."""
        capacity = {"cpu": "256", "memory": "2Ti", "pods": "2000", "nvidia.com/gpu": str(gpus)}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {_KEY: "fake"},
                "labels": {"kubernetes.io/hostname": name, **_LABELS, **(labels or {})},
            },
            "spec": {"taints": [{"key": _KEY, "value": "fake", "effect": "NoSchedule"}]},
        }
        self.names.add(name)
        self.cluster.apply(node)
        self._set_capacity(name, capacity)
        self.cluster.wait_for(f"node/{name}", "condition=Ready")

    def remove(self, name: str) -> None:
        """Remove a node; the cluster then deletes its pods."""
        self.cluster.delete("node", name)
        self.names.discard(name)

    def clear(self) -> None:
        """Remove all nodes."""
        for name in list(self.names):
            self.remove(name)

    def _set_capacity(self, name: str, capacity: Mapping[str, str]) -> None:
        status = {"capacity": capacity, "allocatable": capacity}
        self.cluster.patch_status("node", name, status)


@contextlib.contextmanager
def a_kwok_controller(cluster: Cluster, folder: Path) -> Iterator[KwokNodes]:
    """Run kwok, which only simulates nodes with its annotation."""
    port = free_port()
    built = build_folder("kwok")
    # The stages of nodes and pods, without delays.
    stages = sorted((built / "share" / "kwok").glob("*.yaml"))
    command = (
        str(built / "bin" / "kwok"),
        *(f"--config={stage}" for stage in stages),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--manage-nodes-with-annotation-selector={_KEY}=fake",
        f"--server-address=127.0.0.1:{port}",
    )
    kwok = KwokNodes(
        cluster,
        Program(
            "kwok",
            command,
            folder / "kwok.log",
            lambda: accepts_connections(port),
            # The command above has all settings; ignore those in the home folder of the user.
            environment={"KWOK_WORKDIR": str(folder / "kwok")},
        ),
    )
    try:
        kwok.controller.start()
        yield kwok
    finally:
        kwok.controller.kill()
