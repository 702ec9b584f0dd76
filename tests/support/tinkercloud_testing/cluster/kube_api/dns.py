"""DNS of the real cluster: CoreDNS in a pod, at the address that pods query."""

from typing import Any

from tinkercloud_testing.cluster.image_build.images import Image, LayerCache, add_bytes, one_program
from tinkercloud_testing.cluster.image_build.programs import build_folder, layer_folder
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.node_config import CLUSTER_DNS

_NAMESPACE = "kube-system"
_NAME = "coredns"
_PORT = 8053
_LABELS = {"k8s-app": "kube-dns"}
# No forwarding: other names do not resolve in the cluster.
_COREFILE = f"""
.:{_PORT} {{
    errors
    ready :8181
    kubernetes cluster.local in-addr.arpa {{
        pods insecure
        ttl 1
    }}
    reload
}}
"""


def dns_image() -> Image:
    """Return the image of CoreDNS, which contains only the program."""
    folder = build_folder("coredns")
    program = (folder / "bin" / "coredns").read_bytes()
    layers = LayerCache(layer_folder())
    layer = layers.layer(
        f"coredns {folder.name}", lambda tar: add_bytes(tar, "coredns", program, 0o755)
    )
    return one_program("tinkercloud.test/coredns:test", layer, "/coredns")


def install_dns(cluster: Cluster) -> None:
    """Run CoreDNS and wait until it is available."""
    cluster.apply(*_rights(), _settings(), _deployment(), _service())
    cluster.wait_for(f"deployment/{_NAME}", "condition=Available", _NAMESPACE)


def _metadata(name: str = _NAME) -> dict[str, Any]:
    return {"name": name, "namespace": _NAMESPACE}


def _rights() -> list[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    names = {"apiGroups": [""], "resources": ["services", "pods", "namespaces"]}
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    verbs = {"verbs": ["list", "watch"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata()},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": _NAME},
            "rules": [{**names, **verbs}, {**slices, **verbs}],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": _NAME},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": _NAME},
            "subjects": [{"kind": "ServiceAccount", "name": _NAME, "namespace": _NAMESPACE}],
        },
    ]


def _settings() -> dict[str, Any]:
    data = {"Corefile": _COREFILE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(), "data": data}


def _deployment() -> dict[str, Any]:
    container = {
        "name": _NAME,
        "image": dns_image().name,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": _NAME,
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": _NAME}}],
        # It serves DNS, so it does not use any.
        "dnsPolicy": "Default",
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(),
        "spec": {
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": pod},
        },
    }


def _service() -> dict[str, Any]:
    ports = [
        {"name": protocol.lower(), "protocol": protocol, "port": 53, "targetPort": _PORT}
        for protocol in ("UDP", "TCP")
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata("kube-dns"),
        "spec": {"clusterIP": CLUSTER_DNS, "selector": _LABELS, "ports": ports},
    }
