"""How long the pages of the console and their JSON take with many runs, and which tables they read.

    python -m benchmarks.catalog.console_pages [--runs 10000] [--points 100]

The catalog is SQLite's, with a tenth of the runs alive. Requests of an admin, who sees all runs, are
passed to the application without HTTP, one after the other: times are those of the server alone.
A table is read whole where SQLite's plan of a statement scans it without an index.
"""

import argparse
import asyncio
import gc
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import httpx
from pydantic import SecretStr
from sqlalchemy import Engine, event, insert

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.suites.access import started
from tinkercloud_api.access.auth import new_key
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import (
    Program,
    Project,
    RunPoint,
    Session,
    Table,
    TrainingRun,
    UsageHour,
)
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.responses.run_states import RunStatus
from tinkercloud_testing.serving.providers import OneHead

OWNERS, RUNS_OF_A_SESSION, RUNS_OF_A_PROGRAM, ROUNDS = 50, 10, 10, 21
PROJECTS = 200
STEPS = {"loss": [4, 4.9, 1.1, 1.4, 0], "grad_norm": [4, 2.0, 0.4, 0.6, 0]}
_TOKENS = "trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=100, help="points of each run")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), chosen.runs, chosen.points)), indent=1))


async def measure(folder: Path, runs: int, points: int) -> dict[str, Any]:
    """Return the milliseconds of each page, and the tables that its statements read whole."""
    file = folder / "catalog.db"
    await fill(f"sqlite+aiosqlite:///{file}", runs, points)
    # Statements of the housekeeping would count for the page that loads meanwhile.
    settings = Settings(state_dir=folder, housekeeping_seconds=86_400)
    async with logged_in(settings) as client:
        # The server does so with what it has imported (`lasting_objects`).
        gc.freeze()
        pages = {path: await page(client, path, file) for path in paths(runs)}
    return {"runs": runs, "points": runs * points, "pages": pages}


def paths(runs: int) -> Iterable[str]:
    """Return the paths of the pages of a catalog with so many runs, and of the same as JSON."""
    one, day = run_id(runs - 1), datetime.now(UTC).date()
    compared = "&".join(f"run={run_id(runs - 1 - each)}" for each in range(8))
    lists = ("runs", "problems", "usage", "models", "programs", "projects", "users", "account")
    twins = ("problems", "usage", "base_models", "programs", "projects", "users", "auth/apikey/me")
    return (
        *(f"/console/{name}" for name in (*lists, "sessions", "playground")),
        "/console/sessions?status=waiting",
        "/console/runs?search=s99",
        "/console/runs?search=nothing+has+this+name",
        f"/console/runs?search={project(0)}",
        "/console/sessions?search=s99",
        *(f"/console/runs?status={status}" for status in get_args(RunStatus)),
        f"/console/usage?month={day:%Y-%m}",
        "/console/users/bootstrap",
        f"/console/programs/{program_id(0)}",
        f"/console/projects/{project(0)}",
        f"/console/runs/{one}",
        f"/console/runs/{one}/surplus_checkpoints?keep=1",
        f"/console/compare?{compared}",
        *(f"/api/v1/{name}" for name in twins),
        "/api/v1/runs?access_scope=accessible&limit=100",
        f"/api/v1/usage/month?month={day:%Y-%m}",
        "/api/v1/users/bootstrap/keys",
        f"/api/v1/programs/{program_id(0)}",
        f"/api/v1/projects/{project(0)}",
        *(f"/api/v1/runs/{one}{part}" for part in ("", "/curve", "/samples", "/timeline")),
        f"/api/v1/runs/{one}/surplus_checkpoints?keep=1",
    )


@asynccontextmanager
async def logged_in(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an admin's client of the console of a server with these settings."""
    key = new_key()
    settings = settings.model_copy(update={"bootstrap_key": SecretStr(key)})
    async with started(Application(settings, OneHead())) as app:
        transport, headers = httpx.ASGITransport(app=app), {"X-API-Key": key}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://t", headers=headers
        ) as client:
            await log_in(client, key)
            yield client


async def log_in(client: httpx.AsyncClient, key: str) -> None:
    """Open a session of the console with a key."""
    answer = await client.post(
        "/console/login", data={"key": key}, headers={"Origin": "http://t", "Host": "t"}
    )
    assert answer.status_code == 303, answer.text


async def page(client: httpx.AsyncClient, path: str, file: Path) -> dict[str, Any]:
    """Measure one page."""
    with Statements() as statements:
        await loaded(client, path)
    seconds = [await loaded(client, path) for _ in range(ROUNDS)]
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 1),
        "p95_ms": round(1e3 * statistics.quantiles(seconds, n=20)[-1], 1),
        "statements": len(statements.seen),
        "tables_read_whole": sorted(set(scanned(file, statements.seen))),
    }


