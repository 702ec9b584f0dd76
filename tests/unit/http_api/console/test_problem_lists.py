"""What needs attention: who sees it, since when, and on which page."""

import html
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_api.access.auth import ProjectRole
from tinkercloud_api.catalog.runs.program_rows import ProgramCatalog
from tinkercloud_api.catalog.schema.connection import open_database
from tinkercloud_api.catalog.schema.tables import Program, Session, TrainingRun, Upload, now
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.providers.base import FailingCondition, HeadEndpoint
from tinkercloud_api.runs import server_disks
from tinkercloud_api.serve.api_app import Application
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantLimits, TenantSpec
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import HeldModel, HeldModels
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.clients.console_browser import SCRIPT
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served
from tinkercloud_worker.head.wire.token_limits import TokenLimits

KEY = "tml-of-an-admin-with-problems"
NOW = now()
ROOM = 100
"""Bytes that an owner may store."""


@dataclass(frozen=True)
class World:
    """A server of an admin, `ann` and `bob`."""

    context: Context
    provider: OneHead
    url: str
    keys: dict[str, str]
    state_dir: Path

    async def problems(self, owner: str) -> list[dict[str, Any]]:
        """Return what an owner is shown."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            answer = await http.get("/api/v1/problems", headers={"x-api-key": self.keys[owner]})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["problems"])

    async def subjects(self, owner: str) -> list[str]:
        """Return the subjects of the problems that an owner is shown."""
        return [each["subject"] for each in await self.problems(owner)]

    async def page(self, owner: str, path: str = "/console/problems") -> httpx.Response:
        """Open a page as an owner."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            await http.post("/console/login", data={"key": self.keys[owner]})
            return await http.get(path)

    async def add_run(
        self, name: str, owner: str, project: str | None = None, generation: str | None = None
    ) -> None:
        """Add a run of an owner: one that has ended, or that a head of a generation has."""
        catalog, of_owner = self.context.catalog, {"owner": owner, "user_metadata": {}}
        session = Session(id=f"of {name}", tags=[], sdk_version="1", project_id=project, **of_owner)
        await catalog.add_session(session)
        spec = {"owner": owner, "lora": {"rank": 4}}
        run = TrainingRun(id=name, session_id=session.id, base_model="tiny", spec=spec, **of_owner)
        run.generation = generation
        run.deleted_at = NOW if generation is None else None
        await catalog.add_run(run)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(server_disks, "LOW_DISK_BYTES", 0)
    provider = OneHead()
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY, max_checkpoint_bytes_per_owner=ROOM)
    app = Application(settings, provider)
    async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        keys = {"admin": KEY}
        for owner in ("ann", "bob"):
            wanted = {"name": "test", "role": "user"}
            admin = {"x-api-key": KEY}
            made = await http.post(f"/api/v1/users/{owner}/keys", json=wanted, headers=admin)
            assert made.status_code == 200, made.text
            keys[owner] = made.json()["key"]
        assert app.context is not None
        yield World(app.context, provider, url, keys, tmp_path)


def failing(name: str, owner: str | None, run: str | None = None, **fields: Any) -> Any:
    kind: Literal["pool", "session"] = "pool" if owner is None else "session"
    said = {"reason": f"PoolFull: {name}", "remedy": "wait", "since": NOW, **fields}
    return FailingCondition(kind=kind, name=name, owner=owner, model_id=run, **said)


async def test_conditions_are_shown_to_their_owners_members_of_their_projects_and_admins(
    world: World,
) -> None:
    project = await world.context.catalog.add_project(None, "team", "ann")
    await world.context.catalog.set_member(project.id, "bob", ProjectRole.VIEWER)
    await world.add_run("a:train:0", "ann", project.id)
    await world.add_run("b:train:0", "ann")
    world.provider.conditions = [
        failing("shared", "ann", "a:train:0"),
        failing("own", "ann", "b:train:0"),
        failing("sampler", "ann"),
        failing("pool", None),
    ]

    assert await world.subjects("admin") == ["shared", "own", "sampler", "pool"]
    assert await world.subjects("ann") == ["shared", "own", "sampler"]
    assert await world.subjects("bob") == ["shared"]
    assert 'href="/console/runs/a:train:0"' in (await world.page("bob")).text


async def test_problems_are_listed_the_newest_first_with_their_times_in_utc(world: World) -> None:
    hours = {"old": 3, "new": 1, "older": 5}
    world.provider.conditions = [
        failing(name, "ann", since=NOW - timedelta(hours=ago)) for name, ago in hours.items()
    ]

    assert await world.subjects("ann") == ["new", "old", "older"]
    times = [each["since"] for each in await world.problems("ann")]
    assert all(each.endswith("Z") for each in times)
    shown = re.findall(r"<td>([0-9-]+T[0-9:]+Z)</td>", (await world.page("ann")).text)
    assert shown == [f"{each[:19]}Z" for each in times]


async def test_a_problem_without_a_time_is_there_since_somebody_has_seen_it(world: World) -> None:
    world.provider.conditions = [failing("x", "ann", since=None)]

    first = await world.problems("ann")

    assert await world.problems("admin") == first
    world.provider.conditions[0] = failing("x", "ann", since=None, remedy="do something else")
    assert (await world.problems("ann"))[0]["since"] > first[0]["since"]


async def test_only_admins_are_shown_full_disks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await world.subjects("admin") == []
    monkeypatch.setattr(server_disks, "LOW_DISK_BYTES", 1 << 62)

    (disk,) = await world.problems("admin")

    assert (disk["kind"], disk["subject"]) == ("disk", str(world.state_dir))
    assert "nearly full" in disk["reason"]
    assert await world.subjects("ann") == []


