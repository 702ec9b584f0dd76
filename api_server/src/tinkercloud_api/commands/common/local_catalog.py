"""Commands that use the catalog of this machine's state folder, or of the configured database."""

import asyncio
import getpass
import os
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import fail, read_settings

if TYPE_CHECKING:
    from tinkercloud_api.catalog.access.audit_chain import Mark, Verdict
    from tinkercloud_api.catalog.access.audit_log import AuditLog
    from tinkercloud_api.catalog.schema.tables import AuditEntry
    from tinkercloud_api.catalog.store import Catalog
    from tinkercloud_api.config.settings import Settings

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
    """`<resource>_<action>`, as in `Effect.event`."""
    arguments: Sequence[object]
    """The command after `tinkercloud`, without secrets."""
    objects: Sequence[str] = ()
    """What it changes, such as `key 7`; new keys are added."""


def with_catalog(state_dir: Path | None, work: Callable[["Catalog"], Awaitable[T]]) -> T:
    """Apply a function that only reads to the catalog, and print on standard error which it was.

    Exits with an error if there is none.
    """
    return _reading(state_dir, lambda catalog, _log: work(catalog))


def change_catalog(
    state_dir: Path | None, change: Change, work: Callable[["Catalog"], Awaitable[T]]
) -> T:
    """Apply a function that changes the catalog, which is created if there is none; record it.

    The entry of the audit log is written first, so that no change can happen without one. `work`
    returns None or False for a refusal.
    """
    from tinkercloud_api.catalog.schema import tables
    from tinkercloud_protocol.wire.errors import Unavailable

    for each in map(str, change.arguments):
        if each.encode(errors="replace").decode() != each:
            fail(f"{each!r} is not UTF-8 text; use a name that is")

    async def recorded(catalog: "Catalog", log: "AuditLog") -> T:
        details = _details(change, "no response yet")
        entry = await log.begin(command_owner(), None, change.event, details)
        result = await work(catalog)
        made = [f"key {result.id}"] if isinstance(result, tables.ApiKey) else []
        outcome = {"status": "done" if result else "refused", "objects": [*change.objects, *made]}
        try:
            await log.finish(entry, outcome)
        except Unavailable as error:
            # A new key is shown only once, so the command continues.
            typer.echo(f"audit entry {entry.id} has no outcome: {error.message}", err=True)
        return result

    return _with_catalog(read_settings(state_dir=state_dir), recorded)


def check_owner(option: str, name: str) -> None:
    """Exit with an error if a new owner would have the name of a group.

    Args:
        option: the option or argument that names the owner.
        name: the owner.
    """
    from tinkercloud_api.catalog.access.user_rows import check_owner_name
    from tinkercloud_protocol.wire.errors import InvalidRequest

    try:
        check_owner_name(option, name)
    except InvalidRequest as error:
        fail(error.message)


def verify_audit_log(state_dir: Path | None, mark: "Mark | None") -> "Verdict":
    """Check the audit log, as `with_catalog`.

    Args:
        state_dir: the state folder; None means that of the settings.
        mark: an entry that it must contain.
    """
    return _reading(state_dir, lambda _catalog, log: log.verify(mark))


def export_audit_log(state_dir: Path | None, write: Callable[["AuditEntry"], object]) -> None:
    """Call a function with each row of the audit log, as `with_catalog`.

    Args:
        state_dir: the state folder; None means that of the settings.
        write: the function.
    """
    _reading(state_dir, lambda _catalog, log: log.export(write))


