"""The audit log as a chain: many writers make no fork, and every later change of a row is found."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.access import server_acts
from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.catalog.access.audit_chain import Mark
from tinkercloud_api.catalog.access.audit_export import line_of, verify_lines
from tinkercloud_api.catalog.access.audit_log import AuditLog, AuditQuery, Recorded
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.wire.errors import InvalidRequest

DAY = timedelta(days=1)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    opened = open_database(database_url)
    await migrate(opened)
    yield opened
    await opened.dispose()


async def write(log: AuditLog, owner: str, name: str) -> None:
    entry = await log.begin(owner, 7, "key_create", {"path": name, "status": "no response yet"})
    await log.finish(entry, {"status": 200})


async def some_entries(engine: AsyncEngine) -> AuditLog:
    """Return a log with five entries of ann, each of two rows."""
    log = AuditLog(engine)
    for number in range(5):
        await write(log, "ann", f"entry {number}")
    return log


async def change(engine: AsyncEngine, statement: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(statement))


async def listed(log: AuditLog, owner: str | None = None) -> Sequence[Recorded]:
    query = AuditQuery(owner, now() - DAY, now() + DAY)
    return await log.entries(query, Page(0, 10_000))


async def test_an_entry_is_listed_with_its_outcome(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    await log.begin("bob", None, "key_revoke", {"status": "no response yet"})

    found = await listed(log)

    assert [row.outcome for row in found] == [{"status": 200}] * 5 + [{}]
    assert [row.entry.id for row in found] == [1, 3, 5, 7, 9, 11]
    assert [row.entry.owner for row in await listed(log, "bob")] == ["bob"]


async def test_limits_and_groups_that_change_are_named(engine: AsyncEngine, tmp_path: Path) -> None:
    log = AuditLog(engine)
    for limit in (None, 5, 5, 7, None):
        settings = Settings(state_dir=tmp_path, max_checkpoint_bytes_per_owner=limit)
        await server_acts.record_settings(log, settings)
    key = ApiKey(id=7, name="login", owner="ann", role="user")
    ended = [ApiKey(id=3, name="login", owner="ann", role="user")]
    await Auditing(log, days=1).record_login(key, ended, {"vision", "platform"}, "127.0.0.1")

    *limits, login = [row.entry.details for row in await listed(log)]

    name = "max_checkpoint_bytes_per_owner"
    assert [each["value"] for each in limits] == [{name: 5}, {name: 7}, {}]
    assert {tuple(each["objects"]) for each in limits} == {(f"setting {name}",)}
    assert login["objects"] == ["key 7", "key 3", "group:platform", "group:vision"]


async def test_writers_of_many_servers_make_one_chain(
    engine: AsyncEngine, database_url: str
) -> None:
    others = [open_database(database_url) for _ in range(3)]
    logs = [AuditLog(each) for each in (engine, *others)]
    await asyncio.gather(*(write(log, f"owner {n}", f"{n}") for log in logs for n in range(8)))

    verdict = await logs[0].verify()

    assert (verdict.entries, verdict.faults) == (64, [])
    assert verdict.newest.number == 64
    assert len(await listed(logs[0])) == 32
    for each in others:
        await each.dispose()


TAMPERING = {
    "UPDATE audit_log SET owner = 'bob' WHERE id = 5": "entry 5 ",
    "UPDATE audit_log SET details = '{}' WHERE id = 4": "entry 4 ",
    "UPDATE audit_log SET outcome_of = 1 WHERE id = 6": "entry 6 ",
    "UPDATE audit_log SET hash = 'abc' WHERE id = 3": "entry 3 ",
    "DELETE FROM audit_log WHERE id IN (3, 4)": "entries 3 to 4 are missing",
    "DELETE FROM audit_log WHERE id > 8": "entries 9 to 10, the newest, are missing",
    "DELETE FROM audit_log": "entries 1 to 10, the newest, are missing",
    "UPDATE audit_log SET event = 'removed', details = '{}' WHERE id = 5": (
        "1 entries were removed, but the log records the removal of 0"
    ),
}
"""What somebody with access to the database does, and the beginning of what is reported."""


async def test_every_changed_or_removed_row_is_found(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    await change(engine, "CREATE TABLE kept AS SELECT * FROM audit_log")

    for statement, fault in TAMPERING.items():
        assert (await log.verify()).faults == []
        await change(engine, statement)
        assert (await log.verify()).faults[0].startswith(fault), statement
        await change(engine, "DELETE FROM audit_log")
        await change(engine, "INSERT INTO audit_log SELECT * FROM kept")


async def test_a_log_that_was_written_again_lacks_a_noted_entry(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    noted = (await log.verify()).newest
    await write(log, "ann", "later")
    assert (await log.verify(noted)).faults == []

    await change(engine, "DELETE FROM audit_log")
    await change(engine, "UPDATE audit_chain SET number = 0, hash = ''")
    await some_entries(engine)

    assert (await log.verify()).faults == []
    assert "entry 10 has the hash" in (await log.verify(noted)).faults[0]
    later = Mark(11, noted.hash)
    assert (await log.verify(later)).faults == ["entry 11 is not in the log, which ends before it"]


async def exported(log: AuditLog) -> Sequence[str]:
    lines: list[str] = []
    await log.export(lambda entry: lines.append(line_of(entry)))
    return lines


async def test_an_exported_log_is_verified_without_the_catalog(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    await log.forget_surplus(kept=8)
    newest = (await log.verify()).newest

    lines = await exported(log)

    assert verify_lines(lines, newest) == await log.verify(newest)
    assert verify_lines(lines, newest).removed > 0
    changed = [line.replace('"entry 4"', '"entry 5"') for line in lines]
    faults = {
        "was inserted, or is not as it was written": changed,
        "were deleted without a trace": [*lines[:-2], lines[-1]],
        f"entry {newest.number} is not in the log, which ends before it": lines[:-1],
    }
    for fault, tampered in faults.items():
        assert fault in " ".join(verify_lines(tampered, newest).faults), fault
    with pytest.raises(InvalidRequest, match=r"line 2: .*audit export"):
        verify_lines([lines[0], "{}"], None)


async def test_a_row_of_a_file_that_is_out_of_order_is_found(engine: AsyncEngine) -> None:
    lines = await exported(await some_entries(engine))
    rows = [json.loads(line) for line in lines]

    repeated = [*lines[:4], lines[3], *lines[4:]]
    removed = {**rows[2], "event": "removed", "details": {}, "hash": rows[3]["hash"]}
    forged = [*lines[:4], json.dumps(removed), *lines[4:]]

    assert verify_lines(repeated, None).faults == ["entry 4 comes after entry 4: it was inserted"]
    assert verify_lines(forged, None).faults == ["entry 3 comes after entry 4: it was inserted"]


async def test_names_that_are_not_text_are_exported_and_verified(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    await write(log, "ann", "tinkercloud keys create b\udcff")
    newest = (await log.verify()).newest

    lines = await exported(log)

    assert "\n".join(lines).isascii()
    assert verify_lines(lines, newest).faults == []


@pytest.mark.parametrize("line", ["", "[" * 100_000, '{"id": 1'])
def test_a_line_that_is_not_json_is_named(line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"line 1: the line is not JSON"):
        verify_lines([line], None)


async def test_a_number_of_removed_rows_that_is_none_is_a_fault(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    await log.begin("server:", None, "audit_remove", {"removed_in_all": "many"})

    assert verify_lines(await exported(log), None).faults == [
        "entry 11: removed_in_all is 'many'; expected a number"
    ]


async def test_old_entries_are_removed_and_the_rest_stays_verifiable(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    moment = now()
    await write(log, "ann", "later")

    await log.forget(moment)
    await log.forget(moment)
    first = await log.verify()
    await log.forget(now())
    second = await log.verify()

    assert (first.entries, first.removed, first.faults) == (3, 10, [])
    assert (second.removed, second.faults) == (13, [])
    (kept,) = await listed(log)
    assert kept.entry.event == "audit_remove"
    assert kept.entry.details["removed_in_all"] == 13


async def test_a_flood_of_one_owner_removes_only_its_own_entries(engine: AsyncEngine) -> None:
    log = AuditLog(engine)
    for number in range(12):
        await write(log, "ann", f"{number}")
        if number % 6 == 0:
            await write(log, "bob", f"{number}")

    await log.forget_surplus(kept=8)
    await log.forget_surplus(kept=8)
    verdict = await log.verify()
    own = [row.entry.details["path"] for row in await listed(log, "ann")]
    async with engine.connect() as connection:
        rows = (await connection.execute(text("SELECT count(*) FROM audit_log"))).scalar()

    assert (verdict.removed, verdict.faults) == (16, [])
    assert own == ["8", "9", "10", "11"]
    assert len(await listed(log, "bob")) == 2
    assert rows == 8 + 4 + 1 + 3, "one row stands for removed neighbours"


async def test_a_deletion_that_looks_like_retention_is_found(engine: AsyncEngine) -> None:
    log = await some_entries(engine)
    moment = now()
    await write(log, "ann", "later")
    await log.forget(moment)

    await change(
        engine, "UPDATE audit_log SET event = 'removed', details = '{}' WHERE id IN (11, 12)"
    )

    assert (await log.verify()).faults == [
        "12 entries were removed, but the log records the removal of 10"
    ]
