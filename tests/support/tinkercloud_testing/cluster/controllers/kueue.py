"""Kueue as a local process, installed like its own chart does.

It only admits RayClusters of namespaces with its label: after it has stopped, its webhooks would
make requests of other tests fail.
"""

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

from tinkercloud_testing.cluster.image_build.programs import Program, build_folder
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane, own_address
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.charts import helm

QUEUES_LABEL = "queues"
"""Kueue's webhooks apply to namespaces with this label, of any value."""
_NAMESPACE = "kueue-system"
_ACCOUNT = "kueue-controller-manager"
_SERVICE = "kueue-webhook-service"
_SECRET = "kueue-webhook-server-cert"
_API = "kueue.x-k8s.io/v1beta2"
_INSTALLED = frozenset(
    {
        "CustomResourceDefinition",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "Secret",
        "MutatingWebhookConfiguration",
        "ValidatingWebhookConfiguration",
    }
)
"""The kinds to install; the other objects of the chart belong to its pod and to a second API."""
_JOBS = "raycluster.kb.io"
_OWN = ("clusterqueue", "cohort", "resourceflavor", "workload")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kueue:
    """A running Kueue."""

    cluster: Cluster
    manager: Program

    def offer(self, namespace: str, *, gpus: int, **flavor: object) -> None:
        """Create or change the queue `gpus` of a namespace, with a quota of GPUs.

        Args:
            namespace: the namespace of the LocalQueue, and the name of the ClusterQueue.
            gpus: the quota.
            flavor: fields for admitted pods: `nodeLabels`, `tolerations`.
        """
        amounts = {"nvidia.com/gpu": str(gpus), "cpu": "1000", "memory": "10Ti"}
        resources = [{"name": name, "nominalQuota": most} for name, most in amounts.items()]
        group = {
            "coveredResources": list(amounts),
            "flavors": [{"name": namespace, "resources": resources}],
        }
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [group],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        self.cluster.apply(
            _object("ResourceFlavor", namespace, flavor),
            _object("ClusterQueue", namespace, spec),
            _object("LocalQueue", "gpus", {"clusterQueue": namespace}, namespace),
        )


def _object(
    kind: str, name: str, spec: Mapping[str, object], namespace: str | None = None
) -> Manifest:
    place = {} if namespace is None else {"namespace": namespace}
    metadata = {"name": name, **place}
    return {"apiVersion": _API, "kind": kind, "metadata": metadata, "spec": dict(spec)}


@contextlib.contextmanager
def a_kueue(plane: ControlPlane, folder: Path) -> Iterator[Kueue]:
    """Install Kueue and run it; its webhooks are deleted afterwards."""
    cluster, folder = plane.cluster, folder / "kueue"
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    webhooks, health = free_port(), free_port()
    objects = _rendered()
    hooks = [item for item in objects if item["kind"].endswith("WebhookConfiguration")]
    cluster.apply(_namespace(), *_service(webhooks))
    cluster.apply(*objects)
    config = folder / "config.json"
    config.write_text(json.dumps(_config(webhooks, health, certificates)))
    kubeconfig = cluster.kubeconfig_of(_ACCOUNT, _NAMESPACE, folder)
    command = (
        str(build_folder("kueue") / "bin" / "kueue"),
        f"--config={config}",
        f"--kubeconfig={kubeconfig}",
        "--feature-gates=VisibilityOnDemand=false",
    )
    manager = Program("kueue", command, folder / "kueue.log", lambda: _is_ready(health))
    try:
        manager.launch()
        _mount(cluster, certificates)
        manager.wait_until_ready()
        yield Kueue(cluster, manager)
    finally:
        for hook in hooks:
            cluster.delete(hook["kind"], hook["metadata"]["name"])
        manager.kill()


def _rendered() -> list[Manifest]:
    """Return the objects of Kueue's chart to install."""
    chart = build_folder("kueue") / "share" / "kueue" / "kueue"
    version = ("--kube-version", "1.36.0")
    rendered = helm("template", "kueue", str(chart), f"--namespace={_NAMESPACE}", *version)
    objects = [item for item in yaml.safe_load_all(rendered) if item]
    return [_limited(item) for item in objects if item["kind"] in _INSTALLED]


def _limited(item: Manifest) -> Manifest:
    """Return an object of the chart, with only the webhooks for queues and RayClusters."""
    if "webhooks" not in item:
        return item
    served = tuple(f"{letter}{name}.kb.io" for letter in "mv" for name in _OWN)
    kept = [hook for hook in item["webhooks"] if hook["name"] in served]
    labelled = {"matchExpressions": [{"key": QUEUES_LABEL, "operator": "Exists"}]}
    kept += [
        hook | {"namespaceSelector": labelled}
        for hook in item["webhooks"]
        if hook["name"].endswith(_JOBS)
    ]
    return item | {"webhooks": kept}


def _config(webhooks: int, health: int, certificates: Path) -> Manifest:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": _NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": webhooks, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": _SERVICE,
            "webhookSecretName": _SECRET,
        },
        "clientConnection": {"qps": 300, "burst": 500},
        "integrations": {"frameworks": ["ray.io/raycluster"]},
    }


def _namespace() -> Manifest:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}}


def _service(port: int) -> tuple[Manifest, Manifest]:
    """Return the Service of the webhooks, with this machine as its endpoint."""
    metadata = {"name": _SERVICE, "namespace": _NAMESPACE}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
    }
    slices = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata | {"labels": {"kubernetes.io/service-name": _SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [own_address()], "conditions": {"ready": True}}],
    }
    return service, slices


def _mount(cluster: Cluster, folder: Path) -> None:
    """Write the certificate that Kueue has created to its folder, like a kubelet."""
    wait_until(lambda: bool(_certificate(cluster)), "Kueue's certificate")
    for name, content in _certificate(cluster).items():
        (folder / name).write_bytes(base64.b64decode(content))


def _certificate(cluster: Cluster) -> Mapping[str, str]:
    data: Mapping[str, str] = cluster.get("secret", _SECRET, _NAMESPACE).get("data", {})
    return data


def _is_ready(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer,
    ):
        return bool(answer.status == 200)
    return False
