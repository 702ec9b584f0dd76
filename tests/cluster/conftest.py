"""The cluster that the tests in this folder share: one for each worker that runs them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.control_plane import ControlPlane, a_control_plane
from tinkercloud_testing.cluster.existing import ExistingNodes, existing_cluster
from tinkercloud_testing.cluster.kuberay import KubeRay, a_kuberay_operator
from tinkercloud_testing.cluster.kwok import KwokNodes, a_kwok_controller
from tinkercloud_testing.cluster.node import RealNode, a_real_node
from tinkercloud_testing.cluster.programs import state_folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file's tests to one worker, and all files that need the node to the same one.

    A machine has but one node at a time, and who runs it keeps it to the end of its tests.
    """
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - there when this is asked for

    class OneNode(LoadFileScheduling):  # type: ignore[misc] # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            text = Path(config.rootpath, file).read_text()
            needs_node = "real_node" in text or "own_node" in text
            return "the node" if needs_node else file

    return OneNode(config, log)


@pytest.fixture(scope="session")
def cluster_folder() -> Iterator[Path]:
    """Where the cluster's programs keep their state and their logs."""
    with state_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def control_plane(cluster_folder: Path) -> Iterator[ControlPlane]:
    """A control plane of our own, whose programs may be stopped and started."""
    if existing_cluster() is not None:
        pytest.skip("stops programs of the control plane; an existing cluster's are not ours")
    with a_control_plane(cluster_folder) as plane:
        yield plane


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster under test, as its administrator sees it."""
    existing = existing_cluster()
    if existing is not None:
        return existing
    plane: ControlPlane = request.getfixturevalue("control_plane")
    return plane.cluster


@pytest.fixture(scope="session")
def kuberay(cluster: Cluster, cluster_folder: Path) -> Iterator[KubeRay]:
    """KubeRay, running and installed."""
    with a_kuberay_operator(cluster, cluster_folder) as running:
        yield running


@pytest.fixture(scope="session")
def running_kwok(cluster: Cluster, cluster_folder: Path) -> Iterator[KwokNodes]:
    """What plays nodes, of any file."""
    with a_kwok_controller(cluster, cluster_folder) as running:
        yield running


@pytest.fixture(scope="module")
def kwok(running_kwok: KwokNodes) -> Iterator[KwokNodes]:
    """What plays nodes; `kwok.add("gpu-0", gpus=8)` adds one, which goes with its file's tests."""
    yield running_kwok
    # Where there is room left over from others, nothing would wait for any.
    running_kwok.clear()


@pytest.fixture(scope="session")
def real_node(
    request: pytest.FixtureRequest, cluster_folder: Path
) -> Iterator[RealNode | ExistingNodes]:
    """What runs pods for real; `real_node.load(image)` brings images onto it."""
    if existing_cluster() is not None:
        yield ExistingNodes()
        return
    with a_real_node(request.getfixturevalue("control_plane"), cluster_folder / "node") as node:
        yield node


@pytest.fixture(scope="session")
def own_node(real_node: RealNode | ExistingNodes) -> RealNode:
    """The node of this machine, whose programs may be stopped and started."""
    if isinstance(real_node, ExistingNodes):
        pytest.skip("needs a node on this machine; an existing cluster's are elsewhere")
    return real_node
