"""Pools of clusters: the operator on a real control plane with KubeRay; pods are simulated."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_crds.idle_gpus import IdleGpus
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

POOL = {
    "minClusters": 1,
    "maxClusters": 2,
    "slotsPerCluster": 2,
    "scaleUpAfterSeconds": 0,
    "scaleDownAfterSeconds": 0,
}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("pools-0", gpus=32)
    return cluster


@pytest.fixture(scope="module")
def namespace(definitions: Cluster) -> Iterator[str]:
    with definitions.a_namespace("pools") as name:
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
    """Return the sessions of the file's namespace, whose pools end with each test."""
    yield Sessions(cluster, namespace)
    where = ("--all", "-n", namespace, "--timeout=120s")
    cluster.kubectl("delete", "basemodels", *where)
    cluster.kubectl("delete", "trainingsessions", *where)
    sys.stdout.write(operator.program.log_tail())


def offer(sessions: Sessions, **pool: int) -> None:
    """Offer a BaseModel with a pool."""
    shared: dict[str, Any] = {"sharing": "Shared", "pool": POOL | pool}
    sessions.cluster.apply(a_base_model(sessions.namespace, **shared))


def share(sessions: Sessions, *names: str, **spec: object) -> None:
    """Create runs that share clusters."""
    for name in names:
        run = a_session(sessions.namespace, name, sharing="Shared", modelId=f"{name}:train:0")
        run["metadata"]["annotations"] = {"tinkercloud.dev/created-for": f"{name}:train:0"}
        run["spec"] |= spec
        sessions.cluster.apply(run)


def clusters(sessions: Sessions) -> list[str]:
    found = sessions.cluster.objects("trainingsessions", sessions.namespace)
    return [item["metadata"]["name"] for item in found if item["spec"]["role"] == "Pool"]


def place(sessions: Sessions, name: str) -> str | None:
    spec = sessions.cluster.get("trainingsession", name, sessions.namespace)["spec"]
    found: str | None = spec.get("poolCluster")
    return found


def pool_status(sessions: Sessions) -> dict[str, Any]:
    found = sessions.cluster.get("basemodel", "qwen3-8b", sessions.namespace)
    status: dict[str, Any] = found.get("status", {}).get("pool", {})
    return status


def wait_for_clusters(sessions: Sessions, number: int) -> list[str]:
    wait_until(lambda: len(clusters(sessions)) == number, f"{number} clusters", SOON_SECONDS)
    return clusters(sessions)


def test_runs_of_several_owners_share_the_pods_of_one_cluster(sessions: Sessions) -> None:
    offer(sessions)
    [cluster] = wait_for_clusters(sessions, 1)
    sessions.wait_for(cluster, "condition=Ready")

    share(sessions, "one")
    share(sessions, "two", owner="bob")
    for name in ("one", "two"):
        sessions.wait_for(name, "condition=Ready")

    assert [place(sessions, name) for name in ("one", "two")] == [cluster] * 2
    assert [sessions.children(name) for name in ("one", "two")] == [[], []]
    assert f"RayCluster/{cluster}" in sessions.children(cluster)
    assert sessions.status("one")["endpoint"] == sessions.status(cluster)["endpoint"]
    assert sessions.status(cluster)["workers"]["trainers"] == "2/2"
    assert (sessions.status("one")["gpus"], sessions.status(cluster)["gpus"]) == (0, 3)
    wait_until(lambda: pool_status(sessions).get("models") == 2, "both counted", SOON_SECONDS)
    # Stored as written: a difference would be written again and again.
    stored = sessions.cluster.get("basemodel", "qwen3-8b", sessions.namespace)["status"]["idle"]
    assert stored == IdleGpus().model_dump(by_alias=True)
    table = sessions.cluster.kubectl("get", "basemodels", "-n", sessions.namespace)
    header, row = table.splitlines()
    # A column may be empty.
    columns = list(re.finditer(r"\S+\s*", header))
    shown = {each.group().strip(): row[slice(*each.span())].strip() for each in columns}
    assert (shown["CLUSTERS"], shown["SLOTS"]) == ("1/1", "2/2")
    listed = sessions.cluster.kubectl("get", "tsess", "one", "-n", sessions.namespace)
    assert cluster in listed.split()


