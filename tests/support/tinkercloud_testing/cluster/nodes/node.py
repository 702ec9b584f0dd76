"""A real node on this machine: containerd and a kubelet that run real pods.

They run in a box (`node_box`), with which all containers, mounts and addresses end, so a killed
test run does not change the machine. A veth pair connects the box to the host: the host reaches
pods and Services, and pods reach the host, but not the internet.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tinkercloud_testing.cluster.image_build.image_store import ImageStore
from tinkercloud_testing.cluster.image_build.images import Image, LayerCache, add_bytes, one_program
from tinkercloud_testing.cluster.image_build.programs import (
    ROOT,
    Program,
    binary,
    build_folder,
    layer_folder,
    locked,
    system_tool,
)
from tinkercloud_testing.cluster.kube_api.control_plane import (
    POD_RANGE,
    SERVICE_RANGE,
    ControlPlane,
)
from tinkercloud_testing.cluster.kube_api.dns import dns_image, install_dns
from tinkercloud_testing.cluster.nodes import node_config
from tinkercloud_testing.cluster.nodes.node_box import (
    NODE_RANGE,
    Link,
    a_box,
    a_cgroup,
    connect,
    inside,
    remove_cgroups,
)
from tinkercloud_testing.harness.waiting import wait_until

NAME = "real"
HOST_ADDRESS = node_config.HOST_ADDRESS
NODE_ADDRESS = "10.243.0.2"
_LINK = Link("tinkercloud0", HOST_ADDRESS, NODE_ADDRESS)
_ONLY_ONE = Path(tempfile.gettempdir(), "tinkercloud-node.lock")
_PROGRAMS = ("kubelet", "kube-proxy", "pause", "coredns")


@dataclass(frozen=True)
class Place:
    """Where the parts of a node are."""

    name: str
    folder: Path
    """The folder of its settings, its logs, and everything that its kubelet keeps."""
    address: str
    store: Path
    """The root folder of its containerd, with its images."""


@dataclass(frozen=True)
class RealNode:
    """A running node. `kubelet` and `containerd` may be killed and started again."""

    name: str
    folder: Path
    box: Program
    images: ImageStore
    containerd: Program
    kubelet: Program
    proxy: Program

    def load(self, *images: Image) -> None:
        """Load images onto the node; pods use them with `imagePullPolicy: Never`.

        Raises:
            subprocess.CalledProcessError: containerd rejected them.
        """
        self.images.load(*images)

    def start(self, plane: ControlPlane) -> None:
        """Start it, and wait until it is ready."""
        self.containerd.start()
        self.images.remove_leftovers()
        # The Kubernetes part of containerd reads the list of images when it starts.
        self.containerd.restart()
        self.load(*system_images())
        self.kubelet.start()
        self.proxy.start()
        self._give_pods_a_network(plane)

    def _give_pods_a_network(self, plane: ControlPlane) -> None:
        """Configure the pod network with the addresses that the cluster assigned to the node."""
        cluster, node = plane.cluster, f"node/{self.name}"
        cluster.wait_for(node, "create")
        cluster.wait_for(node, "jsonpath={.spec.podCIDR}")
        addresses = cluster.get("node", self.name)["spec"]["podCIDR"]
        network = json.dumps(node_config.pod_network(addresses, self.folder))
        # containerd 1.6 notices a file that is written in this folder, but not one that is moved
        # here.
        (node_config.network_folder(self.folder) / "10-pods.conflist").write_text(network)
        cluster.wait_for(node, "condition=Ready")


@contextlib.contextmanager
def a_real_node(plane: ControlPlane, folder: Path) -> Iterator[RealNode]:
    """Run a node of this control plane. A machine has one at a time: a second run waits.

    Raises:
        PermissionError: This process is not root.
    """
    install_requirements()
    folder.mkdir()
    with locked(_ONLY_ONE):
        remove_cgroups("*")
        with a_cgroup(NAME), a_box(folder) as box:
            # The kernel removes the network of a killed run shortly after its last process.
            device = Path("/sys/class/net", _LINK.device)
            wait_until(lambda: not device.exists(), f"the end of {_LINK.device}")
            connect(box, _LINK, (), POD_RANGE, SERVICE_RANGE, NODE_RANGE)
            place = Place(NAME, folder, NODE_ADDRESS, node_config.image_store())
            node = assemble(plane, box, place)
            node.start(plane)
            install_dns(plane.cluster)
            yield node
            # Pods end in order while their kubelet runs; the box ends everything else.
            node.kubelet.stop()


@contextlib.contextmanager
def an_image_store(folder: Path) -> Iterator[ImageStore]:
    """Run containerd alone, in a folder of its own, to load images for later nodes.

    Raises:
        PermissionError: This process is not root.
    """
    install_requirements()
    folder.mkdir()
    with locked(_ONLY_ONE), a_box(folder) as box:
        containerd = _containerd(folder, box, node_config.image_store())
        containerd.start()
        images = _image_store(folder)
        images.remove_leftovers()
        yield images
        containerd.stop()


def install_requirements() -> None:
    """Install the packages of the operating system that a node needs.

    Raises:
        PermissionError: This process is not root.
    """
    if os.geteuid() != 0:
        raise PermissionError(
            "a real node needs root; docs/contribute/cluster-tests.md lists alternatives"
        )
    subprocess.run([str(ROOT / "tools" / "cluster" / "install_node.sh")], check=True)


def system_images() -> Sequence[Image]:
    """Return the images that every node runs: the pause program and CoreDNS."""
    program = binary("pause")
    layers = LayerCache(layer_folder())
    layer = layers.layer(
        f"pause {program.parents[1].name}",
        lambda tar: add_bytes(tar, "pause", program.read_bytes(), 0o755),
    )
    return [one_program(node_config.PAUSE_IMAGE, layer, "/pause"), dns_image()]


def assemble(plane: ControlPlane, box: Program, place: Place, *options: str) -> RealNode:
    """Return a node that has not been started.

    Args:
        plane: its control plane.
        box: its running box.
        place: where its parts are.
        options: further options of its kubelet.
    """
    build_folder(*_PROGRAMS)
    name, folder = place.name, place.folder
    files = node_config.write(plane, folder, name, place.address)
    kubelet = (
        str(binary("kubelet")),
        f"--config={files.kubelet}",
        f"--kubeconfig={files.kubelet_credentials}",
        f"--root-dir={folder / 'kubelet'}",
        f"--hostname-override={name}",
        f"--node-ip={place.address}",
        *options,
    )
    proxy = (str(binary("kube-proxy")), f"--config={files.proxy}", f"--hostname-override={name}")
    health = (system_tool("curl"), "--silent", "--fail", "--output", "/dev/null")
    is_kubelet_ready = (*health, "http://127.0.0.1:10248/healthz")
    is_proxy_ready = (*health, "http://127.0.0.1:10256/livez")
    return RealNode(
        name=name,
        folder=folder,
        box=box,
        images=_image_store(folder),
        containerd=_containerd(folder, box, place.store),
        kubelet=_program("kubelet", folder, box, kubelet, is_kubelet_ready),
        proxy=_program("kube-proxy", folder, box, proxy, is_proxy_ready),
    )


def _containerd(folder: Path, box: Program, store: Path) -> Program:
    command = (
        system_tool("containerd"),
        f"--config={node_config.write_containerd(folder, store)}",
    )
    version = (system_tool("ctr"), f"--address={_socket(folder)}", "version")
    return _program("containerd", folder, box, command, version)


def _program(
    name: str, folder: Path, box: Program, command: Sequence[str], ready: Sequence[str]
) -> Program:
    """Return a program of the box that is ready when the command `ready` succeeds there."""
    check = [*inside(box), *ready]
    log = folder / f"{name}.log"
    return Program(name, (*inside(box), *command), log, lambda: _succeeds(check))


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _image_store(folder: Path) -> ImageStore:
    return ImageStore([system_tool("ctr"), f"--address={_socket(folder)}", "--namespace=k8s.io"])


def _socket(folder: Path) -> Path:
    return folder / "containerd.sock"


def head_process(pod: dict[str, Any]) -> int:
    """Return the process id on this machine of the head in a pod."""
    uid = pod["metadata"]["uid"]
    parents = {
        int(process.name): psutil.Process(int(process.name)).ppid()
        for process in Path("/proc").glob("[0-9]*")
        if _is_head(process) and uid in (process / "cgroup").read_text()
    }
    # Its processes of custom losses are forks with the same command.
    [head] = [pid for pid, parent in parents.items() if parent not in parents]
    return head


def _is_head(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"python\0-m\0tinkercloud_worker\0" in (process / "cmdline").read_bytes()
    return False
