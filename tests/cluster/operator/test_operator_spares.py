"""Warm spares: the operator on a real control plane with KubeRay; pods are simulated."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    a_session,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("spares-0", gpus=8)
    return cluster


@pytest.fixture(scope="module")
def namespace(definitions: Cluster) -> Iterator[str]:
    with definitions.a_namespace("spares") as name:
        definitions.apply(*a_volume(name))
        yield name


@pytest.fixture(scope="module")
def operator(
    definitions: Cluster, namespace: str, cluster_folder: Path
) -> Iterator[RunningOperator]:
    kubeconfig = operator_account(definitions, namespace, cluster_folder)
    with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE) as running:
        yield running


@pytest.fixture
def sessions(cluster: Cluster, namespace: str, operator: RunningOperator) -> Iterator[Sessions]:
    """Return the sessions of the file's namespace; none remains after a test."""
    yield Sessions(cluster, namespace)
    where = ("--all", "-n", namespace, "--timeout=120s")
    cluster.kubectl("delete", "basemodels", *where)
    cluster.kubectl("delete", "trainingsessions", *where)
    sys.stdout.write(operator.program.log_tail())


def offer(sessions: Sessions, warm_spares: int) -> None:
    """Offer a BaseModel with spares."""
    sessions.cluster.apply(a_base_model(sessions.namespace, warmSpares=warm_spares))


def create(sessions: Sessions, name: str, **spec: object) -> None:
    """Create a run of a client."""
    run = a_session(sessions.namespace, name, modelId=f"{name}:train:0")
    run["metadata"]["annotations"] = {"tinkercloud.dev/created-for": f"{name}:train:0"}
    run["spec"] |= spec
    sessions.cluster.apply(run)


def spares(sessions: Sessions) -> dict[str, str]:
    """Return the kind of the owner of each spare, by the spare's name."""
    return {
        each["metadata"]["name"]: each["metadata"]["ownerReferences"][0]["kind"]
        for each in sessions.cluster.objects("trainingsessions", sessions.namespace)
        if each["spec"]["role"] == "Spare"
    }


def wait_for_free(sessions: Sessions, number: int) -> list[str]:
    """Wait until a number of ready spares is free, and return them."""

    def free() -> list[str]:
        return [name for name, owner in spares(sessions).items() if owner == "BaseModel"]

    wait_until(lambda: len(free()) == number, f"{number} free spares", SOON_SECONDS)
    for name in free():
        sessions.wait_for(name, "condition=Ready")
    return free()


def cluster_of(sessions: Sessions, name: str) -> str | None:
    spec = sessions.cluster.get("trainingsession", name, sessions.namespace)["spec"]
    found: str | None = spec.get("poolCluster")
    return found


def spares_status(sessions: Sessions) -> dict[str, Any]:
    found = sessions.cluster.get("basemodel", "qwen3-8b", sessions.namespace)
    status: dict[str, Any] = found.get("status", {}).get("spares", {})
    return status


def test_a_session_takes_over_a_spare_which_is_replaced_and_never_used_again(
    sessions: Sessions,
) -> None:
    offer(sessions, warm_spares=1)
    [spare] = wait_for_free(sessions, 1)
    head = sessions.status(spare)["incarnation"]

    create(sessions, "one")
    sessions.wait_for("one", "condition=Ready")

    assert cluster_of(sessions, "one") == spare
    assert sessions.status("one")["incarnation"] == head
    assert sessions.status("one")["endpoint"] == sessions.status(spare)["endpoint"]
    assert not [child for child in sessions.children("one") if child.startswith("RayCluster/")]
    assert spares(sessions)[spare] == "TrainingSession"
    [next_spare] = wait_for_free(sessions, 1)
    wait_until(lambda: spares_status(sessions).get("taken") == 1, "counted", SOON_SECONDS)
    wait_until(lambda: spares_status(sessions)["summary"] == "1/1", "one ready", SOON_SECONDS)
    table = sessions.cluster.kubectl("get", "basemodels", "-n", sessions.namespace)
    header, row = table.splitlines()
    assert row[header.index("SPARES") :].startswith("1/1")

    sessions.delete("one")

    wait_until(lambda: [*spares(sessions)] == [next_spare], "the used one gone", SOON_SECONDS)
    offer(sessions, warm_spares=0)
    wait_until(lambda: not spares(sessions), "no spare left", SOON_SECONDS)


def test_two_sessions_at_once_share_no_spare(sessions: Sessions) -> None:
    offer(sessions, warm_spares=1)
    [spare] = wait_for_free(sessions, 1)

    create(sessions, "one")
    create(sessions, "two")
    for name in ("one", "two"):
        sessions.wait_for(name, "condition=Ready")

    served = [cluster_of(sessions, name) for name in ("one", "two")]
    assert served[0] == spare
    assert served[1] != spare
    assert sessions.status("one")["incarnation"] != sessions.status("two")["incarnation"]


def test_a_session_of_another_shape_and_one_without_a_spare_start_their_own_pods(
    sessions: Sessions,
) -> None:
    offer(sessions, warm_spares=1)
    [spare] = wait_for_free(sessions, 1)

    create(sessions, "small", trainer={"replicas": 1})
    sessions.wait_for("small", "condition=Ready")

    assert cluster_of(sessions, "small") is None
    assert "RayCluster/small" in sessions.children("small")
    assert spares(sessions) == {spare: "BaseModel"}


def test_a_suspended_session_gives_its_spare_up_and_resumes_with_pods_of_its_own(
    sessions: Sessions,
) -> None:
    offer(sessions, warm_spares=1)
    [spare] = wait_for_free(sessions, 1)
    create(sessions, "one")
    sessions.wait_for("one", "condition=Ready")
    offer(sessions, warm_spares=0)
    patch = '--patch={"spec":{"suspend":true}}'
    where = ("-n", sessions.namespace, "--type=merge")

    sessions.cluster.kubectl("patch", "tsess", "one", patch, *where)
    wait_until(lambda: spare not in spares(sessions), "the spare gone", SOON_SECONDS)
    sessions.wait_for("one", "condition=Suspended")
    sessions.cluster.kubectl("patch", "tsess", "one", patch.replace("true", "false"), *where)
    sessions.wait_for("one", "condition=Ready")

    assert cluster_of(sessions, "one") is None
    assert "RayCluster/one" in sessions.children("one")


def test_spares_make_room_for_a_session_that_waits_for_quota(sessions: Sessions) -> None:
    offer(sessions, warm_spares=2)
    wait_for_free(sessions, 2)
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": sessions.namespace},
        "spec": {"hard": {"requests.nvidia.com/gpu": 7}},
    }
    sessions.cluster.apply(quota)
    try:
        create(sessions, "small", trainer={"replicas": 1})
        sessions.wait_for("small", "condition=Ready")
    finally:
        sessions.cluster.kubectl("delete", "resourcequota", "gpus", "-n", sessions.namespace)

    assert sessions.status("small")["gpus"] == 2
    wait_for_free(sessions, 2)
