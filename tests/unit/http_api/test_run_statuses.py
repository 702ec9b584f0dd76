"""Runs are searched by what their heads know: the list, its pages and the form that chooses."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.suspended_states import SuspendedStates
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads import run_states
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import HeadEnd, HeadEndpoint, Placement
from tinkercloud_api.serve.api_app import Application
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantLimits, TenantSpec
from tinkercloud_protocol.heads.launch import HeldModel, HeldModels
from tinkercloud_protocol.responses.run_states import RunStatus
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-of-somebody-who-searches"
HELD = [
    HeldModel(model_id="idle", model_bytes=2**20, unsaved_steps=3),
    HeldModel(model_id="running", queue_state="running"),
    HeldModel(model_id="queued", queue_state="waiting", queue_reason="the trainer is busy"),
    HeldModel(model_id="limited", queue_state="paused_rate_limit", queue_reason="9 of 9 tokens"),
    HeldModel(model_id="suspended", is_suspended=True),
]
GENERATIONS = {**{each.model_id: "g1" for each in HELD}, "new": None, "own": "g2", "lost": "g0"}
"""Generations of the heads that have the runs; the head of the last one is gone."""
UNASKED = "no request waits for it on this server: it starts only if its client asks again"


class Provider(OneHead):
    """A provider whose run `own` has a head of its own, which the test starts."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()

    def runs(self) -> list[str]:
        return ["own"]

    def has_own_head(self, placement: Placement) -> bool:
        return placement.target == "own"

    async def acquire(self, _placement: Placement) -> HeadEndpoint:
        await self.started.wait()
        return HeadEndpoint("http://own-head", "token", "g2")


@dataclass
class Head:
    """A shared head with `HELD`."""

    is_away: bool = False

    async def serve(self, _request: web.Request) -> web.Response:
        if self.is_away:
            return web.Response(status=503)
        return web.json_response(HeldModels(models=HELD).model_dump(mode="json"))


@dataclass(frozen=True)
class World:
    """A server with runs in all states, and its shared head."""

    http: httpx.AsyncClient
    head: Head
    provider: Provider
    locator: HeadLocator

    async def list(self, **query: str | int) -> httpx.Response:
        """List runs by a query."""
        return await self.http.get("/api/v1/runs", params=query, headers={"x-api-key": KEY})

    async def named(self, status: str) -> dict[str, dict[str, Any]]:
        """Return the runs with a status, by id."""
        found = (await self.list(status=status)).json()
        assert found["total_count"] == len(found["runs"])
        return {each["run_id"]: each for each in found["runs"]}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    fake, head, provider = web.Application(), Head(), Provider()
    fake.router.add_route("*", "/{path:.*}", head.serve)
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), provider)
    async with TestServer(fake) as running, served(app) as url:
        provider.endpoint = HeadEndpoint(str(running.make_url("")).rstrip("/"), "token", "g1")
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            answer = await http.post("/console/login", data={"key": KEY})
            assert answer.status_code == 303, answer.text
            assert app.context is not None
            await add_runs(app.context.catalog)
            yield World(http, head, provider, app.context.locator)


async def add_runs(catalog: Catalog) -> None:
    (key,) = await catalog.keys()
    of_owner = {"owner": key.owner, "user_metadata": {}}
    await catalog.add_session(Session(id="s", tags=[], sdk_version="1", **of_owner))
    for name, generation in {**GENERATIONS, "ended": "g1"}.items():
        spec = {"owner": key.owner, "lora": {"rank": 4}}
        run = TrainingRun(id=name, session_id="s", base_model="tiny", spec=spec, **of_owner)
        run.generation = generation
        await catalog.add_run(run)
    await catalog.delete_run("ended")


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("open", set(GENERATIONS)),
        ("ended", {"ended"}),
        ("live", {"idle", "running", "queued", "limited"}),
        ("running", {"running"}),
        ("idle", {"idle"}),
        ("waiting", {"queued", "limited", "new"}),
        ("suspended", {"suspended"}),
        ("dedicated", {"own"}),
        ("lost", {"lost"}),
        ("on disk", set()),
        ("unknown", set()),
    ],
)
async def test_a_status_finds_the_runs_that_have_it(
    world: World, status: str, found: set[str]
) -> None:
    assert set(await world.named(status)) == found


async def test_runs_that_wait_are_found_with_the_reason(world: World) -> None:
    waiting = await world.named("waiting")

    assert {name: run["queue_reason"] for name, run in waiting.items()} == {
        "queued": "the trainer is busy",
        "limited": "9 of 9 tokens",
        "new": UNASKED,
    }


async def test_a_run_that_no_request_asks_for_after_a_restart_waits_for_the_same_limit(
    world: World,
) -> None:
    world.provider.of_tenants = [
        Tenant("all", TenantSpec(owners=["*"], limits=TenantLimits(models=1)))
    ]

    new = (await world.named("waiting"))["new"]

    assert new["queue_state"] == "paused_capacity"
    assert new["queue_reason"].startswith("tenant 'all' uses 7 of 1 models (limits.models); ")
    assert new["queue_reason"].endswith(UNASKED)


