"""The runner of programs on Kubernetes: what it writes, and which changes it reports."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tinkercloud_api.providers.cluster import kubernetes_programs
from tinkercloud_api.providers.cluster.kubernetes_programs import KubernetesPrograms
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.cluster.session_status import (
    BaseModelView,
    TrainingSessionView,
    read_session,
)
from tinkercloud_api.providers.program_runner import ProgramLaunch, ProgramState
from tinkercloud_crds.pods.program_fields import ProgramStatus
from tinkercloud_kube.client import ObjectRef
from tinkercloud_protocol.programs.program_messages import API_KEY, BASE_MODEL, ProgramPhase
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_testing.resources.sessions import (
    MODEL_NAME,
    PROGRAM,
    PROGRAMS,
    Json,
    a_base_model,
    a_session_manifest,
)

MODEL_ID = "s:train:0"
LAUNCH = ProgramLaunch(
    program_id="program-1",
    owner="ada",
    module="recipes.train",
    source=None,
    args=(),
    model_id=MODEL_ID,
    environment={API_KEY: "tml-secret", BASE_MODEL: MODEL_NAME},
)
ALONE = replace(LAUNCH, model_id=None)


@dataclass
class Sessions:
    """Stands in for an informer; `put` announces a change."""

    found: dict[str, TrainingSessionView] = field(default_factory=dict)
    changes: asyncio.Condition = field(default_factory=asyncio.Condition)

    def get(self, name: str) -> TrainingSessionView | None:
        return self.found.get(name)

    def objects(self) -> list[TrainingSessionView]:
        return list(self.found.values())

    async def changed(self, name: str, since: TrainingSessionView | None) -> None:
        async with self.changes:
            await self.changes.wait_for(lambda: self.get(name) is not since)

    async def any_change(self) -> None:
        async with self.changes:
            await self.changes.wait()

    async def put(self, session: TrainingSessionView) -> None:
        async with self.changes:
            self.found[session.name] = session
            self.changes.notify_all()

    async def remove(self, name: str) -> None:
        async with self.changes:
            del self.found[name]
            self.changes.notify_all()


@dataclass
class Api:
    """Records writes."""

    created: list[Json] = field(default_factory=list)
    patches: list[tuple[str, Json]] = field(default_factory=list)

    async def create(self, manifest: Json, *, is_strict: bool = False) -> Json:
        del is_strict
        self.created.append(manifest)
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "uid-1"}}

    async def merge(self, ref: ObjectRef, patch: Json) -> Json:
        self.patches.append((ref.name, patch))
        return {}


@dataclass
class Provider:
    """Stands in for the provider of session heads."""

    sessions: Sessions = field(default_factory=Sessions)
    api: Api = field(default_factory=Api)
    offer: Json | None = field(default_factory=lambda: PROGRAMS)

    def base_model(self, name: str) -> BaseModelView | None:
        spec = a_base_model(programs=self.offer)
        view = BaseModelView("model", spec, is_offered=True, pool=None)
        return view if name == MODEL_NAME else None


def a_view(name: str = "one", **spec: Any) -> TrainingSessionView:
    manifest = a_session_manifest(name, **{"modelId": MODEL_ID, **spec})
    manifest["metadata"] |= {"uid": "u", "generation": 1, "creationTimestamp": "2026-01-01"}
    return read_session(manifest)


def running(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


async def a_runner(provider: Provider) -> tuple[KubernetesPrograms, asyncio.Queue[ProgramState]]:
    runner = KubernetesPrograms(cast("KubernetesProvider", provider))
    reported = asyncio.Queue[ProgramState]()
    await runner.start(lambda _program_id, state: reported.put_nowait(state))
    return runner, reported


def test_a_program_of_a_model_is_added_to_its_session() -> None:
    async def steps() -> None:
        provider = Provider()
        runner, _ = await a_runner(provider)
        waiting = asyncio.create_task(runner.run(LAUNCH))
        await asyncio.sleep(0)
        await provider.sessions.put(a_view())
        await waiting
        await runner.close()

        [secret] = provider.api.created
        [(name, patch)] = provider.api.patches
        program = patch["spec"]["program"]
        assert (name, program["id"]) == ("one", "program-1")
        assert program["apiKeySecret"]["name"] == secret["metadata"]["name"]
        assert secret["metadata"]["ownerReferences"][0]["name"] == "one"

    running(steps())


def test_a_program_of_no_model_gets_a_session() -> None:
    async def steps() -> None:
        provider = Provider()
        runner, _ = await a_runner(provider)
        await runner.run(ALONE)
        await runner.close()

        session, secret = provider.api.created
        assert session["kind"] == "TrainingSession"
        assert session["spec"]["baseModel"] == MODEL_NAME
        assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-1"

    running(steps())


def test_nobody_runs_a_program_next_to_the_model_of_another_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_programs, "_SESSION_SECONDS", 0.0)

    async def steps() -> None:
        provider = Provider()
        await provider.sessions.put(a_view(owner="grace"))
        runner, _ = await a_runner(provider)
        with pytest.raises(NotFound, match=MODEL_ID):
            await runner.run(LAUNCH)
        assert provider.api.created == []

    running(steps())


@pytest.mark.parametrize(
    ("launch", "offer", "says"),
    [
        (ALONE, None, "allows no programs; an administrator can set spec.programs"),
        (replace(ALONE, environment={API_KEY: "k"}), PROGRAMS, "base_model: required"),
        (replace(ALONE, environment={BASE_MODEL: "x"}), PROGRAMS, "'x' is not served here"),
    ],
)
def test_a_program_that_no_base_model_allows_is_refused(
    launch: ProgramLaunch, offer: Json | None, says: str
) -> None:
    async def steps() -> None:
        provider = Provider(offer=offer)
        runner, _ = await a_runner(provider)
        with pytest.raises(InvalidRequest, match=says):
            await runner.run(launch)
        assert provider.api.created == []

    running(steps())


def test_a_model_has_one_program_at_a_time() -> None:
    async def steps() -> None:
        provider = Provider()
        program = PROGRAM | {"id": "earlier"}
        session = a_view(program=program)
        await provider.sessions.put(session)
        runner, _ = await a_runner(provider)
        with pytest.raises(InvalidRequest, match="already has a program"):
            await runner.run(LAUNCH)

        ended = ProgramStatus(id="earlier", phase="Succeeded")
        await provider.sessions.put(replace(session, program=ended))
        await runner.run(LAUNCH)
        await runner.close()
        assert len(provider.api.patches) == 1

    running(steps())


def test_changes_are_reported_until_the_end_also_by_the_next_server() -> None:
    async def steps() -> None:
        provider = Provider()
        session = a_view(program=PROGRAM | {"id": "program-1"})
        await provider.sessions.put(session)
        runner, reported = await a_runner(provider)

        assert await runner.resume(LAUNCH)
        for phase in ("Running", "Failed"):
            status = ProgramStatus.model_validate({"id": "program-1", "phase": phase})
            await provider.sessions.put(replace(session, program=status))
            assert (await reported.get()).phase is ProgramPhase(phase)

        assert not await runner.resume(replace(LAUNCH, program_id="unknown"))
        await runner.close()

    running(steps())


def test_a_program_whose_session_is_deleted_has_stopped() -> None:
    async def steps() -> None:
        provider = Provider()
        await provider.sessions.put(a_view(program=PROGRAM | {"id": "program-1"}))
        runner, reported = await a_runner(provider)
        await runner.resume(LAUNCH)
        await asyncio.sleep(0)

        await provider.sessions.remove("one")
        last = await reported.get()

        assert last.phase is ProgramPhase.STOPPED
        assert last.message == "TrainingSession one was deleted"

    running(steps())


def test_stopping_sets_stop() -> None:
    async def steps() -> None:
        provider = Provider()
        await provider.sessions.put(a_view(program=PROGRAM | {"id": "program-1"}))
        runner, _ = await a_runner(provider)

        await runner.halt("program-1")
        await runner.halt("unknown")

        assert [patch["spec"] for _, patch in provider.api.patches] == [{"program": {"stop": True}}]

    running(steps())
