"""A real node on this machine: containerd and a kubelet that run real pods.

They run in a box: a network, a mount and a process namespace that one process keeps open. When that
process ends for any reason, all containers, mounts and addresses of the box end with it, so a
killed test run does not change the machine. A veth pair connects the box to the host: the host
reaches pods and Services, and pods reach the host, but not the internet.
"""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster import node_config
from tinkercloud_testing.cluster.control_plane import POD_RANGE, SERVICE_RANGE, ControlPlane
from tinkercloud_testing.cluster.dns import dns_image, install_dns
from tinkercloud_testing.cluster.image_store import ImageStore
from tinkercloud_testing.cluster.images import Image, LayerCache, add_bytes
from tinkercloud_testing.cluster.programs import (
    ROOT,
    Program,
    binary,
    build_folder,
    layer_folder,
    locked,
    system_tool,
)
from tinkercloud_testing.waiting import wait_until

NAME = "real"
HOST_ADDRESS = "10.243.0.1"
NODE_ADDRESS = "10.243.0.2"
_VETH = "tinkercloud0"
_ONLY_ONE = Path(tempfile.gettempdir(), "tinkercloud-node.lock")
_CGROUPS = Path("/sys/fs/cgroup")
_PROGRAMS = ("kubelet", "kube-proxy", "pause", "coredns")
# With the default weight, all pods together would get the same CPU share as one process.
_WEIGHTS = {"cpu.shares": "16384", "cpu.weight": "1600"}
# Fixed paths of containerd, the CNI plugins and the kubelet; the box has its own.
_PRIVATE_FOLDERS = ("/run/containerd", "/var/lib/cni", "/var/log/containers")


@dataclass(frozen=True)
class RealNode:
    """A running node. `kubelet` and `containerd` may be killed and started again."""

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


@contextlib.contextmanager
def a_real_node(plane: ControlPlane, folder: Path) -> Iterator[RealNode]:
    """Run a node of this control plane. A machine has one at a time: a second run waits.

    Raises:
        PermissionError: This process is not root.
    """
    install_requirements()
    folder.mkdir()
    with locked(_ONLY_ONE), _cgroup(), _box(folder) as box:
        inside = _inside(box)
        _join_networks(box, inside)
        node = _assemble(plane, folder, box, inside)
        node.containerd.start()
        node.images.remove_leftovers()
        # The Kubernetes part of containerd reads the list of images when it starts.
        node.containerd.restart()
        node.load(*system_images())
        node.kubelet.start()
        node.proxy.start()
        _give_pods_a_network(plane, folder)
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
    with locked(_ONLY_ONE), _box(folder) as box:
        containerd = _containerd(folder, _inside(box))
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
    return [Image(node_config.PAUSE_IMAGE, [layer], ["/pause"]), dns_image()]


@contextlib.contextmanager
def _cgroup() -> Iterator[None]:
    """Create the control group of all pods in every hierarchy."""
    _remove_cgroups()
    for hierarchy in _hierarchies():
        group = hierarchy / node_config.CGROUP
        group.mkdir()
        for name, weight in _WEIGHTS.items():
            if (group / name).exists():
                (group / name).write_text(weight)
    try:
        yield
    finally:
        _remove_cgroups()