async def test_admins_are_shown_the_full_quotas_of_all_tenants_and_others_their_own(
    world: World,
) -> None:
    limits = TenantLimits(storage_bytes=0)
    world.provider.of_tenants = tuple(
        Tenant(f"of {owner}", TenantSpec(owners=[owner], limits=limits)) for owner in ("ann", "bob")
    )

    assert await world.subjects("ann") == ["storageBytes of tenant of ann"]
    assert set(await world.subjects("admin")) == {
        "storageBytes of tenant of ann",
        "storageBytes of tenant of bob",
    }


async def test_owners_for_whose_checkpoints_there_is_no_room_are_shown_to_them_and_to_admins(
    world: World,
) -> None:
    for owner, size in (("ann", ROOM - 40), ("bob", ROOM - 41)):
        path = CheckpointPath(f"{owner}:train:0", CheckpointKind.TRAINING, "x")
        stored = {"a": {"size_bytes": size, "sha256": "x"}}
        manifest = {"tinker_path": str(path), "owner": owner, "base_model": "tiny", "step": 1}
        manifest |= {"lora": None, "created_at": NOW, "files": stored}
        await world.context.catalog.index_checkpoint(CheckpointManifest.model_validate(manifest))
        upload = Upload(id=f"of-{owner}", owner=owner, manifest={}, adapter_config={})
        upload.size_bytes, upload.expires_at = 40, NOW + timedelta(hours=1)
        assert await world.context.catalog.add_upload(upload, max_open=1)

    (full,) = await world.problems("ann")

    limit = world.context.settings.max_checkpoint_bytes_per_owner
    with pytest.raises(InvalidRequest, match="max_checkpoint_bytes_per_owner"):
        await world.context.checkpoints.check_room("ann", 1, limit)
    assert (full["kind"], full["owner"]) == ("quota", "ann")
    assert full["subject"] == "max_checkpoint_bytes_per_owner of owner ann"
    assert f"use {ROOM} of {ROOM} bytes" in full["reason"]
    assert "delete checkpoints" in full["remedy"]
    assert await world.subjects("admin") == [full["subject"]]
    assert await world.subjects("bob") == []
    assert full["subject"] in (await world.page("ann")).text
    await world.context.checkpoints.check_room("bob", 1, limit)


async def test_an_owner_whose_runs_wait_for_tokens_of_the_minute_is_shown_once_and_not_to_members(
    world: World,
) -> None:
    limits = TokenLimits()
    limits.set(OwnerLimits(owner="ann", tenant="research", tokens_per_minute=60))
    limits.spend("ann", 600)
    waits = f"request forward_backward 1 is paused: {limits.why_waiting('ann')}"
    unread = "request forward_backward 2 is paused: limits.max_result_bytes is 1"
    project = await world.context.catalog.add_project(None, "team", "ann")
    await world.context.catalog.set_member(project.id, "bob", ProjectRole.VIEWER)
    reasons = {"a:train:0": waits, "b:train:0": waits, "c:train:0": unread}
    held = [
        HeldModel(model_id=name, queue_state="paused_rate_limit", queue_reason=reason)
        for name, reason in reasons.items()
    ]

    async def models(_request: web.Request) -> web.Response:
        return web.json_response(HeldModels(models=held).model_dump(mode="json"))

    for name in reasons:
        owner = "bob" if name.startswith("c") else "ann"
        await world.add_run(name, owner, project.id, generation="g1")
    fake = web.Application()
    fake.router.add_route("*", "/{path:.*}", models)
    async with TestServer(fake) as head:
        url = str(head.make_url("")).rstrip("/")
        world.provider.endpoint = HeadEndpoint(url, "token", "g1")
        quotas = {
            asking: [each for each in await world.problems(asking) if each["kind"] == "quota"]
            for asking in world.keys
        }
        runs = [each["run_id"] for each in await world.problems("bob")]

    (waiting,) = quotas["ann"]
    assert (waiting["subject"], waiting["reason"]) == ("tokensPerMinute of owner ann", waits)
    assert "raise the limit that the reason names" in waiting["remedy"]
    assert [each["subject"] for each in quotas["admin"]] == [waiting["subject"]]
    assert quotas["bob"] == []
    assert set(runs) == set(reasons)


async def test_programs_that_have_failed_in_the_last_days_are_problems_of_their_owner(
    world: World,
) -> None:
    engine = open_database(world.context.settings.catalog_url)
    records = ProgramCatalog(engine)
    for name, ago, phase in (("one", 1, "Failed"), ("old", 8, "Failed"), ("well", 1, "Succeeded")):
        described = {"owner": "ann", "name": name, "args": [], "phase": phase, "message": SCRIPT}
        finished = NOW - timedelta(days=ago)
        await records.add(Program(id=name, finished_at=finished, **described))
    await engine.dispose()

    (failed,) = await world.problems("ann")

    assert (failed["kind"], failed["subject"]) == ("program", "one")
    assert "tinkercloud programs logs one" in failed["remedy"]
    assert await world.subjects("bob") == []
    assert 'href="/console/programs/one"' in (await world.page("admin")).text


@pytest.mark.parametrize("words", [SCRIPT, "\0\x1b[31m\u202e", "<b>" * 400_000])
async def test_words_of_others_do_no_harm_on_the_page(world: World, words: str) -> None:
    world.provider.conditions = [failing("x", "ann", reason=words, remedy=words)]

    page = await world.page("ann")

    assert page.status_code == 200
    assert not re.search(r"<script>|<b>|[\0\x1b\u202e]", page.text)
    assert "x" in html.unescape(page.text)
    assert len(page.text) < 50_000
