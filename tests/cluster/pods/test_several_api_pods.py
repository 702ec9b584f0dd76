"""Two pods of the API server with one PostgreSQL database, as installed by the chart."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from urllib.request import Request, urlopen

import pytest
import tinker

from tinkercloud_testing.cluster.image_build.program_images import program_image
from tinkercloud_testing.cluster.installation import (
    RELEASE,
    START_SECONDS,
    Installation,
    an_installation,
    make_volumes,
    values_of_one_node,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.nodes.node import HOST_ADDRESS, RealNode
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.storage.postgresql import PostgreSQL, a_postgresql

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DEPLOYMENT = f"deployment/{RELEASE}-api"
PODS = "app.kubernetes.io/component=api"


@pytest.fixture(scope="module")
def postgresql(own_node: RealNode) -> Iterator[PostgreSQL]:
    """Run PostgreSQL at an address that pods of this machine's node can reach."""
    del own_node
    with a_postgresql(HOST_ADDRESS) as running:
        yield running


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    own_node: RealNode,
    postgresql: PostgreSQL,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Install the service with two API servers and no model."""
    folder = tmp_path_factory.mktemp("replicas")
    make_volumes(folder)
    own_node.load(*map(program_image, ("api-server", "operator")))
    values = values_of_one_node() | {"database": {"existingSecret": "database"}}
    values["apiServer"]["replicas"] = 2
    url = postgresql.new_database()
    with an_installation(cluster, folder, values, database={"url": url}) as release:
        yield release


def addresses(installation: Installation) -> list[str]:
    """Return the addresses of the API server's pods."""
    pods = installation.cluster.objects("pods", installation.namespace, PODS)
    return [pod["status"]["podIP"] for pod in pods]


def restarts(installation: Installation) -> list[int]:
    pods = installation.cluster.objects("pods", installation.namespace, PODS)
    return [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods]


def rest(installation: Installation, url: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=url, api_key=installation.key)


def test_changes_made_through_one_pod_are_visible_in_the_other(installation: Installation) -> None:
    one, other = (f"http://{address}:8000" for address in addresses(installation))
    fields = {"X-API-Key": installation.key, "Content-Type": "application/json"}
    request = Request(f"{one}/api/v1/create_session", data=b'{"sdk_version": "1"}', headers=fields)

    with urlopen(request, timeout=60) as response:
        made = json.load(response)["session_id"]
    known = rest(installation, other).list_sessions().result().sessions

    assert known == [made]


def test_the_metrics_of_every_pod_can_be_read(installation: Installation) -> None:
    pages = []
    for address in addresses(installation):
        with urlopen(f"http://{address}:9090/metrics", timeout=60) as response:
            pages.append(response.read().decode())

    assert len(pages) == 2
    assert [page for page in pages if "tinkercloud_http_requests_total{" not in page] == []


def test_replacing_pods_is_invisible_to_clients(installation: Installation) -> None:
    before = addresses(installation)
    is_over = Event()

    def keep_asking() -> int:
        client, answers = rest(installation, installation.url), 0
        while not is_over.is_set():
            client.list_sessions().result()
            answers += 1
        return answers

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(keep_asking)
        try:
            installation.kubectl("rollout", "restart", DEPLOYMENT)
            seconds = f"--timeout={START_SECONDS}s"
            installation.kubectl("rollout", "status", DEPLOYMENT, seconds)
        finally:
            is_over.set()
        answers = asking.result()

    assert answers > 0
    wait_until(lambda: not set(before) & set(addresses(installation)), "the old pods gone")


def test_pods_wait_for_an_unreachable_database_without_restarts(
    installation: Installation, postgresql: PostgreSQL
) -> None:
    postgresql.stop()
    installation.cluster.wait_for(
        DEPLOYMENT, "condition=Available=False", installation.namespace, START_SECONDS
    )
    postgresql.start()
    installation.cluster.wait_for(
        DEPLOYMENT, "condition=Available", installation.namespace, START_SECONDS
    )

    assert restarts(installation) == [0, 0]
