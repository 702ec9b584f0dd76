"""Pages about runs without metrics, with one step, and with numbers that are not finite."""

import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tinkercloud_api.access.auth import hash_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.runs.program_rows import ProgramCatalog
from tinkercloud_api.catalog.schema.connection import open_database
from tinkercloud_api.catalog.schema.tables import Program, Session, TrainingRun
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.reports.thinned_curves import Curve, CurveReport
from tinkercloud_protocol.programs.program_messages import ProgramPhase
from tinkercloud_testing.clients.console_browser import SCRIPT
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEYS = {name: f"tml-key-of-{name}-in-these-tests" for name in ("ann", "bob")}
AT = datetime(2026, 11, 29, tzinfo=UTC)
CURVES: dict[str, list[dict[str, float]]] = {
    "empty:train:0": [],
    "one:train:0": [{"loss": 2.0, "tokens": 30.0}],
    "odd:train:0": [
        {"loss": math.nan, "grad_norm": math.inf, "tokens": 10.0},
        {"loss": -math.inf, "tokens": 20.0},
        {"loss": 1e308, "tokens": 60.0},
    ],
}
"""What the steps of each run have reported, one every two seconds."""
EMPTY, ONE, ODD = CURVES
PROGRAM = "program-of-ann"


@dataclass(frozen=True)
class World:
    """A server with the runs and a program of ann, and a browser for each owner."""

    app: Application
    browsers: dict[str, httpx.AsyncClient]

    async def page(self, path: str) -> str:
        """Return a page that ann sees."""
        answer = await self.browsers["ann"].get(f"/console/{path}")
        assert answer.status_code == 200, answer.text
        return answer.text

    async def curve(self, run: str) -> httpx.Response:
        headers = {"x-api-key": KEYS["ann"]}
        return await self.browsers["ann"].get(f"/api/v1/runs/{run}/curve", headers=headers)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    settings = Settings(state_dir=tmp_path)
    app = Application(settings, OneHead())
    async with served(app) as url:
        browsers = {name: httpx.AsyncClient(base_url=url, timeout=60) for name in KEYS}
        await browsers["ann"].get("/livez")
        await _add_objects(app, settings)
        for name, browser in browsers.items():
            answer = await browser.post("/console/login", data={"key": KEYS[name]})
            assert answer.status_code == 303, answer.text
        yield World(app, browsers)
        for browser in browsers.values():
            await browser.aclose()


async def _add_objects(app: Application, settings: Settings) -> None:
    assert app.context is not None
    catalog = app.context.catalog
    for name, key in KEYS.items():
        await catalog.add_key(key_hash=hash_key(key), name=name, owner=name, role=Role.USER)
    await catalog.add_project("project-of-ann", "p", "ann")
    for run, steps in CURVES.items():
        session = run.partition(":")[0]
        of_ann = {"owner": "ann", "user_metadata": {SCRIPT: SCRIPT, "sweep": "7"}}
        await catalog.add_session(Session(id=session, tags=[SCRIPT], sdk_version="1", **of_ann))
        await catalog.add_run(
            TrainingRun(
                id=run,
                session_id=session,
                base_model="tiny",
                spec={"owner": "ann", "lora": {"rank": 4}},
                owner="ann",
                user_metadata={"sweep": "8"},
            )
        )
        curve = Curve()
        for number, values in enumerate(steps, 1):
            curve.add(number, AT + timedelta(seconds=2 * number), values)
        report = CurveReport(curve_of=run, stride=curve.stride, points=curve.points)
        await app.context.points.record(report)
    engine = open_database(settings.catalog_url)
    await ProgramCatalog(engine).add(
        Program(
            id=PROGRAM,
            owner="ann",
            name="p",
            model_id=ODD,
            args=[],
            phase=ProgramPhase.STOPPED,
        )
    )
    await engine.dispose()


async def test_every_run_has_a_page_and_is_compared(world: World) -> None:
    pages = {run: await world.page(f"runs/{run}") for run in CURVES}
    together = await world.page(f"compare?run={EMPTY}&run={ONE}&run={ODD}")

    assert "The run has reported no optimizer step yet" in pages[EMPTY]
    assert "loss by step; one:train:0: 2 at first, 2 at last" in pages[ONE]
    assert "First half" not in pages[ONE]
    assert "- (1 not finite)" in pages[ODD]
    assert "loss by step; one:train:0: 2 at first, 2 at last; odd:train:0: 1e+308" in together
    assert '<figure data-metric="grad_norm"' not in together
    row = '<th scope="row" class="number">1</th><td class="number"></td><td class="number"></td>'
    assert f'{row}<td class="number">- (1 not finite)</td>' in together.partition("grad_norm")[2]
    assert all("<script>" not in page for page in (*pages.values(), together))
    alone = await world.page(f"compare?run={EMPTY}")
    assert "None of these runs has reported an optimizer step" in alone


async def test_a_curve_has_the_tokens_of_a_second_between_two_points(world: World) -> None:
    points = (await world.curve(ODD)).json()["points"]

    rates = [point["metrics"].get("tokens_per_second", {}).get("mean") for point in points]
    assert rates == [None, 10.0, 30.0]
    assert "tokens_per_second by step; odd:train:0: 10 at first, 30 at last" in await world.page(
        f"runs/{ODD}"
    )
    (point,) = (await world.curve(ONE)).json()["points"]
    assert "tokens_per_second" not in point["metrics"]


async def test_points_of_a_clock_that_was_set_back_have_no_rate(world: World) -> None:
    assert world.app.context is not None
    curve = Curve()
    for number, seconds in enumerate((4, 2, 2, 3), 1):
        curve.add(number, AT + timedelta(seconds=seconds), {"tokens": 5.0})
    report = CurveReport(curve_of=EMPTY, stride=1, points=curve.points)
    await world.app.context.points.record(report)

    points = (await world.curve(EMPTY)).json()["points"]

    rates = [point["metrics"].get("tokens_per_second", {}).get("mean") for point in points]
    assert rates == [None, None, None, 5.0]


async def test_metadata_of_a_run_hides_that_of_its_session_with_the_same_name(
    world: World,
) -> None:
    page = await world.page(f"runs/{ONE}")

    assert "<li>sweep: 8</li>" in page
    assert "sweep: 7" not in page


async def test_no_page_about_an_object_is_found_by_another_owner(world: World) -> None:
    names = {"run_id": ONE, "project_id": "project-of-ann", "program_id": PROGRAM}
    table = world.app.route_table
    places = {
        re.sub(r"\{(\w+)(:path)?\}", lambda found: names.get(found[1], "weights/x"), each.path)
        for each in table
        if each.method == "GET" and re.search(r"^/console/.*\{(?!name|owner)", each.path)
    }
    places |= {f"/console/compare?run={ONE}", f"/console/runs/{ONE}/surplus_checkpoints?keep=1"}
    places -= {f"/console/runs/{ONE}/surplus_checkpoints"}

    found = {
        name: {path: (await browser.get(path)).status_code for path in places}
        for name, browser in world.browsers.items()
    }

    assert len(places) >= 6
    assert found["bob"] == dict.fromkeys(places, 404)
    missing = {path for path, status in found["ann"].items() if status == 404}
    assert missing == {f"/console/runs/{ONE}/checkpoints/weights/x/archive"}
