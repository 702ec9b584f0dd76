"""The properties of the test cluster that other tests rely on."""

import contextlib
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.image_build.images import USER, Image
from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.kube_api.client import Cluster, KubectlFailed
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT, KwokNodes
from tinkercloud_testing.cluster.nodes.node import HOST_ADDRESS, RealNode
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
FETCH = """
import sys, time, urllib.request

deadline = time.monotonic() + 120
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
"""


def a_config_map(name: str, namespace: str, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"]}
        metadata["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"]}]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def a_fake_pod_template(gpus: int) -> dict[str, Any]:
    """Return a template whose pods require the node `gpu-a`."""
    limits = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}
    ray = {"name": "ray", "image": "ray", "resources": {"limits": limits}}
    node = {"kubernetes.io/hostname": "gpu-a"}
    return {"spec": {"containers": [ray], **PLACEMENT, "nodeSelector": node}}


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


def a_restricted_pod(*command: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": program_image("api-server").name,
        "imagePullPolicy": "Never",
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"securityContext": security, "containers": [container]}


def a_web_server(namespace: str) -> list[dict[str, Any]]:
    pod = a_restricted_pod("python", "-m", "http.server", "8080", "--directory=/opt/tinkercloud")
    pod["containers"][0]["readinessProbe"] = {"httpGet": {"port": 8080}, "periodSeconds": 1}
    labels, metadata = {"app": "web"}, {"name": "web", "namespace": namespace}
    template = {"metadata": {"labels": labels}, "spec": pod}
    deployment = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    service = {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    ]


