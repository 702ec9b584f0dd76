"""The cluster that the tests in this folder share, one for each pytest worker."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay, a_kuberay_operator
from tinkercloud_testing.cluster.controllers.operators import RunningOperator
from tinkercloud_testing.cluster.controllers.training_sessions import Sessions
from tinkercloud_testing.cluster.image_build.programs import state_folder
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane, a_control_plane
from tinkercloud_testing.cluster.kube_api.existing import ExistingNodes, existing_cluster
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes, a_kwok_controller
from tinkercloud_testing.cluster.nodes.lost_nodes import FurtherNodes, nodes_to_lose
from tinkercloud_testing.cluster.nodes.node import RealNode, a_real_node


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one worker, and all files that need the node in the same one.

    A machine has only one node at a time, and the worker that runs it keeps it until it ends.
    """
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - installed when this hook runs

    class OneNode(LoadFileScheduling):  # type: ignore[misc] # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            text = Path(config.rootpath, file).read_text()
            needs_node = "real_node" in text or "own_node" in text
            return "the node" if needs_node else file

    return OneNode(config, log)


@pytest.fixture(scope="session")
def cluster_folder() -> Iterator[Path]:
    """Return the folder of the state and the logs of the cluster's programs."""
    with state_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def control_plane(cluster_folder: Path) -> Iterator[ControlPlane]:
    """Run our own control plane, whose programs tests may stop and start."""
    if existing_cluster() is not None:
        pytest.skip("stops programs of the control plane; an existing cluster does not allow that")
    with a_control_plane(cluster_folder) as plane:
        yield plane


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Return the cluster under test, with administrator rights."""
    existing = existing_cluster()
    if existing is not None:
        return existing
    plane: ControlPlane = request.getfixturevalue("control_plane")
    return plane.cluster


@pytest.fixture(scope="session")
def kuberay(cluster: Cluster, cluster_folder: Path) -> Iterator[KubeRay]:
    """Install and run KubeRay."""
    with a_kuberay_operator(cluster, cluster_folder) as running:
        yield running


@pytest.fixture(scope="session")
def running_kwok(cluster: Cluster, cluster_folder: Path) -> Iterator[KwokNodes]:
    """Simulate nodes for all files."""
    with a_kwok_controller(cluster, cluster_folder) as running:
        yield running


@pytest.fixture(scope="module")
def kwok(running_kwok: KwokNodes) -> Iterator[KwokNodes]:
    """Simulate nodes; `kwok.add("gpu-0", gpus=8)` adds one for the tests of a file."""
    yield running_kwok
    # With free nodes of earlier tests, no session would have to wait for nodes.
    running_kwok.clear()


@pytest.fixture(scope="session")
def real_node(
    request: pytest.FixtureRequest, cluster_folder: Path
) -> Iterator[RealNode | ExistingNodes]:
    """Run a node with real pods; `real_node.load(image)` loads images onto it."""
    if existing_cluster() is not None:
        yield ExistingNodes()
        return
    with a_real_node(request.getfixturevalue("control_plane"), cluster_folder / "node") as node:
        yield node


@pytest.fixture(scope="session")
def own_node(real_node: RealNode | ExistingNodes) -> RealNode:
    """Return the node of this machine, whose programs tests may stop and start."""
    if isinstance(real_node, ExistingNodes):
        pytest.skip("needs a node on this machine, which an existing cluster does not have")
    return real_node


@pytest.fixture
def further_nodes(control_plane: ControlPlane, own_node: RealNode) -> Iterator[FurtherNodes]:
    """Return the nodes that a test may lose; there are none at first."""
    with nodes_to_lose(control_plane, own_node) as nodes:
        yield nodes


@pytest.fixture
def sessions(cluster: Cluster, namespace: str, operator: RunningOperator) -> Iterator[Sessions]:
    """Return the sessions of the file's namespace, which has none before and after each test."""
    yield Sessions(cluster, namespace)
    cluster.kubectl("delete", "trainingsessions", "--all", "-n", namespace, "--timeout=120s")
    sys.stdout.write(operator.program.log_tail())
