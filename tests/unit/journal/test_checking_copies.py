"""A head checks the copy of a journal before it continues it, however large the copy is."""

import tracemalloc
from pathlib import Path

import pytest

from tinkercloud_protocol.heads import journal_copy
from tinkercloud_protocol.heads.journal_copy import Base, Header, object_key
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.records import DamagedJournal, Entry, Record
from tinkercloud_worker.journal.shared_log import Ends, SharedLog

OBJECTS = 12
BODY_BYTES = 1 << 20
MANIFEST = JournalManifest(
    run_id=str(MODEL), generations=["g1"], base_model="tiny", spec=SPEC, initial_seed=1
)


@pytest.fixture
def log(tmp_path: Path) -> SharedLog:
    return SharedLog(open_store(tmp_path.as_uri()), str(MODEL), 60)


def a_record(index: int) -> Record:
    entry = Entry(seq_id=index + 1, path="/p", role="gradient", digest="00", size=BODY_BYTES)
    return Record(index, entry, bytes([index]) * BODY_BYTES)


def a_header(index: int) -> Header:
    """Return the header of the object that has one record, of this index."""
    base = Base(snapshot=None, first_index=0) if index == 0 else None
    return Header(manifest=MANIFEST, start_index=index, next_index=index + 1, base=base)


async def write(log: SharedLog) -> None:
    """Write a journal of objects with one record each."""
    for index in range(OBJECTS):
        content = records.encode(a_record(index))
        await log.append(index + 1, journal_copy.encode(a_header(index), content))


async def test_a_copy_is_checked_with_one_object_in_memory_at_a_time(log: SharedLog) -> None:
    await write(log)

    tracemalloc.start()
    ends = await log.check()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert ends == Ends(a_header(OBJECTS - 1), Base(snapshot=None, first_index=0))
    assert peak < OBJECTS // 2 * BODY_BYTES


async def test_all_records_of_a_copy_are_read_in_order(log: SharedLog) -> None:
    await write(log)

    found = await log.read()

    assert found is not None
    assert found.records == [a_record(index) for index in range(OBJECTS)]


@pytest.mark.parametrize("call", ["read", "check"])
@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "of another place"])
async def test_damage_to_any_object_is_found(
    damage: str, call: str, log: SharedLog, tmp_path: Path
) -> None:
    await write(log)
    path = tmp_path / object_key(str(MODEL), OBJECTS // 2)
    content = path.read_bytes()
    header = a_header(OBJECTS // 2 - 1)
    changed = {
        "cut": content[:-1],
        "changed": content[:-1] + b"?",
        "of another place": journal_copy.encode(header, records.encode(a_record(0))),
    }
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(changed[damage])

    with pytest.raises(DamagedJournal, match=f"object {OBJECTS // 2}|are missing"):
        await (log.read() if call == "read" else log.check())
