"""Commands that use the catalog of this machine's state folder, or of the configured database."""

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from sqlalchemy.exc import DBAPIError

from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.schema.connection import (
    CatalogUnreachableError,
    described,
    migrate,
    open_database,
)
from tinkercloud_api.catalog.schema.tables import ApiKey
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.commands.shared import fail, read_settings
from tinkercloud_api.config import state_folder
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.wire.errors import Unavailable

T = TypeVar("T")

StateDir = Annotated[
    Path | None,
    typer.Option(
        help="State folder of the server. Default: the state_dir setting.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Change:
    """What a command changes in the catalog, for the audit log."""

    event: str
    """`<resource>_<action>`, as in `mutations`."""
    arguments: Sequence[object]
    """The command after `tinkercloud`, without secrets."""


def with_catalog(state_dir: Path | None, work: Callable[[Catalog], Awaitable[T]]) -> T:
    """Apply a function to the catalog, and print on standard error which catalog was used."""
    return _with_catalog(state_dir, lambda catalog, _log: work(catalog))


def change_catalog(
    state_dir: Path | None, change: Change, work: Callable[[Catalog], Awaitable[T]]
) -> T:
    """Apply a function that changes the catalog, as `with_catalog`, and record it.

    The entry of the audit log is written first, so that no change can happen without one. Its owner
    is `command:` and the user of this machine. `work` returns None or False for a refusal.
    """

    async def recorded(catalog: Catalog, log: AuditLog) -> T:
        details: dict[str, object] = {
            "method": "COMMAND",
            "path": " ".join(["tinkercloud", *map(str, change.arguments)]),
            "status": "no response yet",
        }
        number = await log.begin(f"command:{_user()}", None, change.event, details)
        result = await work(catalog)
        outcome = {**details, "status": "done" if result else "refused"}
        if isinstance(result, ApiKey):
            outcome["objects"] = [f"key {result.id}"]
        await log.finish(number, outcome)
        return result

    return _with_catalog(state_dir, recorded)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _with_catalog(state_dir: Path | None, work: Callable[[Catalog, AuditLog], Awaitable[T]]) -> T:
    settings = read_settings(state_dir=state_dir)

    async def run() -> T:
        engine = open_database(settings.catalog_url)
        await migrate(engine)
        catalog = Catalog(engine)
        try:
            return await work(catalog, AuditLog(engine))
        finally:
            await catalog.close()

    try:
        whose = _whose_catalog(settings)
        result = asyncio.run(run())
    except (CatalogUnreachableError, state_folder.StateFolderError) as error:
        fail(str(error))
    except Unavailable as error:
        if not isinstance(error.__cause__, DBAPIError):
            raise
        fail(f"the catalog can't be read or written ({described(error.__cause__)})")
    typer.echo(whose, err=True)
    return result


def _whose_catalog(settings: Settings) -> str:
    """Return a description of the configured catalog and its server; create its folder."""
    if settings.database_url is not None:
        return "catalog: the database of the database_url setting"
    folder = settings.state_dir.absolute()
    is_new = not (folder / "catalog.db").exists()
    state_folder.make(folder)
    if (running := state_folder.running_server(folder)) is not None:
        return f"catalog: in {folder}, used by the server with process id {running.pid}"
    made = " (newly created)" if is_new else ""
    return f"catalog: in {folder}{made}; no server uses it; select another folder with --state-dir"


def moment_of(moment: datetime | None) -> str:
    """Return a time as text; empty for None."""
    return moment.isoformat(timespec="seconds") if moment is not None else ""
