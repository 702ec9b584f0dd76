"""Quotas of owners: the operator on a real control plane with KubeRay; pods are simulated."""

import sys
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
    SOON_SECONDS,
    Sessions,
    a_base_model,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE
from tinkercloud_testing.harness.waiting import wait_until


@pytest.fixture(scope="module")
def sessions(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path
) -> Iterator[Sessions]:
    install_definitions(cluster)
    kwok.add("tenants-0", gpus=32)
    with cluster.a_namespace("tenants") as namespace:
        cluster.apply(a_base_model(namespace), *a_volume(namespace))
        kubeconfig = operator_account(cluster, namespace, cluster_folder)
        with an_operator(kubeconfig, namespace, cluster_folder, **PATIENCE) as operator:
            yield Sessions(cluster, namespace)
            cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=90s")
            sys.stdout.write(operator.program.log_tail())


def a_tenant(namespace: str, **limits: int) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "research", "namespace": namespace},
        "spec": {"owners": ["ada", "team-*"], "limits": limits},
    }


def columns(sessions: Sessions) -> list[str]:
    """Return what `kubectl get tenants` prints about the tenant, without its age."""
    table = sessions.cluster.kubectl("get", "tenants", "-n", sessions.namespace, "--no-headers")
    return str(table).split()[:-1]


def test_sessions_over_a_limit_wait_and_start_when_others_end_or_the_limit_is_raised(
    sessions: Sessions,
) -> None:
    cluster, namespace = sessions.cluster, sessions.namespace
    cluster.apply(a_tenant(namespace, sessions=1))
    sessions.make_ready("first")

    sessions.make("second", owner="team-blue")
    sessions.make("of-another-tenant", owner="grace")
    sessions.wait_for_reason("second", "QuotaExceeded")
    sessions.wait_for("of-another-tenant", "condition=Ready")

    message = sessions.condition("second", "Ready")["message"]
    assert "tenant 'research' uses 1 of 1 sessions (limits.sessions)" in message
    assert sessions.status("second")["phase"] == "Queued"
    assert "RayCluster/second" not in sessions.children("second")
    wait_until(
        lambda: columns(sessions) == ["research", "1/1", "3/-", "0/-", "1"],
        "the Tenant shows what is used",
        SOON_SECONDS,
    )

    sessions.delete("first")
    sessions.wait_for("second", "condition=Ready")

    sessions.make("third")
    sessions.wait_for_reason("third", "QuotaExceeded")
    cluster.apply(a_tenant(namespace, sessions=2, dedicatedGpus=6))
    sessions.wait_for("third", "condition=Ready")
    cluster.apply(a_tenant(namespace, sessions=9, dedicatedGpus=6))
    sessions.make("fourth")
    sessions.wait_for_reason("fourth", "QuotaExceeded")
    message = sessions.condition("fourth", "Ready")["message"]
    assert "6 of 6 GPUs (limits.dedicatedGpus)" in message
