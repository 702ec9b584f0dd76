"""The test cluster itself: what the other tests rely on when they use it."""

from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.client import Cluster, Refused
from tinkercloud_testing.cluster.control_plane import ControlPlane
from tinkercloud_testing.cluster.kuberay import KubeRay
from tinkercloud_testing.cluster.kwok import TOLERATION, KwokNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def a_config_map(name: str, namespace: str, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"]}
        metadata["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"]}]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def a_fake_pod_template(gpus: int) -> dict[str, Any]:
    limits = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}
    ray = {"name": "ray", "image": "ray", "resources": {"limits": limits}}
    return {"spec": {"containers": [ray], "tolerations": [TOLERATION]}}


def a_raycluster(name: str, namespace: str, workers: int) -> dict[str, Any]:
    group = {
        "groupName": "trainers",
        "replicas": workers,
        "minReplicas": workers,
        "maxReplicas": workers,
        "rayStartParams": {},
        "template": a_fake_pod_template(gpus=4),
    }
    head = {"rayStartParams": {}, "template": a_fake_pod_template(gpus=0)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"headGroupSpec": head, "workerGroupSpecs": [group]},
    }


def test_children_are_garbage_collected_with_their_owner(cluster: Cluster) -> None:
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("owner", namespace))
        owner = cluster.get("configmap", "owner", namespace)
        cluster.apply(a_config_map("child", namespace, owner))

        cluster.delete("configmap", "owner", namespace)

        cluster.wait_for("configmap/child", "delete", namespace)


def test_a_pod_that_breaks_restricted_pod_security_is_refused(cluster: Cluster) -> None:
    with (
        cluster.a_namespace(**RESTRICTED) as namespace,
        pytest.raises(Refused, match="violates PodSecurity"),
    ):
        cluster.kubectl("run", "careless", "--image=anything", f"--namespace={namespace}")


def test_a_service_account_may_do_nothing_that_no_role_allows(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.a_namespace() as namespace:
        nobody = Cluster(cluster.kubeconfig_of("default", namespace, tmp_path))

        with pytest.raises(Refused, match="cannot list resource"):
            nobody.objects("pods", namespace)


def test_a_raycluster_gets_its_pods_on_fake_gpu_nodes(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes
) -> None:
    kwok.add("gpu-a", gpus=8)

    with cluster.a_namespace() as namespace:
        cluster.apply(a_raycluster("one", namespace, workers=2))

        cluster.wait_for("raycluster/one", "jsonpath={.status.state}=ready", namespace)
        pods = cluster.objects("pods", namespace, "ray.io/cluster=one")
        assert [pod["spec"]["nodeName"] for pod in pods] == ["gpu-a"] * 3


def test_a_pod_that_wants_more_gpus_than_there_are_stays_unscheduled(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes
) -> None:
    kwok.add("gpu-a", gpus=8)

    with cluster.a_namespace() as namespace:
        cluster.apply(a_raycluster("greedy", namespace, workers=3))

        ready = "jsonpath={.status.readyWorkerReplicas}=2"
        cluster.wait_for("raycluster/greedy", ready, namespace)
        [waiting] = [
            pod["metadata"]["name"]
            for pod in cluster.objects("pods", namespace)
            if "nodeName" not in pod["spec"]
        ]
        unschedulable = "jsonpath={.status.conditions[0].reason}=Unschedulable"
        cluster.wait_for(f"pod/{waiting}", unschedulable, namespace)


def test_the_cluster_remembers_through_an_outage_of_its_api(control_plane: ControlPlane) -> None:
    cluster = control_plane.cluster
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("kept", namespace))

        control_plane.api_server.kill()
        assert not cluster.is_healthy()
        control_plane.api_server.start()

        assert cluster.get("configmap", "kept", namespace)["metadata"]["name"] == "kept"


def test_a_killed_etcd_comes_back_with_what_it_held(control_plane: ControlPlane) -> None:
    cluster = control_plane.cluster
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("kept", namespace))

        control_plane.etcd.kill()
        control_plane.etcd.start()
        control_plane.api_server.wait_until_ready()

        assert cluster.get("configmap", "kept", namespace)["metadata"]["name"] == "kept"
