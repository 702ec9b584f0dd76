"""A Kubernetes control plane of real programs on free local ports."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import (
    Program,
    accepts_connections,
    binary,
    build_folder,
)
from tinkercloud_testing.cluster.kube_api.certificates import Authority, new_key
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.harness.ports import free_port

SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
POD_RANGE = "10.244.0.0/16"
_COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
# The default rate limits of clients would slow down a thousand pods.
_FAST_CLIENT = ("--kube-api-qps=400", "--kube-api-burst=800")


@dataclass(frozen=True)
class ControlPlane:
    """etcd, API server, controller manager and scheduler, each a separate `Program`.

    Each may be stopped, killed and restarted at any time; etcd holds the state.
    """

    cluster: Cluster
    authority: Authority
    url: str
    etcd: Program
    api_server: Program
    controller_manager: Program
    scheduler: Program

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, in their startup order."""
        return (self.etcd, self.api_server, self.controller_manager, self.scheduler)

    def start(self) -> None:
        """Start all stopped programs, and wait until pods can be created."""
        for program in self.programs:
            program.start()
        self.cluster.wait_for("serviceaccount/default", "create")

    def kill(self) -> None:
        """Kill all programs."""
        for program in reversed(self.programs):
            program.kill()


@contextlib.contextmanager
def a_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Run a control plane with its state and its logs in a folder."""
    plane = _assemble(folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.kill()


def own_address() -> str:
    """Return the outgoing address of this machine, which its pods can reach, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _assemble(folder: Path) -> ControlPlane:
    build_folder(*_COMPONENTS)
    authority = Authority.create(folder / "pki")
    address, port = own_address(), free_port()
    url = f"https://{address}:{port}"
    admin = authority.kubeconfig(url, "admin", groups=["system:masters"])
    cluster = Cluster(admin)
    etcd_port = free_port()
    service_key = new_key(folder / "pki" / "service-accounts.key")
    return ControlPlane(
        cluster=cluster,
        authority=authority,
        url=url,
        etcd=_etcd(folder, authority, etcd_port),
        api_server=Program(
            "kube-apiserver",
            _api_server_command(authority, service_key, address, port, etcd_port),
            folder / "kube-apiserver.log",
            cluster.is_healthy,
        ),
        controller_manager=_controller_manager(folder, authority, url, service_key),
        scheduler=_scheduler(folder, authority, url),
    )


def _etcd(folder: Path, authority: Authority, port: int) -> Program:
    own = authority.issue("etcd", hosts=["127.0.0.1"])
    client, peer = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    command = (
        str(binary("etcd")),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--client-cert-auth",
        f"--trusted-ca-file={authority.certificate}",
        f"--cert-file={own.certificate}",
        f"--key-file={own.key}",
        # The folder is deleted after the run, so writes need not survive a power failure.
        "--unsafe-no-fsync",
    )
    return Program("etcd", command, folder / "etcd.log", lambda: accepts_connections(port))


def _api_server_command(
    authority: Authority, service_key: Path, address: str, port: int, etcd_port: int
) -> tuple[str, ...]:
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    own = authority.issue(
        "kube-apiserver",
        groups=["system:masters"],
        hosts=[*names, "127.0.0.1", address, KUBERNETES_SERVICE],
    )
    return (
        str(binary("kube-apiserver")),
        f"--etcd-servers=https://127.0.0.1:{etcd_port}",
        f"--etcd-cafile={authority.certificate}",
        f"--etcd-certfile={own.certificate}",
        f"--etcd-keyfile={own.key}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--tls-cert-file={own.certificate}",
        f"--tls-private-key-file={own.key}",
        f"--client-ca-file={authority.certificate}",
        f"--kubelet-certificate-authority={authority.certificate}",
        f"--kubelet-client-certificate={own.certificate}",
        f"--kubelet-client-key={own.key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={service_key}",
        f"--service-account-signing-key-file={service_key}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--anonymous-auth=false",
        "--enable-admission-plugins=NodeRestriction",
        # Reach webhooks of local programs without a kube-proxy.
        "--enable-aggregator-routing",
        "--profiling=false",
    )


def _controller_manager(folder: Path, authority: Authority, url: str, service_key: Path) -> Program:
    kubeconfig = authority.kubeconfig(url, "system:kube-controller-manager")
    command = (
        str(binary("kube-controller-manager")),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={service_key}",
        f"--root-ca-file={authority.certificate}",
        "--use-service-account-credentials",
        "--allocate-node-cidrs",
        f"--cluster-cidr={POD_RANGE}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--leader-elect=false",
        "--secure-port=0",
        # Heartbeats are late on a busy machine, which must not make a node NotReady.
        "--node-monitor-grace-period=1h",
        *_FAST_CLIENT,
    )
    return _unserved("kube-controller-manager", command, folder)


def _scheduler(folder: Path, authority: Authority, url: str) -> Program:
    kubeconfig = authority.kubeconfig(url, "system:kube-scheduler")
    command = (
        str(binary("kube-scheduler")),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        *_FAST_CLIENT,
    )
    return _unserved("kube-scheduler", command, folder)


def _unserved(name: str, command: tuple[str, ...], folder: Path) -> Program:
    """Return a program without a port, which counts as ready immediately."""
    return Program(name, command, folder / f"{name}.log", lambda: True)
