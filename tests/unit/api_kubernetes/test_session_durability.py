"""Sessions are annotated as heads report the durability of their runs."""

from collections.abc import AsyncIterator

import pytest

from tinkercloud_api.providers.cluster.session_durability import DurabilityAnnotator
from tinkercloud_api.providers.cluster.session_status import TrainingSessionView, read_session
from tinkercloud_protocol.heads.durability_settings import DurabilityReport
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, a_memory_api
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import a_session_manifest

FULL = "the journal can't be written (No space left on device)"
PATH = "/apis/tinkercloud.dev/v1alpha1/namespaces/default/trainingsessions"


def run_of(session: str) -> str:
    return f"{session}:train:0"


class Sessions:
    """Two sessions of runs `one` and `two`, and what annotates them."""

    def __init__(self, connection: Connection) -> None:
        self._api = connection.api
        for name in ("one", "two"):
            manifest = a_session_manifest(name, modelId=run_of(name))
            self._api.put(f"{PATH}/{name}", manifest, generation=1)
        self.annotator = DurabilityAnnotator(connection.cluster, self.views)

    def views(self) -> list[TrainingSessionView]:
        return [read_session(self._api.objects[f"{PATH}/{name}"]) for name in ("one", "two")]

    def degraded(self) -> list[str | None]:
        return [view.degraded for view in self.views()]

    def report(self, head: str, **models: str | None) -> None:
        states = {run_of(name): reason for name, reason in models.items()}
        self.annotator.note(DurabilityReport(generation=head, models=states))

    def refuse(self, status: int | None) -> None:
        """Refuse writes of both sessions, or accept them again."""
        self._api.refused = {} if status is None else dict.fromkeys(("one", "two"), status)

    def writes(self) -> int:
        return len(self._api.writes)


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with a_memory_api() as connection:
        made = Sessions(connection)
        yield made
        await made.annotator.stop()


async def test_a_session_is_annotated_while_its_run_is_degraded(sessions: Sessions) -> None:
    sessions.report("head", one=FULL, two=None)
    await reached(lambda: sessions.degraded() == [FULL, None])

    sessions.report("head", one=None, two=None)
    await reached(lambda: sessions.degraded() == [None, None])
    assert sessions.writes() == 2


@pytest.mark.parametrize("is_same_process", [True, False], ids=["same replica", "another replica"])
async def test_the_next_head_corrects_what_the_last_one_said_once_it_has_the_run(
    sessions: Sessions, *, is_same_process: bool
) -> None:
    sessions.report("before", one=FULL)
    await reached(lambda: sessions.degraded() == [FULL, None])
    if is_same_process:
        sessions.annotator.forget("before")
    else:
        await sessions.annotator.stop()
        sessions.annotator._reported.clear()
        sessions.annotator._reporters.clear()

    sessions.report("after")
    sessions.report("after", one=None)

    await reached(lambda: sessions.degraded() == [None, None])


async def test_a_run_that_was_suspended_or_deleted_is_not_degraded_any_more(
    sessions: Sessions,
) -> None:
    sessions.report("head", one=FULL, two=FULL)
    await reached(lambda: sessions.degraded() == [FULL, FULL])

    sessions.report("head", two=FULL)

    await reached(lambda: sessions.degraded() == [None, FULL])


async def test_a_head_that_drops_a_run_late_does_not_speak_for_its_new_head(
    sessions: Sessions,
) -> None:
    sessions.report("old", one=None)
    sessions.report("new", one=FULL, two=FULL)
    sessions.report("old")

    await reached(lambda: sessions.degraded() == [FULL, FULL])
    sessions.report("new", one=FULL, two=None)
    await reached(lambda: sessions.degraded() == [FULL, None])


async def test_an_annotation_that_is_refused_is_tried_again(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_api.providers.cluster.session_durability._RETRY_SECONDS", 0.01)
    sessions.refuse(403)
    sessions.report("head", one=FULL, two=FULL)
    await reached(lambda: sessions.writes() >= 4)

    sessions.refuse(None)

    await reached(lambda: sessions.degraded() == [FULL, FULL])
