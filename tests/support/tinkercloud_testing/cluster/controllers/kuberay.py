"""The KubeRay operator as a local process, with the rights of its own chart."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import (
    Program,
    accepts_connections,
    build_folder,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.harness.ports import free_port

_NAMESPACE = "kuberay-system"
_ACCOUNT = "kuberay-operator"
_ROLE = "kuberay-operator"


@dataclass(frozen=True)
class KubeRay:
    """A running KubeRay operator; `operator` may be killed and started again."""

    operator: Program


@contextlib.contextmanager
def a_kuberay_operator(cluster: Cluster, folder: Path) -> Iterator[KubeRay]:
    """Install KubeRay's resource definitions and run its operator."""
    built = build_folder("ray-operator")
    install_definitions(cluster)
    cluster.apply_text((built / "share" / "kuberay" / "role.yaml").read_text())
    cluster.apply(*_account())
    kubeconfig = cluster.kubeconfig_of(_ACCOUNT, _NAMESPACE, folder)
    port = free_port()
    command = (
        str(built / "bin" / "ray-operator"),
        f"--kubeconfig={kubeconfig}",
        "--enable-leader-election=false",
        "--reconcile-concurrency=4",
        "--metrics-addr=0",
        f"--health-probe-bind-address=127.0.0.1:{port}",
    )
    log = folder / "ray-operator.log"
    kuberay = KubeRay(Program("ray-operator", command, log, lambda: accepts_connections(port)))
    try:
        kuberay.operator.start()
        yield kuberay
    finally:
        kuberay.operator.kill()


def install_definitions(cluster: Cluster) -> None:
    """Apply KubeRay's resource definitions and wait until they are served."""
    share = build_folder("ray-operator") / "share" / "kuberay"
    definitions = sorted(share.glob("ray.io_*.yaml"))
    cluster.apply_text("\n---\n".join(path.read_text() for path in definitions))
    cluster.wait_until_established("rayclusters.ray.io")


def _account() -> list[dict[str, object]]:
    """Return the operator's namespace, its service account and the binding of its role."""
    subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": _NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": _ROLE}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": _ACCOUNT, "namespace": _NAMESPACE},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": _ROLE},
            "roleRef": role,
            "subjects": [subject],
        },
    ]