def a_pod(name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    whole = {**spec, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def fetching(url: str) -> tuple[str, ...]:
    """Return a command that prints the content of a URL, and retries until the network is ready."""
    return ("python", "-c", FETCH, url)


def content_of(url: str) -> bytes:
    """Return the content of a URL, or nothing if there is no response."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(url, timeout=10) as answer,
    ):
        return bytes(answer.read())
    return b""


def answers(cluster: Cluster, pod: str, namespace: str) -> bool:
    try:
        return cluster.kubectl("exec", pod, f"--namespace={namespace}", "--", "echo", "a") == "a\n"
    except KubectlFailed:
        return False


def test_children_are_garbage_collected_with_their_owner(cluster: Cluster) -> None:
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("owner", namespace))
        owner = cluster.get("configmap", "owner", namespace)
        cluster.apply(a_config_map("child", namespace, owner))

        cluster.delete("configmap", "owner", namespace)

        cluster.wait_for("configmap/child", "delete", namespace)


def test_a_pod_that_violates_restricted_pod_security_is_rejected(cluster: Cluster) -> None:
    with (
        cluster.a_namespace(**RESTRICTED) as namespace,
        pytest.raises(KubectlFailed, match="violates PodSecurity"),
    ):
        cluster.kubectl("run", "careless", "--image=anything", f"--namespace={namespace}")


def test_a_service_account_has_only_the_rights_of_its_roles(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.a_namespace() as namespace:
        nobody = Cluster(cluster.kubeconfig_of("default", namespace, tmp_path))

        with pytest.raises(KubectlFailed, match="cannot list resource"):
            nobody.objects("pods", namespace)


@pytest.mark.long
def test_the_pods_of_a_raycluster_run_on_simulated_gpu_nodes(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes
) -> None:
    kwok.add("gpu-a", gpus=8)

    with cluster.a_namespace() as namespace:
        cluster.apply(a_raycluster("one", namespace, workers=2))

        cluster.wait_for("raycluster/one", "jsonpath={.status.state}=ready", namespace)
        pods = cluster.objects("pods", namespace, "ray.io/cluster=one")
        assert [pod["spec"]["nodeName"] for pod in pods] == ["gpu-a"] * 3


def test_a_pod_that_requests_more_gpus_than_exist_stays_unscheduled(
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


@pytest.fixture(scope="session")
def python_image(real_node: RealNode) -> Image:
    """Load an image with Python onto the node and return it."""
    image = program_image("api-server")
    real_node.load(image)
    return image


@pytest.mark.long
def test_a_deployment_runs_real_pods_that_reach_each_other_through_a_service(
    cluster: Cluster, python_image: Image
) -> None:
    with cluster.a_namespace(**RESTRICTED) as namespace:
        cluster.apply(*a_web_server(namespace))
        cluster.wait_for("deployment/web", "condition=Available", namespace)

        url = f"http://web.{namespace}.svc.cluster.local/pyvenv.cfg"
        cluster.apply(a_pod("visitor", namespace, a_restricted_pod(*fetching(url))))

        assert "home = " in cluster.output_of("visitor", namespace)


def test_a_service_is_reached_from_this_machine(
    cluster: Cluster, own_node: RealNode, python_image: Image
) -> None:
    with cluster.a_namespace(**RESTRICTED) as namespace:
        cluster.apply(*a_web_server(namespace))
        cluster.wait_for("deployment/web", "condition=Available", namespace)

        address = cluster.get("service", "web", namespace)["spec"]["clusterIP"]
        wait_until(lambda: b"home = " in content_of(f"http://{address}/pyvenv.cfg"), "the Service")


def test_a_pod_has_no_root_rights_and_a_read_only_root(
    cluster: Cluster, python_image: Image
) -> None:
    script = "import os, errno; print(os.getuid(), os.access('/opt/tinkercloud', os.W_OK))"
    with cluster.a_namespace(**RESTRICTED) as namespace:
        cluster.apply(a_pod("nobody", namespace, a_restricted_pod("python", "-c", script)))

        assert cluster.output_of("nobody", namespace).split() == [str(USER), "False"]


def test_a_pod_authenticates_to_the_api_server_with_its_own_token(
    cluster: Cluster, python_image: Image
) -> None:
    script = (
        "import ssl, urllib.request as r;"
        "own = '/var/run/secrets/kubernetes.io/serviceaccount/';"
        "tls = ssl.create_default_context(cafile=own + 'ca.crt');"
        "bearer = {'Authorization': 'Bearer ' + open(own + 'token').read()};"
        "asked = r.Request('https://kubernetes.default.svc/version', headers=bearer);"
        "print(r.urlopen(asked, context=tls, timeout=10).read().decode())"
    )
    with cluster.a_namespace(**RESTRICTED) as namespace:
        cluster.apply(a_pod("asker", namespace, a_restricted_pod("python", "-c", script)))

        assert '"gitVersion"' in cluster.output_of("asker", namespace)


def test_a_pod_reaches_a_server_of_this_machine(
    cluster: Cluster, own_node: RealNode, python_image: Image, tmp_path: Path
) -> None:
    (tmp_path / "greeting").write_text("from outside")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), f"--bind={HOST_ADDRESS}"]
    with (
        subprocess.Popen(
            [*command, f"--directory={tmp_path}"], stderr=subprocess.DEVNULL
        ) as server,
        cluster.a_namespace(**RESTRICTED) as namespace,
    ):
        fetch = a_restricted_pod(*fetching(f"http://{HOST_ADDRESS}:{port}/greeting"))
        cluster.apply(a_pod("visitor", namespace, fetch))

        try:
            assert cluster.output_of("visitor", namespace) == "from outside\n"
        finally:
            server.kill()


def test_pods_keep_running_while_a_killed_kubelet_restarts(
    cluster: Cluster, own_node: RealNode, python_image: Image
) -> None:
    with cluster.a_namespace(**RESTRICTED) as namespace:
        cluster.apply(a_pod("sleeper", namespace, a_restricted_pod("sleep", "1000")))
        cluster.wait_for("pod/sleeper", "condition=Ready", namespace)

        own_node.kubelet.kill()
        own_node.kubelet.start()

        wait_until(lambda: answers(cluster, "sleeper", namespace), "a command in the pod")
        [status] = cluster.get("pod", "sleeper", namespace)["status"]["containerStatuses"]
        assert status["restartCount"] == 0


def test_the_cluster_keeps_its_objects_through_an_outage_of_its_api(
    control_plane: ControlPlane,
) -> None:
    cluster = control_plane.cluster
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("kept", namespace))

        control_plane.api_server.kill()
        assert not cluster.is_healthy()
        control_plane.api_server.start()

        assert cluster.get("configmap", "kept", namespace)["metadata"]["name"] == "kept"


def test_a_killed_etcd_restarts_with_its_data(control_plane: ControlPlane) -> None:
    cluster = control_plane.cluster
    with cluster.a_namespace() as namespace:
        cluster.apply(a_config_map("kept", namespace))

        control_plane.etcd.kill()
        control_plane.etcd.start()
        control_plane.api_server.wait_until_ready()

        assert cluster.get("configmap", "kept", namespace)["metadata"]["name"] == "kept"
