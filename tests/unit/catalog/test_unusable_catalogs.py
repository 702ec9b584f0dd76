"""Backups of a catalog in use, and catalogs that can't be opened."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from tinkercloud_api.catalog.backup import BackupError, back_up
from tinkercloud_api.catalog.schema.connection import (
    CatalogUnreachableError,
    migrate,
    newest_revision,
    open_database,
)
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.heads.releases import this_release


def keys(*arguments: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run a `tinkercloud` command on a state folder."""
    command = [sys.executable, "-m", "tinkercloud_api", *arguments, "--state-dir", str(state_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


UNRELEASED = (
    "has revision 0012_projects, of a tree before release 0.1.0, which no release reads; {},"
    " which lists runs and checkpoints again, and then create keys, users and projects"
)


async def at_revision(url: str, revision: str) -> None:
    """Make a catalog that has a revision of another release."""
    engine = open_database(url)
    await migrate(engine)
    async with engine.begin() as connection:
        setting = text("UPDATE alembic_version SET version_num = :revision")
        await connection.execute(setting, {"revision": revision})
    await engine.dispose()


async def refusal(url: str) -> str:
    """Return why a catalog is refused, once it is certain that its revision was kept."""
    engine = open_database(url)
    query = text("SELECT version_num FROM alembic_version")
    async with engine.connect() as connection:
        before = await connection.scalar(query)
    with pytest.raises(CatalogUnreachableError) as refused:
        await migrate(engine)
    async with engine.connect() as connection:
        assert await connection.scalar(query) == before
    await engine.dispose()
    return str(refused.value)


async def test_a_catalog_of_a_newer_release_is_refused_unchanged(database_url: str) -> None:
    await at_revision(database_url, "9.0.0_quotas")

    assert (await refusal(database_url)).endswith(
        f"has revision 9.0.0_quotas, and release {this_release()} reads revisions up to"
        f" {newest_revision()}; use release 9.0.0 or newer, or restore a backup from before the"
        " upgrade"
    )


async def test_a_catalog_from_before_the_first_release_names_the_command_that_replaces_it(
    database_url: str,
) -> None:
    await at_revision(database_url, "0012_projects")

    moved = (
        "move the file and those with its name and -wal or -shm away, and run `tinkercloud catalog"
        " rebuild`"
    )
    emptied = "use an empty database, and run `tinkercloud catalog rebuild`"
    what_to_do = moved if database_url.startswith("sqlite") else emptied
    assert (await refusal(database_url)).endswith(UNRELEASED.format(what_to_do))


async def test_a_command_refuses_a_newer_catalog_in_a_sentence(tmp_path: Path) -> None:
    await at_revision(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}", "9.0.0")

    refused = keys("keys", "list", state_dir=tmp_path)

    assert refused.returncode == 1
    assert f"has revision 9.0.0, and release {this_release()}" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


async def test_a_damaged_catalog_names_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    engine = open_database(f"sqlite+aiosqlite:///{file}")
    await migrate(engine)
    await engine.dispose()
    content = file.read_bytes()
    damages = {
        "cut": content[: len(content) // 2],
        "no database": b"x" * len(content),
        "damaged pages": content[:4096] + b"\xff" * (len(content) - 4096),
    }

    for damaged in damages.values():
        file.write_bytes(damaged)
        refused = keys("keys", "list", state_dir=tmp_path)
        assert refused.returncode == 1
        assert "tinkercloud catalog rebuild" in " ".join(refused.stderr.split())
        assert "Traceback" not in refused.stderr


async def test_a_backup_has_what_only_the_write_ahead_log_has(tmp_path: Path) -> None:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    for index in range(5):
        await Catalog(engine).add_user(f"owner {index}", None)
    back_up(tmp_path / "catalog.db", tmp_path / "copy.db")
    await engine.dispose()

    copied = open_database(f"sqlite+aiosqlite:///{tmp_path / 'copy.db'}")

    assert len(await Catalog(copied).users()) == 5
    await copied.dispose()
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


def test_a_backup_is_one_complete_file_or_none(tmp_path: Path) -> None:
    catalog, target = tmp_path / "catalog.db", tmp_path / "copy.db"
    with pytest.raises(BackupError, match="does not exist"):
        back_up(catalog, target)
    with sqlite3.connect(catalog) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE t (x)")
        made.executemany("INSERT INTO t VALUES (?)", [("x" * 1000,)] * 100)
    made.close()

    back_up(catalog, target)
    with pytest.raises(BackupError, match="already exists"):
        back_up(catalog, target)
    assert [file.name for file in tmp_path.glob("copy*")] == ["copy.db"]

    catalog.write_bytes(catalog.read_bytes()[:-40000] + b"\xff" * 40000)
    with pytest.raises(BackupError, match="catalog rebuild"):
        back_up(catalog, tmp_path / "other.db")
    assert list(tmp_path.glob("other*")) == []
