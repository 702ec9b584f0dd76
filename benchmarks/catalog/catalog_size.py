"""How large the catalog becomes with runs.

    python -m benchmarks.catalog.catalog_size [--runs 1000]

Each run has a session, three checkpoints, two sampling sessions, an hour of usage and ten entries
of the audit log. The size is that of SQLite's file, compacted.
"""

import argparse
import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from sqlalchemy import insert

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import (
    AuditEntry,
    Checkpoint,
    SamplingSession,
    Session,
    Table,
    TrainingRun,
    UsageHour,
)
from tinkercloud_api.catalog.store import Catalog

_TOKENS = "trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"
_AUDIT_ENTRIES = 10
_ADDED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        empty = size(Path(folder) / "empty.db", 0)
        full = size(Path(folder) / "full.db", runs)
    result = {"runs": runs, "empty_bytes": empty, "bytes_per_run": (full - empty) / runs}
    print(json.dumps(result))


def size(file: Path, runs: int) -> int:
    """Return the size in bytes of a new catalog with so many runs."""
    asyncio.run(fill(file, runs))
    with closing(sqlite3.connect(file)) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


async def fill(file: Path, runs: int) -> None:
    """Create a catalog with so many runs."""
    engine = open_database(f"sqlite+aiosqlite:///{file}")
    await migrate(engine)
    rows = [row for number in range(runs) for row in rows_of_a_run(number)]
    async with engine.begin() as db:
        for kind in dict.fromkeys(kind for kind, _ in rows):
            await db.execute(insert(kind), [values for each, values in rows if each is kind])
    await Catalog(engine).make_searchable()
    await engine.dispose()


def rows_of_a_run(number: int) -> list[tuple[type[Table], dict[str, object]]]:
    """Return a run's rows, by table."""
    session, owner, model = str(uuid4()), "ann@example.com", "Qwen/Qwen3-8B"
    run = f"{session}:train:0"
    common = {"session_id": session, "owner": owner, "base_model": model}
    spec = {"base_model": model, "lora_config": {"rank": 32, "seed": 1, "train_mlp": True}}
    client = {"sdk_version": "0.38.0", "tags": [], "user_metadata": {"experiment": "a name"}}
    rows: list[tuple[type[Table], dict[str, object]]] = [
        (Session, {"id": session, "owner": owner, **client}),
        (TrainingRun, {"id": run, "spec": spec, "user_metadata": {"step": "1"}, **common}),
        (
            UsageHour,
            {"generation": str(uuid4()), "hour": 500_000, "model_id": run, "engine_seconds": 1.0}
            | {"owner": owner, "session_id": session, "base_model": model}
            | dict.fromkeys(_TOKENS, 1_000_000),
        ),
    ]
    checkpoint = {"run_id": run, "kind": "weights", "owner": owner, "base_model": model}
    rows += [
        (
            Checkpoint,
            {"name": f"step-{step}", "is_indexed": True, "size_bytes": 1 << 30, **checkpoint}
            | {"created_at": _ADDED_AT},
        )
        for step in range(3)
    ]
    rows += [
        (SamplingSession, {"id": f"{session}:sample:{number}", "run_id": run, **common})
        for number in range(2)
    ]
    details = {"path": "/api/v1/create_model", "address": "10.0.0.1", "model_id": run}
    entry = {"owner": owner, "key_id": 1, "event": "model_create", "details": details}
    first = 1 + number * _AUDIT_ENTRIES
    ids = range(first, first + _AUDIT_ENTRIES)
    return rows + [
        (AuditEntry, {**entry, "id": each, "at": _ADDED_AT, "hash": 64 * "0"}) for each in ids
    ]


if __name__ == "__main__":
    main()