async def test_a_run_that_a_request_asks_for_has_the_reason_of_its_head(world: World) -> None:
    request = asyncio.create_task(world.locator.head_of_run("new"))
    await reached(lambda: "new" in world.locator.placing)

    waiting = await world.named("waiting")

    request.cancel()
    assert waiting["new"]["queue_reason"] == "no reason"


async def test_a_run_whose_own_head_starts_for_its_request_waits(world: World) -> None:
    request = asyncio.create_task(world.locator.head_of_run("own"))
    try:
        await reached(lambda: "own" in world.locator.placing)
        waiting, dedicated = await world.named("waiting"), await world.named("dedicated")
    finally:
        world.provider.started.set()
        await request

    assert dedicated == {"own": waiting["own"]}
    assert waiting["own"]["queue_reason"] == "no reason"


async def test_pages_of_a_status_have_each_run_once(world: World) -> None:
    pages = [(await world.list(status="live", limit=3, offset=at)).json() for at in (0, 3, 6)]

    listed = [[run["run_id"] for run in page["runs"]] for page in pages]
    assert [len(page) for page in listed] == [3, 1, 0]
    assert len({*listed[0], *listed[1]}) == 4
    assert {page["total_count"] for page in pages} == {4}


async def test_a_text_and_a_status_are_searched_together(world: World) -> None:
    found = (await world.list(search="LIMIT", status="waiting")).json()

    assert [run["run_id"] for run in found["runs"]] == ["limited"]


async def test_runs_of_a_head_that_does_not_respond_are_live(world: World) -> None:
    world.head.is_away = True

    live, waiting = await world.named("live"), await world.named("waiting")

    assert set(live) == {each.model_id for each in HELD}
    assert {run["reason"] for run in live.values()} == {
        "its session head is busy, and has not said how it is doing"
    }
    assert set(waiting) == {"new"}


@pytest.mark.parametrize("is_slow", [True, False])
async def test_runs_of_a_store_that_does_not_respond_are_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    async def find(_states: SuspendedStates, _run_id: str) -> None:
        if is_slow:
            await asyncio.Event().wait()
        raise Unavailable("the store is away")

    monkeypatch.setattr(SuspendedStates, "find", find)
    monkeypatch.setattr(run_states, "_READ_SECONDS", 0.01)

    unknown = await world.named("unknown")

    assert set(unknown) == {"lost"}
    assert ("has not responded" if is_slow else "is away") in unknown["lost"]["reason"]
    assert set(await world.named("lost")) == set()


async def test_runs_whose_head_ends_or_has_ended_say_why_and_what_to_do(world: World) -> None:
    world.provider.ends = {
        "own": HeadEnd(is_over=False, reason="its session is being deleted"),
        "new": HeadEnd(is_over=False, reason="it never ran", has_run=False),
        "idle": HeadEnd(is_over=True, reason="its session has ended"),
    }

    ends, lost = await world.named("ending"), (await world.named("lost"))["idle"]
    ending, unstarted = ends["own"], ends["new"]

    assert (ending["reason"], lost["reason"]) == (
        "its session is being deleted",
        "its session has ended",
    )
    assert ending["remedy"].startswith("wait until its last checkpoint is saved")
    assert unstarted["remedy"] == "create the run again: it has no state to continue from"
    assert lost["remedy"] == "continue it from a checkpoint: tinkercloud runs attach idle"
    for path in ("/console/runs", "/console/sessions"):
        page = await world.http.get(path)
        assert all(each in page.text for each in (lost["reason"], lost["remedy"])), path
    problems = (await world.http.get("/console/problems")).text
    # Nobody waits for a run that is ending.
    assert (lost["remedy"] in problems, ending["remedy"] in problems) == (True, False)


async def test_a_run_that_its_head_saves_at_its_end_still_has_its_memory(world: World) -> None:
    world.provider.ends = {"idle": HeadEnd(is_over=False, reason="its session is being deleted")}

    saving = (await world.named("ending"))["idle"]

    assert (saving["memory_bytes"], saving["unsaved_steps"]) == (2**20, 3)
    assert "idle" not in await world.named("idle")


async def test_an_unknown_status_is_refused_with_those_that_there_are(world: World) -> None:
    answer = await world.list(status="sleeping")

    assert answer.status_code == 400
    assert "status: " in answer.json()["detail"]
    assert all(f"'{each}'" in answer.json()["detail"] for each in get_args(RunStatus))


async def test_the_page_offers_every_status_and_finds_its_runs(world: World) -> None:
    for status in get_args(RunStatus):
        page = await world.http.get("/console/runs", params={"status": status})
        assert page.status_code == 200, status
        assert set(re.findall(r'<option value="(.*?)"', page.text)) == {"", *get_args(RunStatus)}
        assert f'<option value="{status}" selected>' in page.text
        listed = set(re.findall(r'name="run" value="(.*?)"', page.text))
        assert listed == set(await world.named(status)), status
    page = await world.http.get("/console/runs", params={"status": "on disk"})
    assert "tinkercloud runs list --all --status &#39;on disk&#39;" in page.text
    assert "has the status <em>on disk: in its journal</em>" in page.text
    assert (await world.http.get("/console/runs?status=sleeping")).status_code == 400
