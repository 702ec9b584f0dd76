"""A save of a head takes minutes, and only the session that it belongs to waits for it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tinkercloud_crds import labels
from tinkercloud_operator import metrics
from tinkercloud_operator.decide.session.actions import HeadRequest, SaveRequest
from tinkercloud_operator.run.cluster.head_calls import HeadClient, SaveFailed, SaveResult
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, Json
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import a_base_model_manifest, a_session_manifest
from tinkercloud_testing.serving.metrics import metric_value

CORE, OWN = "/api/v1/namespaces/default", "/apis/tinkercloud.dev/v1alpha1/namespaces/default"
RAY_CLUSTERS = "/apis/ray.io/v1/namespaces/default/rayclusters"
AWAY = SaveFailed("the store is away")
SAVE = SaveRequest("suspend", "http://one-head", "uid-of-head-0", 60)


class StubHeadClient(HeadClient):
    """A head client whose saves complete when a test says so."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, HeadRequest]] = []
        self.results: asyncio.Queue[SaveResult | SaveFailed] = asyncio.Queue()

    async def save(self, session: str, request: HeadRequest) -> SaveResult:
        self.requests.append((session, request))
        result = await self.results.get()
        if isinstance(result, SaveFailed):
            raise result
        return result


@pytest.fixture
def client() -> StubHeadClient:
    return StubHeadClient()


@pytest.fixture
async def saved() -> asyncio.Queue[str]:
    """The sessions whose heads have saved their state."""
    return asyncio.Queue()


@pytest.fixture
async def saver(client: StubHeadClient, saved: asyncio.Queue[str]) -> AsyncIterator[HeadSaver]:
    made = HeadSaver(client, saved.put_nowait)
    working = asyncio.create_task(made.work())
    yield made
    working.cancel()


async def test_a_failed_save_is_counted(
    saver: HeadSaver, client: StubHeadClient, saved: asyncio.Queue[str]
) -> None:
    failed = metrics.SAVES_FAILED.labels("suspend")
    before = metric_value(failed)

    for result in (AWAY, SaveResult(None)):
        saver.submit("one", SAVE)
        client.results.put_nowait(result)
        await reached(lambda: not saver.pending("one"))

    assert metric_value(failed) == before + 1


async def test_failures_are_counted_with_their_words_until_the_save_completes(
    saver: HeadSaver, client: StubHeadClient, saved: asyncio.Queue[str]
) -> None:
    for _ in range(2):
        saver.submit("one", SAVE)
        client.results.put_nowait(AWAY)
        await reached(lambda: not saver.pending("one"))
    failure = saver.failed("one")["suspend", "uid-of-head-0"]

    saver.submit("one", SAVE)
    client.results.put_nowait(SaveResult(None))
    await saved.get()

    assert (failure.message, failure.attempts) == ("the store is away", 2)
    assert saver.failed("one") == {}


async def test_a_head_gets_one_save_request_at_a_time_and_another_after_a_failure(
    saver: HeadSaver, client: StubHeadClient, saved: asyncio.Queue[str]
) -> None:
    for _ in range(3):
        saver.submit("one", SAVE)
        await run_other_tasks()
    assert len(client.requests) == 1
    assert saver.pending("one") == {("suspend", "uid-of-head-0")}

    client.results.put_nowait(AWAY)
    await run_other_tasks()
    assert saver.pending("one") == frozenset()
    saver.submit("one", SAVE)
    client.results.put_nowait(SaveResult("tinker://one/weights/last"))

    assert await saved.get() == "one"
    assert len(client.requests) == 2
    assert saver.completed("one") == {("suspend", "uid-of-head-0"): "tinker://one/weights/last"}


async def test_the_result_of_a_save_is_dropped_if_its_session_is_gone(
    saver: HeadSaver, client: StubHeadClient, saved: asyncio.Queue[str]
) -> None:
    saver.submit("one", SAVE)
    await run_other_tasks()

    saver.forget("one")
    client.results.put_nowait(SaveResult(None))
    await run_other_tasks()

    assert saver.completed("one") == {}
    assert saved.empty()


async def test_other_sessions_are_reconciled_while_a_head_saves_its_state(
    connection: Connection, client: StubHeadClient
) -> None:
    connection.api.put(f"{OWN}/basemodels/model", a_base_model_manifest())
    stopping = connection.api.put(f"{OWN}/trainingsessions/one", a_session_manifest(suspend=True))
    put_running(connection, stopping)
    controller = Controller(connection.cluster, client, Settings(max_concurrent=1))
    await controller.resync()
    working = [asyncio.create_task(controller.work()), asyncio.create_task(controller.save_heads())]

    async with asyncio.timeout(10):
        while not client.requests:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        other = connection.api.put(f"{OWN}/trainingsessions/two", a_session_manifest("two"))
        controller.on_event("TrainingSession", "ADDED", other)
        while f"{RAY_CLUSTERS}/two" not in connection.api.objects:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert reason(connection, "one") == "Suspending"
        client.results.put_nowait(SaveResult(None))
        while f"{RAY_CLUSTERS}/one" in connection.api.objects:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    assert [name for name, _ in client.requests] == ["one"]
    for task in working:
        task.cancel()


async def test_a_status_write_that_fails_before_a_save_request_is_retried_with_backoff(
    connection: Connection, client: StubHeadClient
) -> None:
    connection.api.put(f"{OWN}/basemodels/model", a_base_model_manifest())
    stopping = connection.api.put(f"{OWN}/trainingsessions/one", a_session_manifest(suspend=True))
    put_running(connection, stopping)
    connection.api.refused["status"] = 500
    controller = Controller(connection.cluster, client, Settings(max_concurrent=1))
    await controller.resync()
    working = asyncio.create_task(controller.work())

    async with asyncio.timeout(10):
        while not status_writes(connection, "one"):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)

    assert status_writes(connection, "one") == 1
    assert client.requests == []
    working.cancel()


async def run_other_tasks() -> None:
    """Let other tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def put_running(connection: Connection, session: Json) -> None:
    """Store a session's RayCluster, and its head's pod, which is ready."""
    metadata = session["metadata"]
    owner = {"kind": "TrainingSession", "name": metadata["name"], "uid": metadata["uid"]}
    own = {labels.SESSION_LABEL: metadata["name"]}
    path = f"{RAY_CLUSTERS}/{metadata['name']}"
    cluster = connection.api.put(path, {}, labels=own, ownerReferences=[owner])
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
    containers = [{"name": "head", "started": True, "ready": True, "restartCount": 0}]
    connection.api.put(
        f"{CORE}/pods/{metadata['name']}-head-0",
        {"status": {"conditions": conditions, "containerStatuses": containers}},
        labels={**own, labels.COMPONENT_LABEL: "head"},
        ownerReferences=[{"kind": "RayCluster", "uid": cluster["metadata"]["uid"]}],
    )


def reason(connection: Connection, session: str) -> str:
    """Return why a session is not Ready."""
    conditions = connection.api.objects[f"{OWN}/trainingsessions/{session}"]["status"]["conditions"]
    return next(str(each["reason"]) for each in conditions if each["type"] == "Ready")


def status_writes(connection: Connection, session: str) -> int:
    """Return how often a session's status was written, including failed attempts."""
    return sum(request.endswith(f"/{session}/status") for request in connection.api.requests)
