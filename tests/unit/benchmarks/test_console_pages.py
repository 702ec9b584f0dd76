"""The pages of the console with many runs."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.schema.connection import open_database
from tinkercloud_api.config.settings import Settings
from tinkercloud_testing.storage.postgresql import a_postgresql

pytestmark = pytest.mark.timeout(120)

TABLES_OF_RUNS = {"sessions", "training_runs", "run_points"}


async def test_no_page_reads_a_table_whole(
    benchmarks: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = benchmarks("catalog.console_pages")
    monkeypatch.setattr(module, "ROUNDS", 2)
    measured = await module.measure(tmp_path, runs=30, points=2)

    whole = {path: page["tables_read_whole"] for path, page in measured["pages"].items()}
    assert len(whole) > 40
    assert {path: tables for path, tables in whole.items() if tables} == {}


def test_every_page_of_the_console_is_measured(benchmarks: Callable[[str], ModuleType]) -> None:
    measured = [path.partition("?")[0] for path in benchmarks("catalog.console_pages").paths(30)]
    routes = (Path(__file__).parents[2] / "house" / "routes.txt").read_text().splitlines()
    pages = {line.split()[1] for line in routes if re.match(r"GET +/console/", line)}

    unmeasured = {
        page for page in pages if not any(re.fullmatch(pattern(page), path) for path in measured)
    }

    assert unmeasured == {
        "/console/login",
        "/console/static/{name:path}",
        "/console/runs/{run_id}/trace",
        "/console/runs/{run_id}/checkpoints/{checkpoint_id:path}/archive",
    }


def pattern(route: str) -> str:
    """Return the pattern of the paths of a route."""
    return re.sub(r"\{[^}]*\}", "[^/]+", route)


@pytest.fixture
def database_url() -> Iterator[str]:
    with a_postgresql() as server:
        yield server.new_database()


@pytest.mark.long
async def test_no_page_reads_a_table_of_runs_whole_on_postgresql(
    benchmarks: Callable[[str], ModuleType],
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, runs = benchmarks("catalog.console_pages"), 20_000
    # PostgreSQL rightly reads a table of a few pages whole, and so it does for many of its rows.
    monkeypatch.setattr(module, "RUNS_OF_A_SESSION", 1)
    monkeypatch.setattr(module, "PROJECTS", 2_000)
    await module.fill(database_url, runs, points=1)
    engine, whole = open_database(database_url), {}
    await analyze(engine)

    settings = Settings(state_dir=tmp_path, database_url=SecretStr(database_url))
    async with module.logged_in(settings) as client:
        for path in module.paths(runs):
            with module.Statements() as statements:
                await module.loaded(client, path)
            whole[path] = await scanned(engine, statements.seen)
    await engine.dispose()

    # All sessions worked in this month, so its usage by project rightly reads all of them.
    found = {path for path, tables in whole.items() if tables and "/usage" not in path}
    assert found == set()


async def analyze(engine: AsyncEngine) -> None:
    """Do what PostgreSQL does by itself a minute later."""
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as db:
        await db.exec_driver_sql("VACUUM ANALYZE")


async def scanned(engine: AsyncEngine, statements: Sequence[tuple[str, Any]]) -> set[str]:
    """Return which tables of runs PostgreSQL reads whole, without an index."""
    found = set[str]()
    async with engine.connect() as db:
        for statement, parameters in statements:
            explained = f"EXPLAIN (FORMAT JSON) {statement}"
            (plan,) = (await db.exec_driver_sql(explained, parameters)).scalar_one()
            found |= set(whole_in(plan["Plan"])) & TABLES_OF_RUNS
    return found


def whole_in(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables that a part of a plan reads whole."""
    if plan["Node Type"] == "Seq Scan":
        yield plan["Relation Name"]
    for part in plan.get("Plans", ()):
        yield from whole_in(part)
