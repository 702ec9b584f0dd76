"""Nodes without machines: kwok plays their kubelets, so that pods cost nothing.

Such a pod is Running and Ready at once and gone as soon as it is deleted; nothing runs in it. What
a program does inside its pod is a matter for the real node.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.programs import Program, accepts_connections, build_folder
from tinkercloud_testing.servers import free_port

_KEY = "kwok.x-k8s.io/node"
_LABELS = {"type": "kwok"}
PLACEMENT: Mapping[str, Any] = {
    "nodeSelector": _LABELS,
    "tolerations": [{"key": _KEY, "operator": "Exists", "effect": "NoSchedule"}],
}
"""What a pod's spec says to land on a fake node; without it, none does."""


@dataclass(frozen=True)
class KwokNodes:
    """A running kwok, and the nodes it plays."""

    cluster: Cluster
    controller: Program
    names: set[str] = field(default_factory=set)
    """Of the nodes."""

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
        """Remove a node; its pods go with it after the cluster has noticed."""
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
    """Run kwok; it plays the nodes that carry its annotation and no others."""
    port = free_port()
    built = build_folder("kwok")
    # What befalls a node and a pod, and when: at once.
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
            # Its settings are the command above, not what a user keeps in their home.
            environment={"KWOK_WORKDIR": str(folder / "kwok")},
        ),
    )
    try:
        kwok.controller.start()
        yield kwok
    finally:
        kwok.controller.kill()