async def loaded(client: httpx.AsyncClient, path: str) -> float:
    """Load a page, and return the seconds that it took."""
    start = time.perf_counter()
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - start


class Statements:
    """The statements of a while, with their parameters."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __enter__(self) -> "Statements":
        event.listen(Engine, "before_cursor_execute", self._add)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(Engine, "before_cursor_execute", self._add)

    def _add(self, _db: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:  # noqa: ANN401 - SQLAlchemy's own
        if statement.startswith(("SELECT", "WITH")):
            self.seen.append((statement, parameters))


def scanned(file: Path, statements: Iterable[tuple[str, Any]]) -> Iterable[str]:
    """Yield the tables that statements read whole, without an index."""
    with closing(sqlite3.connect(file)) as db:
        for statement, parameters in statements:
            for *_, step in db.execute(f"EXPLAIN QUERY PLAN {statement}", parameters):
                words = step.split()
                if (
                    words[0] == "SCAN"
                    and "INDEX" not in words
                    and words[1] in Table.metadata.tables
                ):
                    yield words[1]


def run_id(number: int) -> str:
    return f"s{number // RUNS_OF_A_SESSION}:train:{number % RUNS_OF_A_SESSION}"


async def fill(url: str, runs: int, points: int) -> None:
    """Create a catalog with so many runs in an empty database."""
    engine = open_database(url)
    await migrate(engine)
    now = datetime.now(UTC)
    rows: list[tuple[Any, Callable[[int], list[dict[str, Any]]]]] = [
        (Session, lambda number: [] if number % RUNS_OF_A_SESSION else [session(number, now)]),
        (TrainingRun, lambda number: [run(number, now)]),
        (UsageHour, lambda number: [usage(number, now)]),
        (Program, lambda number: [] if number % RUNS_OF_A_PROGRAM else [program(number, now)]),
        (RunPoint, lambda number: [point(number, each, now) for each in range(points)]),
    ]
    async with engine.begin() as db:
        names = [project(number * RUNS_OF_A_SESSION) for number in range(PROJECTS)]
        of_all = {"created_at": now, "created_by": owner(0)}
        await db.execute(insert(Project), [{"id": name, "name": name, **of_all} for name in names])
        for table, made in rows:
            for start in range(0, runs, 100):
                some = [
                    row for number in range(start, min(start + 100, runs)) for row in made(number)
                ]
                await db.execute(insert(table), some)
    await Catalog(engine).make_searchable()
    await engine.dispose()


def session(number: int, now: datetime) -> dict[str, Any]:
    names = {"id": run_id(number).partition(":")[0], "owner": owner(number), "sdk_version": "1"}
    times = {"created_at": now, "last_heartbeat_at": now}
    values = {"project_id": project(number), "tags": [], "user_metadata": {}}
    return {**names, **times, **values}


def project(number: int) -> str:
    return f"research-{number // RUNS_OF_A_SESSION % PROJECTS}"


def owner(number: int) -> str:
    return f"owner-{number // RUNS_OF_A_SESSION % OWNERS}"


def run(number: int, now: datetime) -> dict[str, Any]:
    names = {"id": run_id(number), "session_id": run_id(number).partition(":")[0]}
    spec = {"owner": owner(number), "lora": {"rank": 8}}
    return {
        **names,
        "owner": owner(number),
        "base_model": "tiny/llama",
        "spec": spec,
        "created_at": now,
        "last_request_at": now - timedelta(seconds=number),
        "generation": "g",
        "deleted_at": now if number % 10 else None,
        "is_swept": True,
    }


def program_id(number: int) -> str:
    return f"program-{number // RUNS_OF_A_PROGRAM}"


def program(number: int, now: datetime) -> dict[str, Any]:
    return {
        "id": program_id(number),
        "owner": owner(number),
        "name": program_id(number),
        "module": "train",
        "args": [],
        "phase": "Succeeded",
        "progress": {},
        "created_at": now,
    }


def usage(number: int, now: datetime) -> dict[str, Any]:
    names = {"model_id": run_id(number), "session_id": run_id(number).partition(":")[0]}
    amounts = {
        "hour": int(now.timestamp()) // 3600 - number % 500,
        "engine_seconds": 1.0,
    } | dict.fromkeys(_TOKENS, 9)
    common = {"generation": "g", "owner": owner(number), "base_model": "tiny/llama"}
    return {**names, **amounts, **common}


def point(number: int, each: int, now: datetime) -> dict[str, Any]:
    return {
        "run_id": run_id(number),
        "stride": 4,
        "number": each,
        "steps": 4,
        "step": 4 * each + 4,
        "at": now,
        "metrics": STEPS,
    }


if __name__ == "__main__":
    main()
