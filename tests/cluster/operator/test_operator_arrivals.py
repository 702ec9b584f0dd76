"""Sessions that compete for GPUs on a real scheduler never block each other with partial sets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import PLACEMENT, KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until

CONTESTED = {"pool": "contested"}
SELECTED = {"nodeSelector": {**PLACEMENT["nodeSelector"], **CONTESTED}}
TRAINER: dict[str, Any] = {"backend": "megatron", "replicas": 2, "gpusPerReplica": 1}
SAMPLER: dict[str, Any] = {"backend": "sglang", "image": "sglang", "gpusPerReplica": 2}
OFFER: dict[str, Any] = {
    "trainer": TRAINER | {"placement": SELECTED},
    "sampler": SAMPLER | {"replicas": 1, "placement": SELECTED},
}
"""Half of the GPUs of the contested node for the trainers, half for an engine; the head is on any
simulated node."""


@pytest.fixture
def sessions(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path
) -> Iterator[Sessions]:
    install_definitions(cluster)
    kwok.add("contested-0", gpus=4, labels=CONTESTED)
    kwok.add("cores-0", gpus=0)
    with cluster.a_namespace("arrivals") as namespace:
        cluster.apply(a_base_model(namespace, **OFFER), *a_volume(namespace))
        kubeconfig = operator_account(cluster, namespace, cluster_folder)
        with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE):
            yield Sessions(cluster, namespace)
            cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=90s")


@pytest.mark.long
def test_sessions_that_need_half_of_the_gpus_each_are_served_one_after_the_other(
    sessions: Sessions,
) -> None:
    names = {"one", "two", "three"}
    for name in names:
        sessions.make(name)
    wait_until(lambda: any(sessions.reason(n) == "Ready" for n in names), "one is ready")
    [first] = [name for name in names if sessions.reason(name) == "Ready"]

    waiting = names - {first}
    wait_until(
        lambda: {sessions.reason(name) for name in waiting} == {"Unschedulable", "Queued"},
        "the second has pods without nodes, and the third has none",
    )
    [second] = [name for name in waiting if sessions.reason(name) == "Unschedulable"]
    [third] = waiting - {second}
    assert sessions.children(third, "rayclusters,pods") == []
    wait_until(
        lambda: f"{second} is next" in sessions.condition(third, "Ready")["message"],
        "the third names the second as the next, no longer the first",
    )

    for done, following in ((first, second), (second, third)):
        sessions.delete(done)
        sessions.wait_for(following, "condition=Ready")


def test_each_role_runs_on_the_nodes_of_its_placement(sessions: Sessions) -> None:
    sessions.make_ready("one")

    pods = sessions.cluster.objects("pods", sessions.namespace, "tinkercloud.dev/session=one")
    contested = {
        pod["metadata"]["labels"]["tinkercloud.dev/component"]
        for pod in pods
        if pod["spec"]["nodeSelector"].get("pool") == "contested"
    }
    assert contested == {"trainer", "sampler"}
    assert {
        pod["spec"]["nodeName"]
        for pod in pods
        if pod["metadata"]["labels"]["tinkercloud.dev/component"] != "head"
    } == {"contested-0"}
