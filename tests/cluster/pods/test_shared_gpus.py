"""Engines in trainer pods: a real scheduler allocates devices of simulated nodes to claims.

What runs in such pods, and what it does to a GPU that it shares, is not shown here.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp.web import BaseRequest, StreamResponse

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    SOON_SECONDS,
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.faulty_api import Forward, refusing
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE, a_world
from tinkercloud_testing.harness.waiting import wait_until

DRIVER = "gpu.example.com"
NODE = "devices-0"
GPUS = 4
OF_DEVICES = "resourceclaimtemplates,resourceclaims"
COLOCATED: dict[str, Any] = {
    "trainer": {"backend": "megatron", "replicas": 2, "gpusPerReplica": 2},
    "sampler": {
        "backend": "sglang",
        "colocated": True,
        "replicas": 4,
        "gpusPerReplica": 1,
        "image": "sglang",
        "engines": {"deviceClassName": DRIVER},
    },
}
"""The number of GPUs of the node."""


def a_device_class() -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }


def gpus_of_the_node() -> dict[str, Any]:
    """Return the ResourceSlice that a DRA driver would publish for the GPUs of the node."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{NODE}-gpus"},
        "spec": {
            "driver": DRIVER,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{number}"} for number in range(GPUS)],
        },
    }


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Iterator[str]:
    install_definitions(cluster)
    kwok.add(NODE, gpus=0)
    cluster.apply(a_device_class(), gpus_of_the_node())
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    with cluster.a_namespace("devices", **restricted) as name:
        cluster.apply(a_base_model(name, **COLOCATED), *a_volume(name))
        yield name
    cluster.delete("deviceclass", DRIVER)


@pytest.fixture(scope="module")
def operator(cluster: Cluster, namespace: str, cluster_folder: Path) -> Iterator[RunningOperator]:
    kubeconfig = operator_account(cluster, namespace, cluster_folder)
    with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE) as running:
        yield running


def trainer_pods(sessions: Sessions, name: str) -> Sequence[dict[str, Any]]:
    selector = f"tinkercloud.dev/session={name},tinkercloud.dev/component=trainer"
    return sessions.cluster.objects("pods", sessions.namespace, selector)


def claim_of(sessions: Sessions, pod: dict[str, Any]) -> dict[str, Any]:
    [made] = pod["status"]["resourceClaimStatuses"]
    return sessions.cluster.get("resourceclaim", made["resourceClaimName"], sessions.namespace)


def test_each_trainer_pod_is_bound_to_a_node_with_gpus_that_all_its_containers_share(
    sessions: Sessions,
) -> None:
    sessions.make_ready("one")

    pods = trainer_pods(sessions, "one")
    claims = [claim_of(sessions, pod) for pod in pods]
    devices = [
        (device["pool"], device["device"])
        for claim in claims
        for device in claim["status"]["allocation"]["devices"]["results"]
    ]
    assert sorted(devices) == [(NODE, f"gpu-{number}") for number in range(GPUS)]
    for pod, claim in zip(pods, claims, strict=True):
        assert pod["spec"]["nodeName"] == NODE
        assert [user["uid"] for user in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
        assert len(claim["status"]["allocation"]["devices"]["results"]) == 2
        containers = {item["name"]: item["resources"] for item in pod["spec"]["containers"]}
        assert containers.keys() == {"worker", "engine-0", "engine-1"}
        [named] = pod["spec"]["resourceClaims"]
        assert all(item["claims"] == [{"name": named["name"]}] for item in containers.values())
    status = sessions.status("one")
    assert (status["workers"]["trainers"], status["workers"]["samplers"]) == ("2/2", "4/4")
    assert status["gpus"] == GPUS


def test_a_session_waits_for_claimed_gpus_and_gets_them_when_the_other_session_ends(
    sessions: Sessions,
) -> None:
    sessions.make_ready("first")

    sessions.make("second", trainer={"replicas": 1})
    sessions.wait_for_reason("second", "Unschedulable")

    assert "claim" in sessions.condition("second", "Ready")["message"]
    assert sessions.status("second")["gpus"] == 2
    sessions.delete("first")
    sessions.wait_for("second", "condition=Ready")
    assert sessions.status("second")["workers"]["samplers"] == "2/2"


def test_the_claim_template_is_recreated_and_is_deleted_with_its_session(
    sessions: Sessions,
) -> None:
    sessions.make_ready("one")
    [template] = sessions.cluster.objects("resourceclaimtemplates", sessions.namespace)
    name, uid = template["metadata"]["name"], template["metadata"]["uid"]

    sessions.cluster.delete("resourceclaimtemplate", name, sessions.namespace)

    def is_back() -> bool:
        found = sessions.cluster.objects("resourceclaimtemplates", sessions.namespace)
        return [item["metadata"]["name"] for item in found if item["metadata"]["uid"] != uid] == [
            name
        ]

    wait_until(is_back, "the template is back", SOON_SECONDS)
    assert sessions.reason("one") == "Ready"
    sessions.delete("one")
    sessions.wait_until_nothing_is_left("one")
    wait_until(
        lambda: not sessions.cluster.objects(OF_DEVICES, sessions.namespace),
        "no claim and no template is left",
        SOON_SECONDS,
    )


def test_a_cluster_without_device_claims_serves_sessions_that_need_none(
    cluster: Cluster, namespace: str, kwok: KwokNodes, cluster_folder: Path
) -> None:
    kwok.add("older-0", gpus=8)
    asked: set[str] = set()

    async def older(request: BaseRequest, forward: Forward) -> StreamResponse:
        if not request.path.startswith("/apis/resource.k8s.io/"):
            return await forward()
        asked.add(request.path)
        return await refusing(404)(request, forward)

    with a_world(cluster, cluster_folder, "older") as world, world.api.failing(older):
        shared = a_base_model(world.sessions.namespace, "shared", modelName="Shared", **COLOCATED)
        cluster.apply(shared)
        world.operator.program.start()
        world.sessions.make_ready("needs-none")
        world.sessions.make("needs-some", baseModel="Shared")
        world.sessions.wait_for_reason("needs-some", "ApplyFailed")

        message = world.sessions.condition("needs-some", "Stalled")["message"]
        assert (
            "BaseModel's sampler.engines.deviceClassName requires it; upgrade to Kubernetes 1.34"
            in message
        )
        assert world.sessions.children("needs-some") == []
    assert asked == {"/apis/resource.k8s.io/v1"}
