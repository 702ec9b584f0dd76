"""Runs are found by what people remember of them, on every database."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import delete, update

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.run_search import Heads, RunSearch
from tinkercloud_api.catalog.runs.search_terms import MAX_TERMS
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import SearchTerm, Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog

ME = Visibility("me")


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    """Return a catalog with three runs."""
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_project("project-1", "Reward models of Straßburg", "me")
    metadata_of_runs = ({"task": 'Größe "A" aa ' + 66 * "x"}, None, {"is": "Fine"})
    for number, metadata in enumerate(metadata_of_runs):
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
        (" ", ["run-0", "run-1", "run-2"]),
        ("RUN-1", ["run-1"]),
        ("me größe Name_0 TIN", ["run-0"]),
        ("größe name_1", []),
        ("röße", []),
        ("ﬁne", ["run-2"]),
        ("straß", ["run-2"]),
        ("x" * 70, ["run-0"]),
        ("x" * 63 + "y", []),
        ("a a a aa", ["run-0"]),
    ],
)
async def test_a_search_finds_the_runs_with_words_that_begin_with_those_of_a_text(
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


async def test_only_so_many_words_of_a_run_are_found(catalog: Catalog) -> None:
    words = {"words": " ".join(f"w{number}" for number in range(MAX_TERMS))}
    of_session = {"session_id": "session-0", "owner": "me", "base_model": "t", "spec": {}}
    await catalog.add_run(TrainingRun(id="run-9", user_metadata=words, **of_session))

    first, _ = await catalog.runs_by_use(RunSearch(ME, "w0"), Page(0, 10))
    last, _ = await catalog.runs_by_use(RunSearch(ME, f"w{MAX_TERMS - 1}"), Page(0, 10))

    assert [run.id for run in first] == ["run-9"]
    assert last == []


async def test_what_an_earlier_version_has_recorded_is_found_after_the_housekeeping(
    database_url: str, catalog: Catalog
) -> None:
    async def found() -> list[str]:
        runs, _ = await catalog.runs_by_use(RunSearch(ME, "name_"), Page(0, 10))
        return sorted(run.id for run in runs)

    engine = open_database(database_url)
    async with engine.begin() as db:
        await db.execute(delete(SearchTerm))
        for table in (Session, TrainingRun):
            await db.execute(update(table).values(is_searchable=False))
    await engine.dispose()
    assert await found() == []

    for _ in range(2):
        await catalog.make_searchable()

    assert await found() == ["run-0", "run-1", "run-2"]
