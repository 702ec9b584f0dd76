"""Heads take minutes to save what they hold, and nobody but their own session waits for them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tinkercloud_crds import labels
from tinkercloud_operator import metrics
from tinkercloud_operator.decide.actions import AskHead
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.run.head_client import Answer, Heads
from tinkercloud_operator.run.save_requests import Questions
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.memory_api import Connection, Json
from tinkercloud_testing.sessions import a_base_model_manifest, a_session_manifest
from tinkercloud_testing.waiting import reached

CORE, OWN = "/api/v1/namespaces/default", "/apis/tinkercloud.dev/v1alpha1/namespaces/default"
RAY_CLUSTERS = "/apis/ray.io/v1/namespaces/default/rayclusters"
QUESTION = AskHead("suspend", "http://one-head", "uid-of-head-0", 60)


class SlowHeads(Heads):
    """Heads that answer when they are let."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, AskHead]] = []
        self.answers: asyncio.Queue[Answer | None] = asyncio.Queue()

    async def ask(self, session: str, question: AskHead) -> Answer | None:
        self.asked.append((session, question))
        return await self.answers.get()


@pytest.fixture
def heads() -> SlowHeads:
    return SlowHeads()


@pytest.fixture
async def answered() -> asyncio.Queue[str]:
    """The sessions whose heads have answered."""
    return asyncio.Queue()


@pytest.fixture
async def questions(heads: SlowHeads, answered: asyncio.Queue[str]) -> AsyncIterator[Questions]:
    made = Questions(heads, answered.put_nowait)
    working = asyncio.create_task(made.work())
    yield made
    working.cancel()


async def test_a_head_that_did_not_save_is_counted(
    questions: Questions, heads: SlowHeads, answered: asyncio.Queue[str]
) -> None:
    failed = metrics.SAVES_FAILED.labels("suspend")._value
    before = failed.get()

    for answer in (None, Answer(None)):
        questions.ask("one", QUESTION)
        heads.answers.put_nowait(answer)
        await reached(lambda: not questions.asked("one"))

    assert failed.get() == before + 1


async def test_a_head_is_asked_once_at_a_time_and_again_if_it_did_not_do_it(
    questions: Questions, heads: SlowHeads, answered: asyncio.Queue[str]
) -> None:
    for _ in range(3):
        questions.ask("one", QUESTION)
        await turns()
    assert len(heads.asked) == 1
    assert questions.asked("one") == {("suspend", "uid-of-head-0")}

    heads.answers.put_nowait(None)
    await turns()
    assert questions.asked("one") == frozenset()
    questions.ask("one", QUESTION)
    heads.answers.put_nowait(Answer("tinker://one/weights/last"))

    assert await answered.get() == "one"
    assert len(heads.asked) == 2
    assert questions.answers("one") == {("suspend", "uid-of-head-0"): "tinker://one/weights/last"}


async def test_the_answer_about_a_session_that_is_gone_by_then_is_forgotten(
    questions: Questions, heads: SlowHeads, answered: asyncio.Queue[str]
) -> None:
    questions.ask("one", QUESTION)
    await turns()

    questions.forget("one")
    heads.answers.put_nowait(Answer(None))
    await turns()

    assert questions.answers("one") == {}
    assert answered.empty()


async def test_while_a_head_saves_its_session_says_so_and_others_are_looked_at(
    connection: Connection, heads: SlowHeads
) -> None:
    connection.api.put(f"{OWN}/basemodels/model", a_base_model_manifest())
    stopping = connection.api.put(f"{OWN}/trainingsessions/one", a_session_manifest(suspend=True))
    put_running(connection, stopping)
    controller = Controller(connection.cluster, heads, Settings(max_concurrent=1))
    await controller.resync()
    working = [asyncio.create_task(controller.work()), asyncio.create_task(controller.ask_heads())]

    async with asyncio.timeout(10):
        while not heads.asked:  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.01)
        other = connection.api.put(f"{OWN}/trainingsessions/two", a_session_manifest("two"))
        controller.hear("TrainingSession", "ADDED", other)
        while f"{RAY_CLUSTERS}/two" not in connection.api.objects:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert reason(connection, "one") == "Suspending"
        heads.answers.put_nowait(Answer(None))
        while f"{RAY_CLUSTERS}/one" in connection.api.objects:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    assert [name for name, _ in heads.asked] == ["one"]
    for task in working:
        task.cancel()


async def test_a_status_that_can_not_be_written_before_a_head_is_asked_is_tried_with_pauses(
    connection: Connection, heads: SlowHeads
) -> None:
    connection.api.put(f"{OWN}/basemodels/model", a_base_model_manifest())
    stopping = connection.api.put(f"{OWN}/trainingsessions/one", a_session_manifest(suspend=True))
    put_running(connection, stopping)
    connection.api.refused["status"] = 500
    controller = Controller(connection.cluster, heads, Settings(max_concurrent=1))
    await controller.resync()
    working = asyncio.create_task(controller.work())

    async with asyncio.timeout(10):
        while not status_writes(connection, "one"):  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)

    assert status_writes(connection, "one") == 1
    assert heads.asked == []
    working.cancel()


async def turns() -> None:
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
    """Return how often a session's status was written, or tried to be."""
    return sum(asked.endswith(f"/{session}/status") for asked in connection.api.requests)
