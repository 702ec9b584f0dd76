"""Runs are found by what people remember of them, on every database."""

from collections.abc import AsyncIterator

import pytest

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.run_search import Heads, RunSearch
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog

ME = Visibility("me")


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    """Return a catalog with three runs."""
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_project("project-1", "Reward models", "me")
    for number, metadata in enumerate(({"task": 'Größe "A"'}, None, {})):
        session = Session(
            id=f"session-{number}",
            owner="me",
            sdk_version="test",
            display_name=f"Name_{number}",
            tags=["sweep:7"] if number == 1 else [],
            user_metadata={"note": "100% sure"} if number == 2 else {},
            project_id="project-1" if number == 2 else None,
        )
        await catalog.add_session(session)
        run = TrainingRun(
            id=f"run-{number}",
            session_id=session.id,
            owner="me",
            base_model="tiny",
            spec={},
            user_metadata=metadata,
            generation="g",
        )
        await catalog.add_run(run)
    await catalog.delete_run("run-1")
    yield catalog
    await catalog.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["run-0", "run-1", "run-2"]),
        ("NAME_1", ["run-1"]),
        ("reward MOD", ["run-2"]),
        ("project-1", ["run-2"]),
        ("Größe", ["run-0"]),
        ("gRößE", ["run-0"]),
        ("null", []),
        ('"A"', ["run-0"]),
        ("sweep:7", ["run-1"]),
        ("100% s", ["run-2"]),
        ("0%s", []),
        ("m%e", []),
    ],
)
async def test_a_search_finds_the_runs_that_contain_a_text(
    text: str, found: list[str], catalog: Catalog
) -> None:
    listed, total = await catalog.runs_by_use(RunSearch(ME, text), Page(0, 10))

    assert sorted(run.id for run in listed) == found
    assert total == len(found)


async def test_a_search_finds_the_runs_that_have_ended_or_the_others(catalog: Catalog) -> None:
    ended, _ = await catalog.runs_by_use(RunSearch(ME, has_ended=True), Page(0, 10))
    others, _ = await catalog.runs_by_use(RunSearch(ME, has_ended=False), Page(0, 10))

    assert [run.id for run in ended] == ["run-1"]
    assert sorted(run.id for run in others) == ["run-0", "run-2"]


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        (Heads(set(), set()), ["run-new"]),
        (Heads({"g"}, set()), ["run-0", "run-2", "run-new"]),
        (Heads({"h"}, {"run-2"}), ["run-2", "run-new"]),
    ],
)
async def test_a_search_finds_the_runs_that_some_heads_may_have_or_create(
    heads: Heads, found: list[str], catalog: Catalog
) -> None:
    new = TrainingRun(id="run-new", session_id="session-0", owner="me", base_model="t", spec={})
    await catalog.add_run(new)

    search = RunSearch(ME, has_ended=False, heads=heads)
    listed, total = await catalog.runs_by_use(search, Page(0, 10))

    assert (sorted(run.id for run in listed), total) == (found, len(found))


async def test_a_search_finds_no_runs_of_others(catalog: Catalog) -> None:
    found = await catalog.runs_by_use(RunSearch(Visibility("other"), "run"), Page(0, 10))

    assert found == ([], 0)
