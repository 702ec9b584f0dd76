"""The catalog: its migrations make its tables, and its statements may be repeated."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import alembic.autogenerate
import alembic.command
import pytest
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from tinkercloud_api.auth import Authenticator, Role, hash_key, new_key
from tinkercloud_api.catalog.database import migrate, migration_config, open_database
from tinkercloud_api.catalog.store import Catalog, Page
from tinkercloud_api.catalog.tables import Session, Table, TrainingRun
from tinkercloud_protocol.checkpoints import Manifest
from tinkercloud_protocol.errors import NotFound, Unauthenticated
from tinkercloud_protocol.paths import CheckpointKind, CheckpointPath

PATH = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "x")


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'new' / 'catalog.db'}")
    await migrate(engine)
    await migrate(engine)
    yield Catalog(engine)
    await engine.dispose()


def a_session(session_id: str = "s", owner: str = "me") -> Session:
    return Session(id=session_id, owner=owner, sdk_version="1", tags=[], user_metadata={})


def a_run(index: int = 0) -> TrainingRun:
    return TrainingRun(id=f"s:train:{index}", session_id="s", owner="me", base_model="m", spec={})


def a_manifest(created_at: datetime, **changes: object) -> Manifest:
    fields = {
        "tinker_path": str(PATH),
        "owner": "me",
        "base_model": "m",
        "lora": None,
        "step": 1,
        "created_at": created_at,
        "files": {"a": {"size_bytes": 3, "sha256": "x"}},
    }
    return Manifest.model_validate({**fields, **changes})


async def test_the_migrations_make_the_tables(tmp_path: Path) -> None:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)

    def difference(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return alembic.autogenerate.compare_metadata(context, Table.metadata)

    async with engine.connect() as connection:
        assert await connection.run_sync(difference) == []
    await engine.dispose()


async def test_the_migrations_can_be_undone(tmp_path: Path) -> None:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)

    def undo(connection: Connection) -> None:
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "base")

    async with engine.begin() as connection:
        await connection.run_sync(undo)
    await migrate(engine)
    await engine.dispose()


async def test_a_row_added_twice_is_the_first_one(catalog: Catalog) -> None:
    await catalog.add_session(a_session())
    first = await catalog.add_run(a_run())
    second = a_run()
    second.base_model = "other"

    assert (await catalog.add_run(second)).base_model == first.base_model == "m"


async def test_pages_are_newest_first_and_count_everything(catalog: Catalog) -> None:
    await catalog.add_session(a_session())
    for index in range(5):
        run = a_run(index)
        run.created_at = datetime(2026, 1, 1 + index, tzinfo=UTC)
        await catalog.add_run(run)

    rows, total = await catalog.runs("me", Page(offset=1, limit=2))

    assert [row.id for row in rows] == ["s:train:3", "s:train:2"]
    assert total == 5
    assert (await catalog.runs("you", Page(0, 10)))[1] == 0
    assert (await catalog.runs(None, Page(0, 10)))[1] == 5


async def test_times_come_back_with_their_zone(catalog: Catalog) -> None:
    session = a_session()
    session.created_at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    await catalog.add_session(session)

    row = await catalog.session("s")

    assert row is not None
    assert row.created_at == session.created_at
    assert row.created_at.tzinfo is not None


async def test_the_first_reason_a_session_is_finished_for_stays(catalog: Catalog) -> None:
    await catalog.add_session(a_session())

    assert await catalog.finish_session("s", "success", None) is True
    assert await catalog.finish_session("s", "errored", "late") is False
    row = await catalog.session("s")
    assert row is not None
    assert row.finish_reason == "success"


async def test_a_checkpoint_exists_once_its_manifest_has_been_seen(catalog: Catalog) -> None:
    await catalog.expect_checkpoint(PATH, "me")
    assert await catalog.checkpoints_of_run(PATH.run_id) == []
    assert len(await catalog.unindexed_checkpoints()) == 1

    await catalog.index_checkpoint(a_manifest(datetime(2026, 1, 1, tzinfo=UTC)))

    (row,) = await catalog.checkpoints_of_run(PATH.run_id)
    assert (row.size_bytes, row.owner) == (3, "me")
    assert await catalog.unindexed_checkpoints() == []
    await catalog.expect_checkpoint(PATH, "me")
    assert len(await catalog.checkpoints_of_run(PATH.run_id)) == 1
    assert len(await catalog.unindexed_checkpoints()) == 1


async def test_expired_checkpoints_are_found(catalog: Catalog) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    manifest = a_manifest(moment, expires_at=moment)
    await catalog.index_checkpoint(manifest)

    assert await catalog.expired_checkpoints(moment - timedelta(seconds=1)) == []
    assert len(await catalog.expired_checkpoints(moment)) == 1


async def test_keys_are_stored_hashed_and_looked_up_by_hash(catalog: Catalog) -> None:
    key = new_key()
    await catalog.add_key(key_hash=hash_key(key), name="n", owner="me", role=Role.USER)
    await catalog.add_key(key_hash=hash_key(key), name="n", owner="me", role=Role.USER)
    authenticator = Authenticator(catalog)

    principal = await authenticator.principal(key)

    assert key.startswith("tml-")
    assert len(await catalog.keys()) == 1
    assert key not in repr([vars(row) for row in await catalog.keys()])
    assert (principal.owner, principal.role) == ("me", Role.USER)
    for wrong in (None, "", "tml-wrong", hash_key(key)):
        with pytest.raises(Unauthenticated):
            await authenticator.principal(wrong)


async def test_what_belongs_to_others_does_not_exist_but_for_admins(catalog: Catalog) -> None:
    keys = {}
    for role in Role:
        keys[role] = new_key()
        await catalog.add_key(key_hash=hash_key(keys[role]), name="n", owner="me", role=role)
    authenticator = Authenticator(catalog)
    user = await authenticator.principal(keys[Role.USER])
    admin = await authenticator.principal(keys[Role.ADMIN])

    admin.require("you", "thing")
    user.require("me", "thing")
    for owner in ("you", None):
        with pytest.raises(NotFound, match="thing does not exist"):
            user.require(owner, "thing")
    assert user.listed_owner("accessible") == "me"
    assert admin.listed_owner("accessible") is None
    assert admin.listed_owner("owned") == "me"
