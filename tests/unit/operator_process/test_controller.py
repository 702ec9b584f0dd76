"""A term of leadership: the initial list, watches, and resyncs after watches restart."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_operator.run import term
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.run.handlers import WatchingFailed
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.pool import base_models
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import MOMENT, Connection, Json
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import a_base_model_manifest, a_session_manifest

SESSIONS = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions"
BASE_MODELS = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/basemodels"
TENANTS = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/tenants"
SERVICE = "/api/v1/namespaces/default/services/one-head"
SETTINGS = Settings(max_concurrent=1)


@pytest.fixture(autouse=True)
def _shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(term, "_GATHER_SECONDS", 0.0)


@pytest.fixture
async def heads(connection: Connection) -> AsyncIterator[HeadClient]:
    async with aiohttp.ClientSession() as http:
        yield HeadClient(connection.cluster, http)


@pytest.fixture
def controller(connection: Connection, heads: HeadClient) -> Controller:
    """A controller that has observed a session with a Service."""
    made = Controller(connection.cluster, heads, SETTINGS)
    made.on_event("TrainingSession", None, a_session(connection))
    made.on_event("Service", None, a_service(connection))
    return made


def a_session(connection: Connection) -> Json:
    return connection.api.put(f"{SESSIONS}/one", a_session_manifest())


def a_service(connection: Connection) -> Json:
    return connection.api.put(SERVICE, {}, labels={labels.SESSION_LABEL: "one"})


async def write_status(controller: Controller, connection: Connection) -> None:
    """Write an unchanged status, as a reconciliation does."""
    uid = connection.api.objects[f"{SESSIONS}/one"]["metadata"]["uid"]
    await controller._executor.write_status("TrainingSession", "one", uid, {})


def test_the_initial_list_of_a_watch_triggers_no_resync(controller: Controller) -> None:
    assert not controller.needs_resync.is_set()


def test_a_restarted_watch_triggers_a_resync(
    controller: Controller, connection: Connection
) -> None:
    controller.on_event("Service", "MODIFIED", a_service(connection))
    assert not controller.needs_resync.is_set()

    controller.on_event("Service", None, a_service(connection))

    assert controller.needs_resync.is_set()


def test_watches_of_different_kinds_are_tracked_separately(
    controller: Controller, connection: Connection
) -> None:
    controller.on_event("Service", "MODIFIED", a_service(connection))

    controller.on_event("TrainingSession", None, a_session(connection))

    assert not controller.needs_resync.is_set()


async def test_a_missed_deletion_is_found_after_a_watch_restarts(
    controller: Controller, connection: Connection
) -> None:
    resyncing = asyncio.create_task(term.resync(controller, asyncio.Event(), SETTINGS))
    assert await reached(lambda: controller.unready() is None)
    controller.queue.done(await controller.queue.take())

    del connection.api.objects[SERVICE]
    assert controller.watched.children.of("one")
    controller.needs_resync.set()

    assert await reached(lambda: not controller.watched.children.of("one"))
    assert await controller.queue.take() == "one"
    resyncing.cancel()


@pytest.mark.parametrize("has_claims", [True, False])
async def test_device_claims_are_listed_only_if_the_cluster_serves_them(
    controller: Controller,
    connection: Connection,
    has_claims: bool,
) -> None:
    connection.api.has_device_claims = has_claims

    await controller.resync()

    asked = [request for request in connection.api.requests if "resourceclaim" in request]
    assert bool(asked) == ("ResourceClaimTemplate" in controller.served) == has_claims


async def test_installing_kuberay_restarts_the_watches(
    controller: Controller, connection: Connection
) -> None:
    connection.api.has_kuberay = False
    stop = asyncio.Event()
    resyncing = asyncio.create_task(term.resync(controller, stop, SETTINGS))
    assert await reached(lambda: controller.unready() is None)
    assert not controller.has_kuberay

    connection.api.has_kuberay = True
    controller.needs_resync.set()
    await resyncing

    assert stop.is_set()


@pytest.mark.parametrize(
    "changed",
    [{"generation": 2}, {"deletionTimestamp": MOMENT}, {"annotations": {"used": "yes"}}],
    ids=["spec", "deletion", "annotation"],
)
async def test_a_change_that_the_response_to_an_own_write_shows_first_is_reconciled(
    controller: Controller, connection: Connection, changed: dict[str, Any]
) -> None:
    controller.queue.done(await controller.queue.take())
    event = connection.api.put(f"{SESSIONS}/one", {}, **changed)

    await write_status(controller, connection)
    controller.on_event("TrainingSession", "MODIFIED", event)

    assert len(controller.queue) == 1


def a_session_of_a_limited_tenant(connection: Connection, name: str) -> Json:
    """Store a session whose tenant may have one; all have the same age, so the name decides."""
    limited: Json = {"owners": ["ada"], "limits": {"sessions": 1}}
    tenant = {"apiVersion": labels.API_VERSION, "kind": "Tenant", "spec": limited}
    connection.api.put(f"{TENANTS}/research", tenant)
    connection.api.put(f"{BASE_MODELS}/model", a_base_model_manifest())
    return connection.api.put(f"{SESSIONS}/{name}", a_session_manifest(name))


async def test_a_reconciled_session_has_reserved_its_quota(
    controller: Controller, connection: Connection
) -> None:
    connection.api.has_kuberay = False
    a_session_of_a_limited_tenant(connection, "one")
    await controller.resync()
    worker = asyncio.create_task(controller.work())
    await reached(lambda: f"PATCH {SESSIONS}/one/status" in connection.api.writes)
    worker.cancel()

    older = a_session_of_a_limited_tenant(connection, "a")
    controller.note("TrainingSession", older)

    assert not controller.watched.may_start(older)


async def test_an_observed_session_has_reserved_nothing(
    controller: Controller, connection: Connection
) -> None:
    a_session_of_a_limited_tenant(connection, "one")
    await controller.resync()
    observed = await controller._observe("one")
    assert observed is not None
    assert observed.limits.quota_message is None

    older = a_session_of_a_limited_tenant(connection, "a")
    controller.note("TrainingSession", older)

    assert controller.watched.may_start(older)


def test_the_order_of_starts_follows_the_setting(connection: Connection, heads: HeadClient) -> None:
    unordered = Controller(connection.cluster, heads, Settings(starts_in_order=False))

    assert Controller(connection.cluster, heads, SETTINGS).watched.starts_in_order
    assert not unordered.watched.starts_in_order


async def test_an_own_write_alone_causes_no_reconciliation(
    controller: Controller, connection: Connection
) -> None:
    controller.queue.done(await controller.queue.take())

    await write_status(controller, connection)

    assert len(controller.queue) == 0


async def test_a_duplicate_base_model_becomes_active_when_the_older_one_is_deleted(
    connection: Connection, controller: Controller
) -> None:
    older = connection.api.put(f"{BASE_MODELS}/a", a_base_model_manifest("a"))
    younger = connection.api.put(f"{BASE_MODELS}/b", a_base_model_manifest("b"))
    for offered in (older, younger):
        controller.on_event("BaseModel", "ADDED", offered)
    await controller.resync()
    working = asyncio.create_task(controller.work_on_base_models())
    assert await reached(lambda: reason_of(connection, "b") == "Duplicate")

    controller.on_event("BaseModel", "DELETED", older)

    assert await reached(lambda: reason_of(connection, "b") == "Accepted")
    working.cancel()


@pytest.mark.parametrize(
    ("used_first", "hours"), [(True, 0), (False, 96)], ids=["before it leads", "while it leads"]
)
async def test_idle_hours_count_until_the_next_use_that_an_operator_has_seen(
    connection: Connection,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    used_first: bool,
    hours: float,
) -> None:
    monkeypatch.setattr(base_models, "_GATHER_SECONDS", 0.0)
    now = datetime.now(UTC)
    yesterday = timestamp(now - timedelta(days=1))
    idle = {"idle": {"gpus": 4, "since": yesterday}}
    connection.api.put(f"{BASE_MODELS}/a", a_base_model_manifest("a") | {"status": idle})
    status = {"gpus": 4, "idleSince": yesterday}
    connection.api.put(f"{SESSIONS}/one", a_session_manifest() | {"status": status})
    used = {"annotations": {labels.LAST_ACTIVITY: timestamp(now)}}
    if used_first:
        connection.api.put(f"{SESSIONS}/one", {"metadata": used})
    await controller.resync()
    working = asyncio.create_task(controller.work_on_base_models())
    assert await reached(lambda: reason_of(connection, "a") == "Accepted")

    seen = connection.api.put(f"{SESSIONS}/one", {"metadata": used, "status": {"gpus": 4}})
    controller.on_event("TrainingSession", "MODIFIED", seen)

    assert await reached(lambda: idle_of(connection, "a")["gpus"] == 0)
    assert idle_of(connection, "a")["gpuHours"] == pytest.approx(hours, abs=0.5)
    working.cancel()


def idle_of(connection: Connection, base_model: str) -> Json:
    """Return what the status of a BaseModel says about idle GPUs."""
    idle: Json = connection.api.objects[f"{BASE_MODELS}/{base_model}"]["status"]["idle"]
    return idle


def reason_of(connection: Connection, base_model: str) -> str | None:
    """Return the reason of the Ready condition of a BaseModel, if it was written."""
    status = connection.api.objects[f"{BASE_MODELS}/{base_model}"].get("status", {})
    reasons = [item["reason"] for item in status.get("conditions", []) if item["type"] == "Ready"]
    return next(iter(reasons), None)


async def lead(connection: Connection, heads: HeadClient) -> None:
    probes = Probes(Leadership(connection.client, SETTINGS), SETTINGS)
    await term.lead(connection.cluster, heads, probes, SETTINGS, lambda: None)


async def test_failed_watches_restart_with_an_empty_cache(
    connection: Connection, heads: HeadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching: list[Controller] = []

    async def watch(controller: Controller, *_: object, **__: object) -> None:
        watching.append(controller)
        if len(watching) == 1:
            raise WatchingFailed("410")
        await asyncio.Event().wait()

    monkeypatch.setattr(term, "watch", watch)
    leading = asyncio.create_task(lead(connection, heads))
    await reached(lambda: len(watching) == 2)

    assert watching[0] is not watching[1]
    assert not leading.done()
    leading.cancel()
    await asyncio.wait({leading})


async def test_a_cancelled_term_ends_even_if_its_watches_fail_at_that_moment(
    connection: Connection, heads: HeadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching: list[Controller] = []

    async def watch(controller: Controller, *_: object, **__: object) -> None:
        watching.append(controller)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise WatchingFailed("it ended without an error") from None

    monkeypatch.setattr(term, "watch", watch)
    leading = asyncio.create_task(lead(connection, heads))
    await reached(lambda: len(watching) == 1)
    leading.cancel()
    await asyncio.wait({leading}, timeout=5)

    assert leading.cancelled()
    assert len(watching) == 1


async def test_nothing_is_reconciled_before_the_initial_list(
    controller: Controller, connection: Connection
) -> None:
    working = asyncio.create_task(controller.work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(controller.queue) == 1

    await controller.resync()
    await reached(lambda: len(controller.queue) == 0)

    working.cancel()


async def test_a_burst_of_pod_changes_is_reconciled_once(
    controller: Controller, connection: Connection
) -> None:
    controller.queue.done(await controller.queue.take())

    for number in range(3):
        path = f"/api/v1/namespaces/default/pods/one-{number}"
        pod = connection.api.put(path, {}, labels={labels.SESSION_LABEL: "one"})
        controller.on_event("Pod", "ADDED", pod)
    assert len(controller.queue) == 0

    assert await controller.queue.take() == "one"
    assert len(controller.queue) == 0


async def test_the_change_that_makes_all_pods_ready_is_reconciled_at_once(
    controller: Controller, connection: Connection
) -> None:
    controller.queue.done(await controller.queue.take())
    first, last = (f"/api/v1/namespaces/default/pods/one-{number}" for number in range(2))

    controller.on_event("Pod", "ADDED", a_pod(connection, first, ready="True"))
    controller.queue.done(await controller.queue.take())
    controller.on_event("Pod", "ADDED", a_pod(connection, last, ready="False"))
    assert len(controller.queue) == 0

    controller.on_event("Pod", "MODIFIED", a_pod(connection, last, ready="True"))
    assert len(controller.queue) == 1


def a_pod(connection: Connection, path: str, ready: str) -> Json:
    conditions = [{"type": "Ready", "status": ready}]
    content = {"status": {"conditions": conditions}}
    return connection.api.put(path, content, labels={labels.SESSION_LABEL: "one"})