def test_a_pool_grows_when_it_is_full_waits_at_its_maximum_and_shrinks_when_it_is_empty(
    sessions: Sessions,
) -> None:
    offer(sessions)
    share(sessions, "one", "two", "three", "four")
    both = wait_for_clusters(sessions, 2)
    for name in ("one", "two", "three", "four"):
        sessions.wait_for(name, "condition=Ready")
    assert sorted(place(sessions, each) or "" for each in ("one", "two", "three", "four")) == [
        *[min(both)] * 2,
        *[max(both)] * 2,
    ]

    share(sessions, "five")
    sessions.wait_for_reason("five", "PoolFull")
    assert "pool.maxClusters is 2" in sessions.status("five")["message"]
    assert sessions.status("five")["phase"] == "Queued"

    sessions.delete("one")
    sessions.wait_for("five", "condition=Ready")
    for name in ("two", "three", "four", "five"):
        sessions.delete(name)
    wait_for_clusters(sessions, 1)
    wait_until(lambda: pool_status(sessions)["models"] == 0, "no models", SOON_SECONDS)


def test_a_lost_cluster_is_replaced_and_its_runs_get_another_place(sessions: Sessions) -> None:
    offer(sessions)
    share(sessions, "one")
    sessions.wait_for("one", "condition=Ready")
    lost = place(sessions, "one")
    assert lost is not None

    sessions.delete(lost)

    wait_until(lambda: place(sessions, "one") not in {lost, None}, "another place", SOON_SECONDS)
    sessions.wait_for("one", "condition=Ready")
    assert (
        sessions.status("one")["incarnation"]
        == sessions.status(place(sessions, "one") or "")["incarnation"]
    )


def test_a_run_follows_the_readiness_and_the_process_of_its_cluster(sessions: Sessions) -> None:
    offer(sessions)
    share(sessions, "one")
    sessions.wait_for("one", "condition=Ready")
    [cluster] = clusters(sessions)
    before = sessions.status("one")["incarnation"]
    patch = '--patch={"spec":{"suspend":true}}'
    where = ("-n", sessions.namespace, "--type=merge")

    sessions.cluster.kubectl("patch", "tsess", cluster, patch, *where)
    sessions.wait_for_reason("one", "PoolClusterNotReady")
    sessions.cluster.kubectl("patch", "tsess", cluster, patch.replace("true", "false"), *where)
    sessions.wait_for("one", "condition=Ready")

    assert sessions.status("one")["incarnation"] == sessions.status(cluster)["incarnation"]
    assert sessions.status("one")["incarnation"] != before


def test_a_run_that_its_base_model_does_not_allow_takes_no_slot(sessions: Sessions) -> None:
    offer(sessions, slotsPerCluster=1)
    share(sessions, "greedy", lora={"rank": 512})
    share(sessions, "modest")

    sessions.wait_for("modest", "condition=Ready")

    assert sessions.reason("greedy") == "NotAllowed"
    assert place(sessions, "greedy") is None


def test_another_operator_process_finds_the_pool_as_it_is(
    sessions: Sessions, operator: RunningOperator
) -> None:
    offer(sessions, slotsPerCluster=1)
    share(sessions, "one", "two")
    for name in ("one", "two"):
        sessions.wait_for(name, "condition=Ready")
    places = [place(sessions, name) for name in ("one", "two")]
    operator.rest()

    operator.program.kill()
    operator.program.start()
    share(sessions, "three")
    sessions.wait_for_reason("three", "PoolFull")

    assert [place(sessions, name) for name in ("one", "two")] == places
    assert len(clusters(sessions)) == 2


def test_a_changed_base_model_starts_a_cluster_to_which_runs_are_moved(
    sessions: Sessions,
) -> None:
    offer(sessions, slotsPerCluster=1)
    share(sessions, "one")
    sessions.wait_for("one", "condition=Ready")
    old = place(sessions, "one")

    changed: dict[str, Any] = {"sharing": "Shared", "pool": POOL, "maxContextLength": 2048}
    sessions.cluster.apply(a_base_model(sessions.namespace, **changed))
    [new] = set(wait_for_clusters(sessions, 2)) - {old}
    sessions.wait_for(new, "condition=Ready")
    wait_until(lambda: place(sessions, "one") == new, "the move", SOON_SECONDS)
    sessions.wait_for("one", "condition=Ready")

    wait_until(lambda: clusters(sessions) == [new], "the old cluster to end", SOON_SECONDS)
    assert sessions.condition(new, "Accepted")["reason"] == "Accepted"
