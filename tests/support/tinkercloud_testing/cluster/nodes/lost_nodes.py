"""Further real nodes, which tests lose: everything on them ends at once and does not return.

Their gateway is the box of the first node, so the kernel removes them with that one. Pods reach
each other across nodes. A lost node answers nothing: packets to it and to its pods are dropped, as
if its machine had lost power. Its disk is deleted.

Their images are those of the first node, without a copy: symbolic links.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.programs import state_folder, system_tool
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane
from tinkercloud_testing.cluster.nodes import node_config
from tinkercloud_testing.cluster.nodes.node import Place, RealNode, assemble
from tinkercloud_testing.cluster.nodes.node_box import Link, a_box, a_cgroup, connect, in_network

LABEL = "tinkercloud.test/can-be-lost"
_MOST = 60
_CONTENT = "io.containerd.content.v1.content"
_IMAGES = "io.containerd.metadata.v1.bolt/meta.db"
_LAYERS = "io.containerd.snapshotter.v1.overlayfs"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""The taint with which an administrator reports that a node is off."""
PLACEMENT: Mapping[str, Any] = {
    "nodeSelector": {LABEL: "true"},
    "tolerations": [{"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}],
}
"""The placement of a pod on such a node; no other pods run there."""


@dataclass
class FurtherNodes:
    """The nodes that can be lost, by name. There are none at first."""

    plane: ControlPlane
    first: RealNode
    folder: Path
    _running: dict[str, contextlib.ExitStack] = field(default_factory=dict, init=False)
    _number: int = field(default=0, init=False)

    def add(self) -> str:
        """Run another node, and wait until it is ready.

        Returns:
            Its name, which no earlier node had.

        Raises:
            IndexError: there are no addresses for more nodes.
        """
        self._number += 1
        if self._number > _MOST:
            raise IndexError(f"more than {_MOST} nodes were added")
        name, folder = f"further-{self._number}", self.folder / f"further-{self._number}"
        start = 4 * self._number
        link = Link(f"further{self._number}", f"10.243.0.{start + 1}", f"10.243.0.{start + 2}")
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(a_cgroup(name))
            box = stack.enter_context(a_box(folder))
            connect(box, link, in_network(self.first.box))
            options = (f"--node-labels={LABEL}=true", f"--register-with-taints={LABEL}=:NoSchedule")
            place = Place(name, folder, link.node, folder / "images")
            self._link_images(place.store)
            assemble(self.plane, box, place, *options).start(self.plane)
            self._route(name, link)
            self._running[name] = stack.pop_all()
        return name

    def _link_images(self, store: Path) -> None:
        """Make a store of the images of the first node."""
        source = node_config.image_store()
        for each in (_IMAGES, f"{_LAYERS}/metadata.db"):
            (store / each).parent.mkdir(parents=True)
        # Databases that do not change while they are copied are like those of a killed containerd.
        with self.first.containerd.paused():
            for each in (_IMAGES, f"{_LAYERS}/metadata.db"):
                shutil.copyfile(source / each, store / each)
            # containerd writes each file once, and what one node deletes is a link.
            shutil.copytree(source / _CONTENT, store / _CONTENT, copy_function=os.symlink)
            layers = store / _LAYERS / "snapshots"
            layers.mkdir()
            for layer in (source / _LAYERS / "snapshots").iterdir():
                (layers / layer.name).symlink_to(layer)

    def _route(self, name: str, link: Link) -> None:
        """Make the gateway reach the pods of a node, and drop its packets once it is lost."""
        pods = self.plane.cluster.get("node", name)["spec"]["podCIDR"]
        for command in (
            f"route replace {pods} via {link.node}",
            f"route replace blackhole {pods} metric 1000",
            f"route replace blackhole {link.network} metric 1000",
        ):
            prefix = (*in_network(self.first.box), system_tool("ip"))
            subprocess.run([*prefix, *command.split()], check=True)

    def lose(self, name: str) -> None:
        """End a node at once, with its pods and its disk. Nobody is notified."""
        self._running.pop(name).close()

    def delete(self, name: str) -> None:
        """Delete the Node of a lost node, as the controller of a cloud's machines does.

        Kubernetes then deletes its pods, within a minute.
        """
        self.plane.cluster.kubectl("delete", "node", name)

    def report_out_of_service(self, name: str) -> None:
        """Report a lost node as an administrator does. Kubernetes then deletes its pods at once.

        The control plane of the tests waits an hour for a silent kubelet before it reports the
        node as not ready, as it does here at once.
        """
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
        patch = json.dumps({"status": {"conditions": [ready]}})
        cluster = self.plane.cluster
        cluster.kubectl("patch", "node", name, "--subresource=status", f"--patch={patch}")
        cluster.kubectl("taint", "node", name, OUT_OF_SERVICE)

    def clear(self) -> None:
        """Stop all nodes, and delete their Node objects, also those of lost nodes."""
        for name in list(self._running):
            self.lose(name)
        self.plane.cluster.kubectl("delete", "nodes", f"--selector={LABEL}")


@contextlib.contextmanager
def nodes_to_lose(plane: ControlPlane, first: RealNode) -> Iterator[FurtherNodes]:
    """Add nodes to a control plane that has a first one."""
    # Its path is short: kubelets have sockets in it.
    with state_folder() as folder:
        nodes = FurtherNodes(plane, first, folder)
        try:
            yield nodes
        finally:
            nodes.clear()
