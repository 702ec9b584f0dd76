"""What `tinkercloud cluster check` reads of a cluster that is ready for the chart."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinkercloud_api.cluster_check.findings import ClusterFacts
from tinkercloud_crds.generate import KINDS, definition

NAMESPACE = "research"
Manifest = dict[str, Any]


def a_node(
    name: str = "one", gpus: int = 0, taint: str = "", labels: Mapping[str, str] | None = None
) -> Manifest:
    """Return a node that is ready."""
    spec = {"taints": [{"key": taint, "effect": "NoSchedule"}]} if taint else {}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **(labels or {})}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {},
        },
    }


def a_class(name: str, provisioner: str, *, is_default: bool = False) -> Manifest:
    """Return a StorageClass."""
    annotations = {"storageclass.kubernetes.io/is-default-class": str(is_default).lower()}
    metadata = {"name": name, "annotations": annotations}
    return {"metadata": metadata, "provisioner": provisioner}


def a_deployment(name: str, namespace: str, image: str, **labels: str) -> Manifest:
    """Return a Deployment with a pod that is ready."""
    container = {"name": name, "image": image, "args": []}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": 1},
    }


def served_schemas() -> dict[str, Manifest]:
    """Return the schemas of our own kinds, and of a RayCluster that accepts every field."""
    found = {"RayCluster": {"properties": {"spec": {"type": "object"}}}}
    for kind in KINDS:
        [version] = definition(kind)["spec"]["versions"]
        found[kind.kind] = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    return found


def a_ready_cluster(**changes: Any) -> ClusterFacts:
    """Return the facts of a ready cluster, with some of them changed."""
    kuberay = a_deployment("kuberay-operator", "kuberay", "quay.io/kuberay/operator:v1.6.2")
    facts = ClusterFacts(
        url="https://cluster.example.com",
        version="v1.36.4",
        apis=frozenset({"apis/ray.io/v1", "apis/tinkercloud.dev/v1alpha1"}),
        schemas=served_schemas(),
        namespace=NAMESPACE,
        namespaces=[{"metadata": {"name": NAMESPACE}}],
        nodes=[a_node()],
        storage_classes=[a_class("nfs", "nfs.csi.k8s.io", is_default=True)],
        operators=[kuberay],
        deployments=[],
        pods=[],
        claims=[],
        queues=[],
        secrets={},
        config_maps={},
        denied=frozenset(),
    )
    return replace(facts, **changes)
