"""The supported catalog databases; the tests of this folder run on each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.storage.postgresql import PostgreSQL, a_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A running PostgreSQL; `postgresql.new_database()` returns the URL of an empty database."""
    with a_postgresql() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database for a catalog."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'new' / 'catalog.db'}"
    postgresql: PostgreSQL = request.getfixturevalue("postgresql")
    return postgresql.new_database()