def _hierarchies() -> Sequence[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def _remove_cgroups() -> None:
    """Remove our control groups, including those of a killed run, whose processes are ending."""
    tops = [hierarchy / node_config.CGROUP for hierarchy in _hierarchies()]
    folders = [folder for top in tops for folder in (*top.rglob("*/"), top) if folder.exists()]
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        wait_until(functools.partial(_removed, folder), f"removal of {folder}")


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@contextlib.contextmanager
def _box(folder: Path) -> Iterator[Program]:
    """Run the process that keeps the namespaces open; everything inside ends with it."""
    prepare = "; ".join(
        [
            "set -e",
            "mount --make-rshared /",
            *(f"mkdir -p {path}; mount -t tmpfs tmpfs {path}" for path in _PRIVATE_FOLDERS),
            "ip link set lo up",
            f"touch {folder / 'box.ready'}",
            # A waiting shell, the first process of the box, also reaps its orphans.
            "sleep infinity & wait",
        ]
    )
    command = (
        *(system_tool("unshare"), "--net", "--mount", "--propagation=private"),
        *("--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"),
        *(system_tool("bash"), "-c", prepare),
    )
    box = Program("box", command, folder / "box.log", (folder / "box.ready").exists)
    try:
        box.start()
        yield box
    finally:
        box.kill()


def _inside(box: Program) -> tuple[str, ...]:
    """Return the prefix of a command that runs in the box."""
    return (system_tool("nsenter"), f"--target={_first_pid(box)}", "--net", "--mount", "--pid")


def _first_pid(box: Program) -> str:
    assert box.process is not None
    pid = box.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def _join_networks(box: Program, inside: Sequence[str]) -> None:
    ip = system_tool("ip")
    # The kernel removes the network of a killed run shortly after its last process.
    wait_until(lambda: not Path(f"/sys/class/net/{_VETH}").exists(), f"the end of {_VETH}")
    on_host = (
        f"link add {_VETH} type veth peer name eth0 netns {_first_pid(box)}",
        f"address add {HOST_ADDRESS}/30 dev {_VETH}",
        f"link set {_VETH} up",
        f"route add {POD_RANGE} via {NODE_ADDRESS}",
        f"route add {SERVICE_RANGE} via {NODE_ADDRESS}",
    )
    in_box = (
        f"address add {NODE_ADDRESS}/30 dev eth0",
        "link set eth0 up",
        f"route add default via {HOST_ADDRESS}",
    )
    for command in on_host:
        subprocess.run([ip, *command.split()], check=True)
    for command in in_box:
        subprocess.run([*inside, ip, *command.split()], check=True)
    # Services are reachable from pods of the same bridge only if iptables sees bridged packets.
    settings = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
    script = "; ".join(f"echo 1 > /proc/sys/{setting}" for setting in settings)
    subprocess.run([*inside, system_tool("bash"), "-ec", script], check=True)


def _assemble(plane: ControlPlane, folder: Path, box: Program, inside: Sequence[str]) -> RealNode:
    build_folder(*_PROGRAMS)
    files = node_config.write(plane, folder, NAME, NODE_ADDRESS)
    kubelet = (
        str(binary("kubelet")),
        f"--config={files.kubelet}",
        f"--kubeconfig={files.kubelet_credentials}",
        f"--root-dir={folder / 'kubelet'}",
        f"--hostname-override={NAME}",
        f"--node-ip={NODE_ADDRESS}",
    )
    proxy = (str(binary("kube-proxy")), f"--config={files.proxy}", f"--hostname-override={NAME}")
    health = (system_tool("curl"), "--silent", "--fail", "--output", "/dev/null")
    is_kubelet_ready = (*health, "http://127.0.0.1:10248/healthz")
    is_proxy_ready = (*health, "http://127.0.0.1:10256/livez")
    return RealNode(
        box=box,
        images=_image_store(folder),
        containerd=_containerd(folder, inside),
        kubelet=_program("kubelet", folder, inside, kubelet, is_kubelet_ready),
        proxy=_program("kube-proxy", folder, inside, proxy, is_proxy_ready),
    )


def _containerd(folder: Path, inside: Sequence[str]) -> Program:
    command = (system_tool("containerd"), f"--config={node_config.write_containerd(folder)}")
    version = (system_tool("ctr"), f"--address={_socket(folder)}", "version")
    return _program("containerd", folder, inside, command, version)


def _program(
    name: str, folder: Path, inside: Sequence[str], command: Sequence[str], ready: Sequence[str]
) -> Program:
    """Return a program of the box that is ready when the command `ready` succeeds there."""
    check = [*inside, *ready]
    log = folder / f"{name}.log"
    return Program(name, (*inside, *command), log, lambda: _succeeds(check))


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _give_pods_a_network(plane: ControlPlane, folder: Path) -> None:
    """Configure the pod network with the addresses that the cluster assigned to the node."""
    cluster = plane.cluster
    cluster.wait_for(f"node/{NAME}", "create")
    cluster.wait_for(f"node/{NAME}", "jsonpath={.spec.podCIDR}")
    addresses = cluster.get("node", NAME)["spec"]["podCIDR"]
    network = json.dumps(node_config.pod_network(addresses, folder))
    # containerd 1.6 notices a file that is written in this folder, but not one that is moved here.
    (node_config.network_folder(folder) / "10-pods.conflist").write_text(network)
    cluster.wait_for(f"node/{NAME}", "condition=Ready")


def _image_store(folder: Path) -> ImageStore:
    return ImageStore([system_tool("ctr"), f"--address={_socket(folder)}", "--namespace=k8s.io"])


def _socket(folder: Path) -> Path:
    return folder / "containerd.sock"


def head_process(pod: dict[str, Any]) -> int:
    """Return the process id on this machine of the head in a pod."""
    uid = pod["metadata"]["uid"]
    [found] = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _is_head(process) and uid in (process / "cgroup").read_text()
    ]
    return found


def _is_head(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"python\0-m\0tinkercloud_worker\0" in (process / "cmdline").read_bytes()
    return False
