"""The databases a catalog may lie in: the tests of this folder run on each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.postgresql import PostgreSQL, a_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A running PostgreSQL; `postgresql.new_database()` is the URL of an empty one."""
    with a_postgresql() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a catalog can be made; there is none yet."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'new' / 'catalog.db'}"
    postgresql: PostgreSQL = request.getfixturevalue("postgresql")
    return postgresql.new_database()
