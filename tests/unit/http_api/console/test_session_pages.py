"""The page about sessions: which are listed, for whom, and with what they wait for."""

import html
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_api.access.auth import ProjectRole
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.launch import HeldModel, HeldModels
from tinkercloud_protocol.responses.listings import SessionStatus
from tinkercloud_testing.clients.console_browser import SCRIPT
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-of-an-admin-with-sessions"
HELD = [
    HeldModel(model_id="busy:train:0", queue_state="running", step=7, tokens_per_minute=90.0),
    HeldModel(model_id="busy:train:1", step=3, tokens_per_minute=10.0),
    HeldModel(model_id="stuck:train:0", queue_state="waiting", queue_reason="request 4 is missing"),
]


@dataclass(frozen=True)
class World:
    """A server with sessions of `ann` and `bob`, of which `shared` belongs to a project."""

    context: Context
    url: str
    keys: dict[str, str]
    project: str

    async def page(self, owner: str, /, **query: str) -> httpx.Response:
        """Open the page as an owner."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            await http.post("/console/login", data={"key": self.keys[owner]})
            return await http.get("/console/sessions", params=query)

    async def listed(self, owner: str, /, **query: str) -> list[dict[str, Any]]:
        """Return what the JSON twin lists for an owner, which the page shows too."""
        page = await self.page(owner, **query)
        assert page.status_code == 200, page.text
        (twin,) = re.findall(r"GET (/api/v1/session_usage\S+)</code>", html.unescape(page.text))
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            answer = await http.get(twin, headers={"x-api-key": self.keys[owner]})
        found = answer.json()
        assert f"{found['total_count']} sessions" in page.text or not found["sessions"]
        for each in found["sessions"]:
            assert f"<small>{each['session_id']}</small>" in page.text
        return list(found["sessions"])

    async def names(self, owner: str, /, **query: str) -> set[str]:
        """Return the ids of the sessions that the page and its JSON twin list for an owner."""
        return {each["session_id"] for each in await self.listed(owner, **query)}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async def serve(_request: web.Request) -> web.Response:
        return web.json_response(HeldModels(models=HELD).model_dump(mode="json"))

    fake, provider = web.Application(), OneHead()
    fake.router.add_route("*", "/{path:.*}", serve)
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), provider)
    async with TestServer(fake) as running, served(app) as url:
        provider.endpoint = HeadEndpoint(str(running.make_url("")).rstrip("/"), "token", "g1")
        keys = {"admin": KEY}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers={"x-api-key": KEY}) as http:
            for owner in ("ann", "bob"):
                made = await http.post(f"/api/v1/users/{owner}/keys", json={"name": "test"})
                keys[owner] = made.json()["key"]
        assert app.context is not None
        project = await app.context.catalog.add_project(None, "team", "ann")
        await app.context.catalog.set_member(project.id, "bob", ProjectRole.VIEWER)
        await add_sessions(app.context, project.id)
        yield World(app.context, url, keys, project.id)


async def add_runs(context: Context, session: str, number: int) -> None:
    """Add runs of `bob`, the last used of all."""
    for each in range(1, number + 1):
        run = TrainingRun(
            id=f"{session}:train:{each}",
            session_id=session,
            owner="bob",
            base_model="tiny",
            spec={"owner": "bob", "lora": {"rank": 4}},
            user_metadata={},
        )
        run.generation = "g1"
        await context.catalog.add_run(run)


async def add_sessions(context: Context, project: str) -> None:
    catalog = context.catalog
    for name, (owner, runs, generation) in {
        "busy": ("ann", 2, "g1"),
        "stuck": ("ann", 1, "g1"),
        "lost": ("bob", 1, "g0"),
        "shared": ("ann", 1, "g1"),
        "silent": ("bob", 0, "g1"),
    }.items():
        of_owner = {"owner": owner, "user_metadata": {"group": f"of {name}"}}
        session = Session(id=name, tags=[], sdk_version="1", display_name=f"my {name}", **of_owner)
        session.project_id = project if name == "shared" else None
        if name == "silent":
            session.last_heartbeat_at = now() - timedelta(hours=1)
        await catalog.add_session(session)
        for number in range(runs):
            spec = {"owner": owner, "lora": {"rank": 4}}
            run = TrainingRun(
                id=f"{name}:train:{number}",
                session_id=name,
                base_model="tiny",
                spec=spec,
                **of_owner,
            )
            run.generation = generation
            await catalog.add_run(run)
    await catalog.finish_session("shared", "errored", "out of memory")


async def test_the_page_shows_steps_tokens_and_why_runs_wait(world: World) -> None:
    found = {each["session_id"]: each for each in await world.listed("ann")}
    page = html.unescape((await world.page("ann")).text)

    (waiting,) = found["stuck"]["models"]
    assert (waiting["queue_state"], waiting["queue_reason"]) == ("waiting", "request 4 is missing")
    assert "request 4 is missing" in page
    assert '<td class="number">7</td>\n<td class="number">100</td>' in page
    for run in ("busy:train:0", "busy:train:1", "stuck:train:0"):
        assert f'<a href="/console/runs/{run}">{run}</a>' in page
    assert "tinkercloud sessions list --all</code>" in page


async def test_members_of_a_project_see_its_failed_sessions_with_the_reason(world: World) -> None:
    (failed,) = await world.listed("bob", status="failed")

    assert (failed["session_id"], failed["owner"]) == ("shared", "ann")
    assert (failed["finish_reason"], failed["finish_detail"]) == ("errored", "out of memory")
    assert "errored: out of memory" in (await world.page("bob", status="failed")).text


async def test_a_lost_run_says_what_to_do(world: World) -> None:
    (lost,) = await world.listed("bob", search="my lost")

    (run,) = lost["models"]
    assert run["run_state"] == "lost"
    assert run["remedy"] == "continue it from a checkpoint: tinkercloud runs attach lost:train:0"
    assert run["remedy"] in (await world.page("bob")).text


@pytest.mark.parametrize(
    ("owner", "query", "found"),
    [
        ("admin", {}, {"busy", "stuck", "lost", "shared", "silent"}),
        ("ann", {}, {"busy", "stuck", "shared"}),
        ("bob", {}, {"lost", "shared", "silent"}),
        ("bob", {"owner": "ann"}, {"shared"}),
        ("admin", {"owner": "bob"}, {"lost", "silent"}),
        ("admin", {"status": "silent"}, {"silent"}),
        ("admin", {"status": "ended"}, {"shared"}),
        ("admin", {"status": "live"}, {"busy", "stuck", "lost"}),
        ("admin", {"status": "waiting"}, {"stuck"}),
        ("bob", {"status": "waiting"}, set()),
        ("admin", {"search": "OF BUSY"}, {"busy"}),
        ("admin", {"search": "team"}, {"shared"}),
        ("bob", {"search": "busy"}, set()),
        ("admin", {"search": "%"}, set()),
        ("admin", {"project": "no-such-project"}, set()),
        ("ann", {"owner": SCRIPT}, set()),
    ],
)
async def test_sessions_are_searched_by_text_owner_project_and_status(
    world: World, owner: str, query: dict[str, str], found: set[str]
) -> None:
    assert await world.names(owner, **query) == found


async def test_a_session_that_waits_is_found_among_those_of_its_owner(world: World) -> None:
    await add_runs(world.context, "lost", 501)

    assert await world.names("admin", status="waiting") == set()
    assert await world.names("admin", owner="ann", status="waiting") == {"stuck"}
    assert await world.names("admin", search="my stuck", status="waiting") == {"stuck"}


async def test_a_list_has_the_runs_used_last_and_the_number_of_all(world: World) -> None:
    await add_runs(world.context, "lost", 12)

    (listed,) = await world.listed("bob", search="my lost")

    assert listed["num_models"] == 13
    assert [run["model_id"] for run in listed["models"]] == [
        f"lost:train:{number}" for number in range(3, 13)
    ]
    assert "all 13 runs" in (await world.page("bob")).text


async def test_the_sessions_of_a_project_are_those_that_its_members_see(world: World) -> None:
    for owner in ("ann", "bob", "admin"):
        assert await world.names(owner, project=world.project) == {"shared"}


async def test_the_page_offers_every_status_and_refuses_others(world: World) -> None:
    page = await world.page("ann")

    offered = set(re.findall(r'<option value="(.*?)"', page.text))
    assert offered == {"", *get_args(SessionStatus)}
    for query in ({"status": "sleeping"}, {"search": "x" * 300}, {"page": "0"}, {"owner": "\0"}):
        assert (await world.page("ann", **query)).status_code == 400, query


@pytest.mark.parametrize("words", [SCRIPT, "\x1b[31m\u202e", "<b>" * 300_000], ids=len)
async def test_words_of_others_do_no_harm_on_the_page(world: World, words: str) -> None:
    catalog = world.context.catalog
    metadata = {words[:100]: words}
    session = Session(id="evil", owner="ann", tags=[words], sdk_version="1", user_metadata=metadata)
    session.display_name = words
    await catalog.add_session(session)
    await catalog.finish_session("evil", "errored", words)

    page = await world.page("admin")

    assert page.status_code == 200
    assert not re.search(r"<script>|<b>|[\x1b\u202e]", page.text)
    assert "errored" in page.text
    assert len(page.text) < 50_000
    assert json.dumps(words)[1:20] in json.dumps(html.unescape(page.text)) or words[0] == "\x1b"
