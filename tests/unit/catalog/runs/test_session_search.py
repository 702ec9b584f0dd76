"""The search for sessions returns the same on every database."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.runs.run_search import RunSearch
from tinkercloud_api.catalog.runs.session_search import Search, Status, matching
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog

ANY: dict[str, Any] = {
    "visible": EVERYTHING,
    "owners": None,
    "session_id": None,
    "display_name": None,
    "user_metadata": {},
    "project_ids": None,
    "statuses": None,
    "after": None,
}
KEY = "a.b'$[0]%"


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    """Return a catalog with three sessions."""
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    metadata: list[dict[str, str]] = [{}, {KEY: "1"}, {KEY: "12"}]
    for number, each in enumerate(metadata):
        session = Session(
            id=f"session-{number}",
            owner="me",
            sdk_version="test",
            display_name=f"Name_{number}",
            tags=[],
            user_metadata=each,
            created_at=now() - timedelta(seconds=number // 2),
        )
        await catalog.add_session(session)
    await catalog.finish_session("session-2", "errored", None)
    yield catalog
    await catalog.close()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"user_metadata": {KEY: "1"}}, [1]),
        ({"display_name": "NAME_"}, [0, 1, 2]),
        ({"display_name": "name%"}, []),
        ({"owners": ["other"]}, []),
        ({"owners": []}, []),
        ({"statuses": [Status(type="active")]}, [0, 1]),
        ({"statuses": [Status(type="silent")]}, []),
        ({"statuses": [Status(type="ended")]}, [2]),
        ({"text": "NAME_1"}, [1]),
        ({"text": "SESSION-"}, [0, 1, 2]),
        ({"text": "12"}, [2]),
        ({"text": "B'$[0]%"}, [1, 2]),
        ({"statuses": [Status(type="client_finished")]}, [2]),
        ({"statuses": [Status(type="client_finished", reasons=["success"])]}, []),
        ({"statuses": [Status(type="cancelled"), Status(type="failed")]}, []),
    ],
)
async def test_a_search_finds_the_sessions_that_match(
    wanted: dict[str, Any], found: list[int], catalog: Catalog
) -> None:
    search = Search(**{**ANY, "live_since": now() - timedelta(minutes=1), **wanted})
    sessions = await catalog.find_sessions(matching(search))

    assert sorted(session.id for session in sessions) == [f"session-{each}" for each in found]


async def test_a_page_starts_after_the_session_that_its_cursor_names(catalog: Catalog) -> None:
    order: list[str] = []
    after = None
    for _ in range(3):
        search = Search(**{**ANY, "live_since": now(), "after": after})
        (session,) = await catalog.find_sessions(matching(search).limit(1))
        order.append(session.id)
        after = (session.created_at, session.id)

    assert sorted(order) == ["session-0", "session-1", "session-2"]
    assert order[-1] == "session-2"


async def test_a_catalog_in_a_file_finds_names_with_umlauts_in_any_case(tmp_path: Path) -> None:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    catalog = Catalog(engine)
    of_owner = {"owner": "me", "user_metadata": {}}
    session = Session(id="s", sdk_version="1", display_name="Größe ÜBER", tags=[], **of_owner)
    await catalog.add_session(session)
    run = TrainingRun(id="s:train:0", session_id="s", base_model="tiny", spec={}, **of_owner)
    await catalog.add_run(run)

    listed, _ = await catalog.runs_by_use(RunSearch(Visibility("me"), "GRÖ"), Page(0, 10))
    wanted = Search(**{**ANY, "live_since": now(), "display_name": "über grö"})
    sessions = await catalog.find_sessions(matching(wanted))
    await engine.dispose()

    assert [row.id for row in listed] == ["s:train:0"]
    assert [row.id for row in sessions] == ["s"]
