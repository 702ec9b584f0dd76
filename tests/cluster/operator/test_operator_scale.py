"""Two hundred sessions become Ready, cause no load when settled, and are deleted completely."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    an_operator,
    install_definitions,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.scale import Load, measure, prepare
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes

LOAD = Load(sessions=200, creates_per_second=5, steady_seconds=30, patience_seconds=600)
SETTINGS = {"last_checkpoint_seconds": 1, "starts_in_order": False}
"""In order of arrival they would start one after the other: about one session a second here."""
MOST_WRITES_PER_SECOND = 0.2
MOST_MEMORY_BYTES = 300_000_000


@pytest.fixture
def operator(
    cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes, cluster_folder: Path
) -> Iterator[RunningOperator]:
    install_definitions(cluster)
    with cluster.a_namespace("scale") as namespace:
        prepare(cluster, kwok, namespace, LOAD.sessions)
        kubeconfig = operator_account(cluster, namespace, cluster_folder)
        with an_operator(kubeconfig, namespace, cluster_folder, **SETTINGS) as running:
            yield running
            sys.stdout.write(running.program.log_tail(10))


@pytest.mark.timeout(1200)
def test_two_hundred_sessions_become_ready_cause_no_load_and_are_deleted(
    cluster: Cluster, operator: RunningOperator
) -> None:
    result = measure(cluster, operator, LOAD)

    sys.stdout.write(f"{result.as_table()}\n")
    assert result.steady_writes_per_second <= MOST_WRITES_PER_SECOND
    assert result.rss_bytes <= MOST_MEMORY_BYTES
