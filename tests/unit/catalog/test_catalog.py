"""The catalog: migrations create the tables, and all updates are idempotent."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import alembic.autogenerate
import pytest
import structlog
from alembic.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection

from tinkercloud_api.access import auth
from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auth import Authenticator, hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.access.server_acts import register_bootstrap_key
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.schema import connection
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import ApiKey, Session, Table, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads.activity import Activity
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.storage.postgresql import PostgreSQL

PATH = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "x")

TOKENS = AccessTokens("a secret of the tests, long enough for HMAC")


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    engine = open_database(database_url)
    await migrate(engine)
    await migrate(engine)
    yield Catalog(engine)
    await engine.dispose()


@pytest.fixture
async def other(catalog: Catalog, database_url: str) -> AsyncIterator[Catalog]:
    """The same catalog over its own connections."""
    del catalog
    engine = open_database(database_url)
    yield Catalog(engine)
    await engine.dispose()


def a_session(session_id: str = "s", owner: str = "me") -> Session:
    return Session(id=session_id, owner=owner, sdk_version="1", tags=[], user_metadata={})


def a_run(index: int = 0) -> TrainingRun:
    return TrainingRun(id=f"s:train:{index}", session_id="s", owner="me", base_model="m", spec={})


def a_manifest(created_at: datetime, **changes: object) -> CheckpointManifest:
    fields = {
        "tinker_path": str(PATH),
        "owner": "me",
        "base_model": "m",
        "lora": None,
        "step": 1,
        "created_at": created_at,
        "files": {"a": {"size_bytes": 3, "sha256": "x"}},
    }
    return CheckpointManifest.model_validate({**fields, **changes})


def is_of_this_version(name: str | None, _kind: str, _parents: object) -> bool:
    """Whether this version uses a table: the one of the audit log of before stays for upgrades."""
    return name != "audit_entries"


# The order of the list of runs is an expression, which is compared for PostgreSQL only.
@pytest.mark.filterwarnings("ignore:.*expression-based index")
async def test_the_migrations_make_the_tables(database_url: str) -> None:
    engine = open_database(database_url)
    await migrate(engine)

    def difference(connection: Connection) -> list[object]:
        opts = {"compare_type": True, "include_name": is_of_this_version}
        context = MigrationContext.configure(connection, opts=opts)
        found: list[object] = alembic.autogenerate.compare_metadata(context, Table.metadata)
        return found

    async with engine.connect() as connection:
        assert await connection.run_sync(difference) == []
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

    rows, total = await catalog.runs(Visibility("me"), Page(offset=1, limit=2))

    assert [row.id for row in rows] == ["s:train:3", "s:train:2"]
    assert total == 5
    assert (await catalog.runs(Visibility("you"), Page(0, 10)))[1] == 0
    assert (await catalog.runs(EVERYTHING, Page(0, 10)))[1] == 5


async def test_runs_of_a_project_are_those_of_its_sessions(catalog: Catalog) -> None:
    session = a_session()
    session.project_id = "p"
    await catalog.add_project("p", "P", "me")
    await catalog.add_session(session)
    await catalog.add_session(a_session("other"))
    mine = await catalog.add_run(a_run())
    elsewhere = a_run(1)
    elsewhere.session_id = "other"
    await catalog.add_run(elsewhere)

    rows, total = await catalog.runs(Visibility("me"), Page(0, 10), "p")

    assert ([row.id for row in rows], total) == ([mine.id], 1)
    assert (await catalog.runs(Visibility("me"), Page(0, 10), "q")) == ([], 0)
    assert (await catalog.runs(Visibility("you"), Page(0, 10), "p")) == ([], 0)


async def test_text_that_one_database_cannot_store_is_rejected_by_all(catalog: Catalog) -> None:
    unstorable = a_session()
    unstorable.display_name = "a\0b"
    attempts = [
        catalog.session("a\0b"),
        catalog.record_heartbeats(["a\0b"]),
        catalog.add_session(unstorable),
        catalog.sessions(Visibility("a\0b"), Page(0, 10)),
    ]

    for attempt in attempts:
        with pytest.raises(InvalidRequest, match=r"'a\\x00b' contains the character U\+0000"):
            await attempt


async def test_any_metadata_is_stored_unchanged(catalog: Catalog) -> None:
    session = a_session()
    session.user_metadata = {"a\0b": "c\0d \U0001f600"}

    await catalog.add_session(session)

    found = await catalog.session("s")
    assert found is not None
    assert found.user_metadata == {"a\0b": "c\0d \U0001f600"}


async def test_times_are_returned_with_their_time_zone(catalog: Catalog) -> None:
    session = a_session()
    session.created_at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    await catalog.add_session(session)

    row = await catalog.session("s")

    assert row is not None
    assert row.created_at == session.created_at
    assert row.created_at.tzinfo is not None


async def test_the_first_finish_reason_of_a_session_is_kept(catalog: Catalog) -> None:
    await catalog.add_session(a_session())

    assert await catalog.finish_session("s", "success", None) is True
    assert await catalog.finish_session("s", "errored", "late") is False
    row = await catalog.session("s")
    assert row is not None
    assert row.finish_reason == "success"


async def test_a_checkpoint_exists_once_its_manifest_has_been_seen(catalog: Catalog) -> None:
    await catalog.record_pending_checkpoint(PATH, "me")
    assert await catalog.checkpoints_of_runs([PATH.run_id]) == []
    assert len(await catalog.unindexed_checkpoints(EVERYTHING)) == 1

    await catalog.index_checkpoint(a_manifest(datetime(2026, 1, 1, tzinfo=UTC)))

    (row,) = await catalog.checkpoints_of_runs([PATH.run_id])
    assert (row.size_bytes, row.owner) == (3, "me")
    assert await catalog.unindexed_checkpoints(EVERYTHING) == []
    await catalog.record_pending_checkpoint(PATH, "me")
    assert len(await catalog.checkpoints_of_runs([PATH.run_id])) == 1
    assert len(await catalog.unindexed_checkpoints(EVERYTHING)) == 1


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
    authenticator = Authenticator(catalog, Activity(catalog).use_key, TOKENS)

    principal = await authenticator.principal(key)

    assert key.startswith("tml-")
    assert len(await catalog.keys()) == 1
    assert key not in repr([vars(row) for row in await catalog.keys()])
    assert (principal.owner, principal.role) == ("me", Role.USER)
    for wrong in (None, "", "tml-wrong", hash_key(key)):
        with pytest.raises(Unauthenticated):
            await authenticator.principal(wrong)


async def add_key(catalog: Catalog, **changes: Any) -> str:
    """Register a new key and return it."""
    key = new_key()
    fields = {"name": "n", "owner": "me", "role": Role.USER}
    await catalog.add_key(key_hash=hash_key(key), **(fields | changes))
    return key


async def test_a_cached_key_is_rejected_once_it_has_expired(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires_at = datetime(2026, 1, 2, tzinfo=UTC)
    key = await add_key(catalog, expires_at=expires_at)
    authenticator = Authenticator(catalog, Activity(catalog).use_key, TOKENS)
    monkeypatch.setattr(auth, "now", lambda: expires_at - timedelta(seconds=1))
    assert (await authenticator.principal(key)).expires_at == expires_at

    monkeypatch.setattr(auth, "now", lambda: expires_at)

    with pytest.raises(Unauthenticated, match="expired at 2026-01-02T00:00:00"):
        await authenticator.principal(key)


async def test_a_key_revoked_during_a_lookup_is_rejected_from_then_on(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await add_key(catalog)
    authenticator = Authenticator(catalog, Activity(catalog).use_key, TOKENS)
    holder = await Authenticator(catalog, Activity(catalog).use_key, TOKENS).principal(key)
    look_up = catalog.key

    async def slow_key(key_hash: str) -> ApiKey | None:
        row = await look_up(key_hash)
        await authenticator.revoke(holder)
        return row

    monkeypatch.setattr(catalog, "key", slow_key)
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="has been revoked"):
            await authenticator.principal(key)


async def test_the_last_use_of_a_key_is_written_with_the_next_housekeeping(
    catalog: Catalog,
) -> None:
    key, other = await add_key(catalog), await add_key(catalog)
    activity = Activity(catalog)
    authenticator = Authenticator(catalog, activity.use_key, TOKENS)
    principal = await authenticator.principal(key)
    assert [row.last_used_at for row in await catalog.keys()] == [None, None]

    await activity.write()

    assert await catalog.last_use_of_key(principal.key_id) is not None
    unused = await catalog.key(hash_key(other))
    assert unused is not None
    assert unused.last_used_at is None


async def configure_key(catalog: Catalog, key: str, tmp_path: Path) -> list[Mapping[str, Any]]:
    """Configure a bootstrap key and return the log events."""
    with structlog.testing.capture_logs() as logged:
        settings = Settings(state_dir=tmp_path, bootstrap_key=SecretStr(key))
        await register_bootstrap_key(catalog, AuditLog(catalog._engine), settings)
    return list(logged)


async def is_accepted(catalog: Catalog, key: str) -> bool:
    try:
        await Authenticator(catalog, Activity(catalog).use_key, TOKENS).principal(key)
    except Unauthenticated:
        return False
    return True


async def test_a_bootstrap_key_revokes_its_predecessor_and_no_other_key(
    catalog: Catalog, tmp_path: Path
) -> None:
    first, second, made = new_key(), new_key(), await add_key(catalog, role=Role.ADMIN)
    assert await configure_key(catalog, first, tmp_path) == []
    assert await configure_key(catalog, first, tmp_path) == []

    (line,) = await configure_key(catalog, second, tmp_path)

    assert "replaces an earlier one, which was revoked" in line["event"]
    assert not await is_accepted(catalog, first)
    assert await is_accepted(catalog, second)
    assert await is_accepted(catalog, made)


async def test_a_replica_with_the_old_bootstrap_key_does_not_revoke_the_new_one(
    catalog: Catalog, tmp_path: Path
) -> None:
    old, new = new_key(), new_key()
    await configure_key(catalog, old, tmp_path)
    await configure_key(catalog, new, tmp_path)

    (line,) = await configure_key(catalog, old, tmp_path)

    assert "stays rejected; configure a new one" in line["event"]
    assert await is_accepted(catalog, new)
    assert not await is_accepted(catalog, old)


async def test_a_key_made_by_the_command_is_rotated_once_it_is_configured(
    catalog: Catalog, tmp_path: Path
) -> None:
    made = await add_key(catalog, role=Role.ADMIN)
    await configure_key(catalog, made, tmp_path)

    await configure_key(catalog, new_key(), tmp_path)

    assert not await is_accepted(catalog, made)


async def test_objects_of_other_owners_are_visible_only_to_admins(catalog: Catalog) -> None:
    keys = {}
    for role in Role:
        keys[role] = new_key()
        await catalog.add_key(key_hash=hash_key(keys[role]), name="n", owner="me", role=role)
    authenticator = Authenticator(catalog, Activity(catalog).use_key, TOKENS)
    user = await authenticator.principal(keys[Role.USER])
    admin = await authenticator.principal(keys[Role.ADMIN])

    mine, yours = a_session("mine", "me"), a_session("yours", "you")
    assert admin.require(yours, "thing") is yours
    assert user.require(mine, "thing") is mine
    for found in (yours, None):
        with pytest.raises(NotFound, match="thing does not exist"):
            user.require(found, "thing")
    assert user.owner_filter("accessible") == "me"
    assert admin.owner_filter("accessible") is None
    assert admin.owner_filter("owned") == "me"


async def test_replicas_that_start_together_migrate_one_after_the_other(
    postgresql: PostgreSQL,
) -> None:
    url = postgresql.new_database()
    engines = [open_database(url) for _ in range(4)]

    await asyncio.gather(*map(migrate, engines))

    assert await Catalog(engines[0]).keys() == []
    await asyncio.gather(*[engine.dispose() for engine in engines])


async def test_replicas_that_add_a_row_concurrently_create_one_row(
    catalog: Catalog, other: Catalog
) -> None:
    await catalog.add_session(a_session())

    added = await asyncio.gather(*[each.add_run(a_run()) for each in (catalog, other) * 5])

    assert len({run.created_at for run in added}) == 1
    assert (await catalog.runs(Visibility("me"), Page(0, 10)))[1] == 1


async def test_only_one_of_two_replicas_places_a_run(catalog: Catalog, other: Catalog) -> None:
    await catalog.add_session(a_session())
    await catalog.add_run(a_run())

    placed = await asyncio.gather(
        catalog.set_generation("s:train:0", "one", after=None),
        other.set_generation("s:train:0", "two", after=None),
    )

    run = await catalog.run("s:train:0")
    assert run is not None
    assert sorted(placed) == [False, True]
    assert run.generation == ("one" if placed[0] else "two")


async def test_replicas_that_record_the_same_runs_do_not_deadlock(
    catalog: Catalog, other: Catalog
) -> None:
    await catalog.add_session(a_session())
    runs = [await catalog.add_run(a_run(index)) for index in range(30)]
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC)

    for _ in range(5):
        await asyncio.gather(
            catalog.touch_runs({run.id: late for run in runs}),
            other.touch_runs({run.id: early for run in reversed(runs)}),
        )

    rows, _ = await catalog.runs(Visibility("me"), Page(0, 30))
    assert {row.last_request_at for row in rows} == {late}


@pytest.mark.parametrize("is_over", [False, True])
async def test_runs_can_be_deleted_while_another_replica_records_their_activity(
    catalog: Catalog, other: Catalog, is_over: bool
) -> None:
    late = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(4):
        name = f"s{number}"
        await catalog.add_session(a_session(name))
        if is_over:
            await catalog.finish_session(name, "success", None)
        # The last row is stored first, as happens after updates.
        ids = [f"{name}:train:{index:02}" for index in range(30)]
        for run_id in reversed(ids):
            run = TrainingRun(id=run_id, session_id=name, owner="me", base_model="m", spec={})
            await catalog.add_run(run)

        await asyncio.gather(
            catalog.delete_runs_of_finished_sessions()
            if is_over
            else catalog.finish_session(name, "success", None),
            other.touch_runs(dict.fromkeys(ids, late)),
        )

        rows = await catalog.runs_of_session(name)
        assert all(row.deleted_at is not None for row in rows)
        assert {row.last_request_at for row in rows} == {late}


async def test_replicas_that_record_the_same_heartbeats_do_not_deadlock(
    catalog: Catalog, other: Catalog
) -> None:
    names = [f"s{index}" for index in range(100)]
    for name in names:
        session = a_session(name)
        session.last_heartbeat_at = datetime(2026, 1, 1, tzinfo=UTC)
        await catalog.add_session(session)

    for _ in range(5):
        await asyncio.gather(catalog.record_heartbeats(names), other.record_heartbeats(names[::-1]))

    assert await catalog.count_live_sessions(datetime(2026, 1, 2, tzinfo=UTC)) == len(names)


async def test_requests_fail_as_retryable_while_the_database_is_unreachable(
    postgresql: PostgreSQL,
) -> None:
    engine = open_database(postgresql.new_database())
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_session(a_session())

    postgresql.stop()
    with pytest.raises(Unavailable, match="catalog"):
        await catalog.session("s")
    with pytest.raises(Unavailable, match="catalog"):
        await catalog.add_run(a_run())
    postgresql.start()

    assert await catalog.session("s") is not None
    await engine.dispose()


async def test_a_hanging_database_counts_as_unreachable(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_STATEMENT_SECONDS", 0.5)
    engine = open_database(postgresql.new_database())
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.ping()

    with postgresql.frozen(), pytest.raises(Unavailable, match="catalog"):
        await catalog.session("s")

    assert await catalog.session("s") is None
    await engine.dispose()


async def test_activity_during_a_database_outage_is_written_afterwards(
    postgresql: PostgreSQL,
) -> None:
    engine = open_database(postgresql.new_database())
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_session(a_session())
    made = await catalog.add_run(a_run())
    activity = Activity(catalog)

    activity.touch(made.id)
    postgresql.stop()
    with pytest.raises(Unavailable):
        await activity.write()
    postgresql.start()
    await activity.write()

    run = await catalog.run(made.id)
    assert run is not None
    assert run.last_request_at > made.last_request_at
    await engine.dispose()


async def test_a_session_is_live_until_it_ends_or_its_client_becomes_inactive(
    catalog: Catalog,
) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for name, silent_seconds in (("live", 0), ("over", 0), ("silent", 121)):
        session = a_session(name)
        session.last_heartbeat_at = moment - timedelta(seconds=silent_seconds)
        await catalog.add_session(session)
    await catalog.finish_session("over", "success", None)

    assert await catalog.count_live_sessions(moment - timedelta(seconds=120)) == 1
