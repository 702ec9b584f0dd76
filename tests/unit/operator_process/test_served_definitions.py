"""Served CRDs are read at the start of a term and after changes; gaps are reported."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tinkercloud_kube.errors import Rejected
from tinkercloud_operator import metrics
from tinkercloud_operator.run import controller as controller_module
from tinkercloud_operator.run import term
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.served_definitions import ServedDefinitions
from tinkercloud_operator.run.controller import Controller, DefinitionsMissing
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.probes import ROUTES, Probes
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, Json
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import a_session_manifest
from tinkercloud_testing.serving.metrics import metric_value

KUBERAY, OWN = "apis/ray.io/v1", "apis/tinkercloud.dev/v1alpha1"
SESSION = f"/{OWN}/namespaces/default/trainingsessions/one"
TEXT: Json = {"type": "string"}


def closed(**properties: Json) -> Json:
    return {"properties": properties}


OLD = {"RayCluster": closed(spec=closed(rayVersion=TEXT))}
NEW = {"RayCluster": closed(spec=closed(authOptions=closed(mode=TEXT, secretName=TEXT)))}
OWN_OLD = {"TrainingSession": closed(spec=closed(), status=closed(phase=TEXT))}


def gauge(kind: str) -> float:
    return metric_value(metrics.DEFINITIONS_OUTDATED.labels(kind))


@pytest.fixture
async def controller(connection: Connection) -> AsyncIterator[Controller]:
    async with aiohttp.ClientSession() as http:
        heads = HeadClient(connection.cluster, http)
        yield Controller(connection.cluster, heads, Settings(max_concurrent=1))


async def test_gaps_follow_the_served_crds(connection: Connection) -> None:
    served = ServedDefinitions(connection.cluster)
    connection.api.openapi = {KUBERAY: OLD}

    assert await served.refresh()
    assert "requires KubeRay 1.6" in (served.kuberay_gap or "")
    assert gauge("RayCluster") == 1

    connection.api.openapi = {KUBERAY: NEW}
    assert await served.refresh()
    assert served.kuberay_gap is None
    assert gauge("RayCluster") == 0


async def test_an_outdated_tenant_is_counted_like_our_other_kinds(connection: Connection) -> None:
    served = ServedDefinitions(connection.cluster)
    connection.api.openapi = {OWN: {"Tenant": closed(spec=closed(), status=closed(used=TEXT))}}

    assert await served.refresh()

    assert "Tenant" in served.own_gaps
    assert gauge("Tenant") == 1


async def test_a_document_is_read_again_only_when_it_has_changed(connection: Connection) -> None:
    served = ServedDefinitions(connection.cluster)
    connection.api.openapi = {KUBERAY: OLD}

    assert [await served.refresh() for _ in range(3)] == [True, False, False]

    assert connection.api.requests.count(f"GET /openapi/v3/{KUBERAY}") == 1


async def test_a_kuberay_that_is_removed_is_not_too_old(connection: Connection) -> None:
    served = ServedDefinitions(connection.cluster)
    connection.api.openapi = {KUBERAY: OLD, OWN: {}}
    await served.refresh()

    connection.api.openapi = {OWN: {}}

    assert await served.refresh()
    assert served.kuberay_gap is None


async def test_unreadable_crds_report_no_gap(
    connection: Connection,
) -> None:
    served = ServedDefinitions(connection.cluster)

    assert not await served.refresh()
    assert served.kuberay_gap is None
    assert served.storable("TrainingSession", {"phase": "Ready"}) == {"phase": "Ready"}


async def test_a_status_is_written_without_undeclared_fields(
    connection: Connection, controller: Controller
) -> None:
    connection.api.openapi = {OWN: OWN_OLD}
    connection.api.put(SESSION, a_session_manifest())
    await controller.resync()
    working = asyncio.create_task(controller.work())

    await reached(lambda: "status" in connection.api.objects[SESSION])

    assert connection.api.objects[SESSION]["status"] == {"phase": "Failed"}
    assert gauge("TrainingSession") == 1
    working.cancel()


async def test_changed_crds_trigger_a_resync(
    connection: Connection, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "_DEFINITIONS_SECONDS", 0.0)
    connection.api.openapi = {KUBERAY: OLD}
    await controller.resync()
    watching = asyncio.create_task(controller.watch_definitions())

    connection.api.openapi = {KUBERAY: NEW}

    await asyncio.wait_for(controller.needs_resync.wait(), 10)
    watching.cancel()


async def test_an_undeclared_field_counts_as_rejected_despite_status_500(
    connection: Connection,
) -> None:
    connection.api.refused["one"] = 500
    connection.api.explanation = "failed to create ...: .spec.x: field not declared in schema"

    with pytest.raises(Rejected, match="field not declared"):
        await connection.cluster.apply({"kind": "RayCluster", "metadata": {"name": "one"}})


async def test_missing_crds_are_reported_by_the_readiness_probe(
    connection: Connection, controller: Controller
) -> None:
    connection.api.has_definitions = False

    with pytest.raises(DefinitionsMissing, match="install the chart tinkercloud-crds"):
        await controller.resync()

    assert "tinkercloud-crds" in (controller.unready() or "")
    connection.api.has_definitions = True
    await controller.resync()
    assert controller.unready() is None


async def test_watches_start_once_missing_crds_are_installed(
    connection: Connection, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "_RETRY_SECONDS", 0.0)
    connection.api.has_definitions = False
    stop = asyncio.Event()
    resyncing = asyncio.create_task(term.resync(controller, stop, Settings()))
    await reached(lambda: "install" in (controller.unready() or ""))

    connection.api.has_definitions = True
    await asyncio.wait_for(resyncing, 10)

    assert stop.is_set()


@pytest.mark.parametrize(
    ("why", "status", "text"),
    [(None, 200, "leading"), ("the initial list is not complete", 503, "initial list")],
)
async def test_a_leader_is_ready_after_its_initial_list(
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    why: str | None,
    status: int,
    text: str,
) -> None:
    leadership = Leadership(connection.client, Settings())
    monkeypatch.setattr(Leadership, "is_leader", property(lambda _: True))
    port = free_port()
    probes = Probes(leadership, Settings(probe_host="127.0.0.1", probe_port=port))
    probes.unready = lambda: why
    runner = await probes.serve()
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}/readyz") as answer,
    ):
        assert answer.status == status
        assert text in await answer.text()
    await runner.cleanup()


async def test_all_routes_of_the_operator_are_served(connection: Connection) -> None:
    port = free_port()
    settings = Settings(probe_host="127.0.0.1", probe_port=port)
    runner = await Probes(Leadership(connection.client, settings), settings).serve()
    async with aiohttp.ClientSession() as client:
        statuses = {}
        for path in ROUTES:
            async with client.get(f"http://127.0.0.1:{port}{path}") as answer:
                statuses[path] = answer.status
    await runner.cleanup()

    assert statuses == {"/livez": 200, "/readyz": 200, "/metrics": 200}
