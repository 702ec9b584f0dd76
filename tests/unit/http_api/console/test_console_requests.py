"""Requests of browsers to the console: whose session they have, and what can't make them fail."""

import asyncio
import html
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_api.access import failed_logins
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.checkpoints.manifest_index import ManifestIndex
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.console.pages import FOLDER, show
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.routes.sessions import traces
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.request_timeline import Span
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.clients.console_browser import FORM_TOKEN, SCRIPT
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-of-somebody-with-a-browser"
ENDED = {"cookie": "tinkercloud-console=ended"}
RUN = "s:train:0"


@dataclass
class Head:
    """Answers all requests, but dies while it answers those that sample, unless it has a text."""

    text: str | None = None
    prompts: list[Any] = field(default_factory=list)
    spans: list[dict[str, Any]] | None = field(default_factory=list)
    """What it remembers of requests; None if it fails to say."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(routes.HEAD_TIMELINE) and self.spans is None:
            return web.Response(status=500)
        if request.path != routes.OPENAI_COMPLETIONS:
            return web.json_response({"spans": self.spans, "models": []})
        self.prompts.append(orjson.loads(await request.read())["prompt"])
        if self.text is not None:
            return web.json_response({"choices": [{"text": self.text, "logprobs": None}]})
        answer = web.StreamResponse(headers={"content-length": "100"})
        await answer.prepare(request)
        await answer.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.abort()
        return answer


@dataclass(frozen=True)
class World:
    """A server, its head, and a browser."""

    app: Application
    head: Head
    http: httpx.AsyncClient

    async def log_in(self) -> str:
        """Open a session; return what its forms hold."""
        answer = await self.http.post("/console/login", data={"key": KEY})
        assert answer.status_code == 303, answer.text
        return str(FORM_TOKEN.findall((await self.http.get("/console/account")).text)[0])

    async def add_run(self, generation: str | None = None) -> None:
        """Add `RUN`, which the head with a generation has created."""
        context = self.app.context
        assert context is not None
        (key,) = await context.catalog.keys()
        of_owner = {"owner": key.owner, "user_metadata": {}}
        await context.catalog.add_session(Session(id="s", tags=[], sdk_version="1", **of_owner))
        spec = {"owner": key.owner, "lora": {"rank": 4}}
        run = TrainingRun(id=RUN, session_id="s", base_model="tiny", spec=spec, **of_owner)
        run.generation = generation
        await context.catalog.add_run(run)

    async def ask(self, **fields: str) -> httpx.Response:
        """Send the form of the playground."""
        sent = {"form_token": await self.log_in(), "base_model": "tiny", "kind": "text", **fields}
        return await self.http.post("/console/playground", data=sent)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    head, provider = Head(), OneHead()
    fake = web.Application()
    fake.router.add_route("*", "/{path:.*}", head.serve)
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), provider)
    async with TestServer(fake) as running, served(app) as url:
        provider.endpoint = HeadEndpoint(str(running.make_url("")).rstrip("/"), "token", "g1")
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield World(app, head, http)


async def test_a_browser_whose_session_has_ended_reaches_the_page_that_opens_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_logins, "_ATTEMPTS_PER_SECOND", 0.0)
    attempts = failed_logins._ATTEMPTS

    async def status(path: str) -> int:
        return (await world.http.get(path, headers=ENDED)).status_code

    views = [
        (await status("/console/runs"), await status("/console/static/console.css"))
        for _ in range(attempts + 1)
    ]

    # Each view is one failed attempt.
    assert views == [(401, 200)] * attempts + [(429, 200)]
    assert await status("/console/login") == 200
    answer = await world.http.post("/console/login", data={"key": KEY}, headers=ENDED)
    assert answer.status_code == 303


async def test_styles_and_scripts_need_no_session_and_are_loaded_once(world: World) -> None:
    page = (await world.http.get("/console/login")).text
    loaded = re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page)
    assert len(loaded) == 5
    for path in loaded:
        first = await world.http.get(path, headers=ENDED)
        etag = first.headers["etag"]
        second = await world.http.get(path, headers={"if-none-match": etag})

        assert (first.status_code, second.status_code, second.content) == (200, 304, b"")
        assert first.content == (FOLDER / path.removeprefix("/console/")).read_bytes()
        assert first.headers["cache-control"] == "max-age=300"
        kind = "javascript" if path.endswith(".js") else "css"
        assert first.headers["content-type"] == f"text/{kind}; charset=utf-8"


async def test_no_file_outside_the_folder_of_styles_and_scripts_is_served(world: World) -> None:
    for name in ("x", "%00", "", "vendored", "../pages.py", "%2e%2e/pages.py", "//etc/passwd"):
        answer = await world.http.get(f"/console/static/{name}")
        assert answer.status_code in {401, 404}, name
        assert "import" not in answer.text, name


async def test_a_browser_forgets_a_session_that_has_ended(world: World) -> None:
    ended = await world.http.get("/console/runs", headers=ENDED)
    assert ended.status_code == 401
    assert 'tinkercloud-console=""; ' in ended.headers["set-cookie"]

    sent = {"form_token": await world.log_in(), "confirmed": "yes"}
    assert (await world.http.post("/console/account/revoke", data=sent)).status_code == 303
    assert not world.http.cookies


async def test_a_login_from_what_is_no_site_is_refused(world: World) -> None:
    for origin in ("http://[", "http://[x]", "//[", "null", ""):
        answer = await world.http.post(
            "/console/login", data={"key": KEY}, headers={"origin": origin}
        )
        assert (answer.status_code, "another site" in answer.text) == (403, True), origin


async def test_the_page_of_a_run_looks_for_new_checkpoints_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.log_in()
    await world.add_run()
    found = list[str]()
    discover = ManifestIndex.discover

    async def noted(index: ManifestIndex, run_id: str) -> None:
        found.append(run_id)
        await discover(index, run_id)

    monkeypatch.setattr(ManifestIndex, "discover", noted)

    page = await world.http.get(f"/console/runs/{RUN}")

    assert (page.status_code, found) == (200, [RUN])


@pytest.mark.parametrize(("generation", "why"), [("g0", "is away"), ("g1", "did not respond")])
async def test_the_timeline_of_a_run_says_why_it_is_not_known(
    world: World, generation: str, why: str
) -> None:
    await world.log_in()
    await world.add_run(generation)
    world.head.spans = None

    path, key = f"/api/v1/runs/{RUN}/timeline", {"x-api-key": KEY}
    answer = (await world.http.get(path, headers=key)).json()
    page = await world.http.get(f"/console/runs/{RUN}")

    assert (answer["requests"], why in answer["reason"]) == ([], True)
    assert (page.status_code, answer["reason"] in page.text) == (200, True)
    assert "<rect" not in page.text


async def test_names_of_requests_that_are_attacks_are_shown_as_text(world: World) -> None:
    await world.log_in()
    await world.add_run("g1")
    times = {"accepted": 20.0, "started": 10.0, "finished": 5.0}
    world.head.spans = [{"target": RUN, "name": SCRIPT, "request": SCRIPT * 999, **times}]

    page = await world.http.get(f"/console/runs/{RUN}")

    assert page.status_code == 200
    assert "<script>" not in page.text
    assert '<script>alert("x")</script>' in html.unescape(page.text)
    # The clock of the head was set back: it has neither waited, been paused nor run.
    assert page.text.count('<td class="number">0.000</td>') == 3


async def test_a_page_is_rendered_outside_the_event_loop() -> None:
    threads = list[int]()

    class Noting:
        def __str__(self) -> str:
            threads.append(threading.get_ident())
            return "text"

    page = await show("failure.html", message=Noting(), code=500, again=None)

    assert b"text" in page.body
    assert threads
    assert threading.get_ident() not in threads


async def test_a_trace_is_written_outside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, key = {"tags": [], "sdk_version": "1", "user_metadata": {}}, {"x-api-key": KEY}
    created = await world.http.post("/api/v1/create_session", json=made, headers=key)
    path = f"/api/v1/sessions/{created.json()['session_id']}/trace_export"
    threads, write = list[int](), traces.trace_of

    def noted(spans: Iterator[Span]) -> bytes:
        threads.append(threading.get_ident())
        return write(spans)

    monkeypatch.setattr(traces, "trace_of", noted)

    url = (await world.http.get(path, headers=key)).json()["url"]

    assert (await world.http.get(url)).json()["displayTimeUnit"] == "ms"
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_prompt_is_what_was_written_in_the_form(world: World) -> None:
    world.head.text = "answer"

    page = await world.ask(prompt="\r\none\r\ntwo\r\n" + 5_000 * "\r\n" + 14_900 * "x")

    assert page.status_code == 200, page.text
    assert world.head.prompts == ["\none\ntwo\n" + 5_000 * "\n" + 14_900 * "x"]
    # Browsers ignore the first end of a line in this field.
    assert ">\n\none\ntwo\n" in page.text.replace("\r\n", "\n").replace("\r", "\n")


async def test_a_head_that_dies_while_it_answers_is_a_problem_of_this_answer(
    world: World,
) -> None:
    page = await asyncio.wait_for(world.ask(prompt="What?"), 60)

    assert page.status_code == 200, page.text
    assert "the session head disconnected" in page.text


async def test_a_comparison_without_runs_says_how_to_choose_them(world: World) -> None:
    await world.log_in()

    page = await world.http.get("/console/compare")

    assert page.status_code == 200
    assert 'tick up to 8 of them in the <a href="/console/runs">list of runs</a>' in page.text
