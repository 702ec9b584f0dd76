"""The API server on Kubernetes: real SDK, real kube-apiserver, real heads."""

from collections.abc import Iterator

import pytest

from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.programs import ROOT
from tinkercloud_testing.cluster.provider_world import ACCOUNT, World, a_base_model, access
from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.postgresql import a_postgresql
from tinkercloud_testing.servers import Server


@pytest.fixture(scope="session")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    for file in sorted((ROOT / "crds").glob("tinkercloud.dev_*.yaml")):
        cluster.apply_text(file.read_text())
    cluster.wait_for("crd/trainingsessions.tinkercloud.dev", "condition=Established")
    with cluster.a_namespace("provider") as namespace:
        cluster.apply(*access(namespace), a_base_model("tiny", namespace))
        kubeconfig = cluster.kubeconfig_of(ACCOUNT, namespace, folder)
        model = save(tiny_llama(), folder / "llama")
        with a_postgresql() as postgresql:
            catalog = postgresql.new_database()
            made = World(cluster, namespace, folder, model, kubeconfig, catalog)
            yield made
            for head in made.heads:
                head.kill()


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
