"""The box in which a node runs: its namespaces, its control groups and its link to the network.

A box is a network, a mount and a process namespace that one process keeps open. When that process
ends for any reason, all processes, mounts and addresses of the box end with it.
"""

import contextlib
import functools
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import Program, system_tool
from tinkercloud_testing.cluster.nodes import node_config
from tinkercloud_testing.harness.waiting import wait_until

NODE_RANGE = "10.243.0.0/24"
"""The addresses of all nodes, and of their links."""
_CGROUPS = Path("/sys/fs/cgroup")
# With the default weight, all pods together would get the same CPU share as one process.
_WEIGHTS = {"cpu.shares": "16384", "cpu.weight": "1600"}
# Fixed paths of containerd, the CNI plugins and the kubelet; the box has its own.
_PRIVATE_FOLDERS = ("/run/containerd", "/var/lib/cni", "/var/log/containers")


@dataclass(frozen=True)
class Link:
    """The two ends of a cable: one in the box of a node, the other in its gateway."""

    device: str
    """The name of the end in the gateway."""
    gateway: str
    node: str
    """The addresses of the ends, which have a network of four addresses for themselves."""

    @property
    def network(self) -> str:
        """The network of the link."""
        head, _, last = self.node.rpartition(".")
        return f"{head}.{int(last) // 4 * 4}/30"


@contextlib.contextmanager
def a_box(folder: Path) -> Iterator[Program]:
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


def inside(box: Program) -> tuple[str, ...]:
    """Return the prefix of a command that runs in the box."""
    return (system_tool("nsenter"), f"--target={_first_pid(box)}", "--net", "--mount", "--pid")


def in_network(box: Program) -> tuple[str, ...]:
    """Return the prefix of a command of this machine that runs in the network of the box."""
    return (system_tool("nsenter"), f"--target={_first_pid(box)}", "--net")


def _first_pid(box: Program) -> str:
    assert box.process is not None
    pid = box.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def connect(box: Program, link: Link, gateway: Sequence[str], *routes: str) -> None:
    """Give a box its network.

    Args:
        box: the box.
        link: its link.
        gateway: the prefix of a command that runs in the network of the gateway; none on this
            machine.
        routes: networks that the gateway reaches through the box.
    """
    ip = system_tool("ip")
    in_gateway = (
        f"link add {link.device} type veth peer name eth0 netns {_first_pid(box)}",
        f"address add {link.gateway}/30 dev {link.device}",
        f"link set {link.device} up",
        *(f"route add {each} via {link.node}" for each in routes),
    )
    in_box = (
        f"address add {link.node}/30 dev eth0",
        "link set eth0 up",
        f"route add default via {link.gateway}",
    )
    for command in in_gateway:
        subprocess.run([*gateway, ip, *command.split()], check=True)
    for command in in_box:
        subprocess.run([*inside(box), ip, *command.split()], check=True)
    # Services are reachable from pods of the same bridge only if iptables sees bridged packets.
    settings = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
    script = "; ".join(f"echo 1 > /proc/sys/{setting}" for setting in settings)
    subprocess.run([*inside(box), system_tool("bash"), "-ec", script], check=True)


@contextlib.contextmanager
def a_cgroup(name: str) -> Iterator[None]:
    """Create the control group of all pods of a node in every hierarchy."""
    for hierarchy in _hierarchies():
        group = hierarchy / node_config.cgroup(name)
        group.mkdir()
        for setting, weight in _WEIGHTS.items():
            if (group / setting).exists():
                (group / setting).write_text(weight)
    try:
        yield
    finally:
        remove_cgroups(name)


def _hierarchies() -> Sequence[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def remove_cgroups(name: str) -> None:
    """Remove the control groups of a node, or those of all nodes with the name `*`.

    Those of a killed run are included, whose processes are ending.
    """
    pattern = node_config.cgroup(name)
    tops = [top for hierarchy in _hierarchies() for top in hierarchy.glob(pattern)]
    folders = [folder for top in tops for folder in (*top.rglob("*/"), top) if folder.exists()]
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        wait_until(functools.partial(_removed, folder), f"removal of {folder}")


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