def record_in_file(catalog: Path, change: Change, status: str) -> None:
    """Record a command about the file of a catalog, which is neither created nor migrated.

    The command continues with a warning if that is impossible: a backup is needed most when the
    catalog can't be written.
    """
    from tinkercloud_api.catalog.access.audit_log import AuditLog
    from tinkercloud_api.catalog.schema.connection import described, open_database
    from tinkercloud_protocol.wire.errors import Unavailable

    async def record() -> None:
        engine = open_database(f"sqlite+aiosqlite:///{catalog}")
        try:
            details = _details(change, status) | {"objects": list(change.objects)}
            await AuditLog(engine).begin(command_owner(), None, change.event, details)
        finally:
            await engine.dispose()

    if catalog.is_file():
        try:
            asyncio.run(record())
        except Unavailable as error:
            why = described(error.__cause__ or error)
            typer.echo(f"not recorded in the audit log of {catalog}: {why}", err=True)


def newest_in_file(catalog: Path) -> str:
    """Return number and hash of the newest audit entry in the file of a catalog, if it has one."""
    query = "SELECT number, hash FROM audit_chain"
    try:
        with closing(sqlite3.connect(f"{catalog.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            number, digest = opened.execute(query).fetchone()
    except (sqlite3.Error, TypeError):
        return "none"
    return f"{number}:{digest}"


def _details(change: Change, status: str) -> dict[str, object]:
    path = " ".join(["tinkercloud", *map(str, change.arguments)])
    return {"method": "COMMAND", "path": path, "status": status}


def command_owner() -> str:
    """Return the owner of commands in the audit log: `command:` and the user of this machine."""
    try:
        return f"command:{getpass.getuser()}"
    except (KeyError, OSError):
        return f"command:{os.getuid()}"


def _reading(state_dir: Path | None, work: Callable[["Catalog", "AuditLog"], Awaitable[T]]) -> T:
    settings = read_settings(state_dir=state_dir)
    folder = settings.state_dir.absolute()
    # A folder that is not accessible is named by what opens it.
    with suppress(PermissionError):
        if settings.database_url is None and not (folder / "catalog.db").exists():
            fail(
                f"there is no catalog in {folder}: no server has used this folder; name that of"
                " your server with --state-dir"
            )
    return _with_catalog(settings, work)


def _with_catalog(settings: "Settings", work: Callable[["Catalog", "AuditLog"], Awaitable[T]]) -> T:
    with ExitStack() as opening:
        # Importing takes seconds on a busy machine.
        opening.enter_context(waiting("opening the catalog"))
        from sqlalchemy.exc import DBAPIError

        from tinkercloud_api.catalog.access.audit_log import AuditLog
        from tinkercloud_api.catalog.schema.connection import (
            CatalogUnreachableError,
            described,
            migrate,
            open_database,
        )
        from tinkercloud_api.catalog.store import Catalog
        from tinkercloud_api.config.state_folder import StateFolderError
        from tinkercloud_protocol.wire.errors import Unavailable

        async def run() -> T:
            engine = open_database(settings.catalog_url)
            await migrate(engine)
            catalog = Catalog(engine)
            opening.close()
            try:
                return await work(catalog, AuditLog(engine))
            finally:
                await catalog.close()

        try:
            whose = _whose_catalog(settings)
            result = asyncio.run(run())
        except (CatalogUnreachableError, StateFolderError) as error:
            opening.close()
            fail(str(error))
        except Unavailable as error:
            opening.close()
            if not isinstance(error.__cause__, DBAPIError):
                raise
            fail(f"the catalog can't be read or written ({described(error.__cause__)})")
    typer.echo(whose, err=True)
    return result


def _whose_catalog(settings: "Settings") -> str:
    """Return a description of the configured catalog and its server; create its folder."""
    from tinkercloud_api.config import state_folder

    if settings.database_url is not None:
        return "catalog: the database of the database_url setting"
    folder = settings.state_dir.absolute()
    is_new = not (folder / "catalog.db").exists()
    state_folder.make(folder)
    if (running := state_folder.running_server(folder)) is not None:
        return f"catalog: in {folder}, used by the server with process id {running.pid}"
    made = " (newly created)" if is_new else ""
    return f"catalog: in {folder}{made}; no server uses it (--state-dir selects another)"
