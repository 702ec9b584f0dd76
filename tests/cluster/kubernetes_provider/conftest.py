"""The API server on Kubernetes: real SDK, real kube-apiserver, real heads."""

from collections.abc import Iterator

import pytest

from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.provider_world import World, a_world
from tinkercloud_testing.serving.servers import Server


@pytest.fixture(scope="session")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(cluster, tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(scope="session")
def server(world: World) -> Iterator[Server]:
    one = world.server("one")
    one.start()
    yield one
    one.clients.close()
    one.stop()


@pytest.fixture(scope="session")
def other(world: World) -> Iterator[Server]:
    """Run another replica."""
    two = world.server("two")
    two.start()
    yield two
    two.clients.close()
    two.stop()
