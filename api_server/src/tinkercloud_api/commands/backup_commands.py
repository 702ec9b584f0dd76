"""`tinkercloud backup`: making, checking and restoring backups of a server."""

import asyncio
import fcntl
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from tinkercloud_api.commands.common.local_catalog import (
    Change,
    StateDir,
    command_owner,
    newest_in_file,
    record_in_file,
)
from tinkercloud_api.commands.common.progress import copying, waiting
from tinkercloud_api.commands.common.shared import (
    Json,
    Yes,
    confirm,
    fail,
    read_settings,
    say_line,
)
from tinkercloud_api.config.readable import binary_size, moment

app = typer.Typer(help="Make, check and restore backups of a server.", no_args_is_help=True)

_PIPE = "-"
_INCOMPLETE = ".incomplete"
_LOADING = "loading the command and the settings"
_ToRead = Annotated[str, typer.Argument(help="The backup; - reads standard input.")]


@app.command("create")
def create_backup(
    file: Annotated[str, typer.Argument(help="File to create; - writes to standard output.")],
    state_dir: StateDir = None,
    *,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="Include the checkpoint store, if it is a folder on this machine."
        ),
    ] = False,
    journals: Annotated[
        bool,
        typer.Option(
            "--journals",
            help="Include the journals of session heads, with which runs continue that are not"
            " suspended.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up the server's catalog and settings to one file, also while it runs.

    The file contains hashes of API keys and the server's secrets, and with --journals also training
    data. Settings that are secret are left out.
    """
    with waiting(_LOADING):
        from tinkercloud_api.admin.backup import create

    if file == _PIPE and as_json:
        fail("--json: with -, standard output is the backup; leave --json out")
    if file == _PIPE and sys.stdout.isatty():
        fail("standard output is a terminal; redirect it to a file or a command")
    os.umask(0o077)
    settings = read_settings(state_dir=state_dir)
    where = "standard output" if file == _PIPE else file
    parts = {"--checkpoints": checkpoints, "--journals": journals}
    options = [name for name, is_included in parts.items() if is_included]
    with _failures(f"write {where}"):
        source = create.sources(settings, checkpoints=checkpoints, journals=journals)
        if file != _PIPE:
            create.check_place(Path(file), source)
        with (
            _recorded(source.catalog, " ".join(["tinkercloud backup create", file, *options])),
            copying("copied", create.size_of(source)) as progress,
            _output(file) as output,
            _workspace(file) as workspace,
        ):
            manifest = create.create(source, output, workspace, progress)
    _report(manifest, f"backed up to {where}", as_json=as_json, to_stderr=file == _PIPE)


@app.command("verify")
def verify_backup(file: _ToRead, *, as_json: Json = False) -> None:
    """Check a backup: its checksums, its catalog, and that it has the checkpoints that it lists."""
    with waiting(_LOADING):
        from tinkercloud_api.admin.backup import verify

    with (
        _failures(f"check {file}"),
        _input(file) as (stream, name),
        _workspace(_PIPE) as workspace,
        copying("checked", _size(file)) as progress,
    ):
        manifest = verify.verify(stream, name, workspace, progress)
    _report(manifest, f"{name} is complete", as_json=as_json, to_stderr=False)


@app.command("restore")
def restore_backup(
    file: _ToRead,
    state_dir: StateDir = None,
    *,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Delete what the state folder has instead of what the backup has. What the backup"
            " does not have stays.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Restore a backup to the state folder of a server that does not run.

    The backup is checked before anything changes. A restore that is killed has changed everything
    or nothing: the next server or command that uses the folder completes it.
    """
    with waiting(_LOADING):
        from tinkercloud_api.admin.backup import restore
        from tinkercloud_api.catalog.access.audit_log import RESTORE, RESTORED

        os.umask(0o077)
        settings = read_settings(state_dir=state_dir)
    with _failures(f"restore {file}"), _input(file) as (stream, name):
        where = restore.target(settings, replaces=replace)
        if replace:
            if file == _PIPE and not yes:
                fail("--replace: standard input is the backup, so nobody can be asked; add --yes")
            confirm(f"Replace the state in {where.state_dir} by {name}?", skipped=yes)
        catalog = where.state_dir / "catalog.db"
        replaced = newest_in_file(catalog)
        with copying("restored", _size(file)) as progress:
            manifest = restore.restore(stream, name, where, progress)
        objects = [f"instead of {replaced}", f"{RESTORED}{moment(manifest.created_at)}"]
        change = Change(RESTORE, ["backup", "restore", file], objects)
        record_in_file(catalog, change, "done")
    _report(manifest, f"restored {name} to {where.state_dir}", as_json=as_json, to_stderr=False)
    typer.echo(f"serve it with: {_serving(where.state_dir)}", err=True)


def _serving(folder: Path) -> str:
    """Return the command that serves a restored state folder with the settings of its server."""
    from tinkercloud_api.config import server_settings
    from tinkercloud_api.config.settings import CONFIG_FILE_VARIABLE, default_state_dir

    words = ["tinkercloud", "serve"]
    if folder != default_state_dir():
        words += ["--state-dir", str(folder)]
    file = folder / server_settings.FILE
    settings = f"{CONFIG_FILE_VARIABLE}={shlex.quote(str(file))} " if file.is_file() else ""
    return settings + shlex.join(words)


def _report(manifest: Any, sentence: str, *, as_json: bool, to_stderr: bool) -> None:  # noqa: ANN401 - loaded late
    """Print what a backup has."""
    numbers = {
        "files": len(manifest.files),
        "size_bytes": manifest.size_bytes,
        "checkpoints": manifest.count("checkpoints/runs/*/*weights/*/manifest.json"),
        "journals": manifest.count("heads/*/journals/runs/*/journal/manifest.json"),
    }
    if as_json:
        described = manifest.model_dump(mode="json", exclude={"files"})
        typer.echo(json.dumps({**described, **numbers}))
        return
    lines = [
        f"{sentence}: {binary_size(manifest.size_bytes)} in {numbers['files']} files of"
        f" {moment(manifest.created_at)}, release {manifest.release}",
        f"checkpoints: {numbers['checkpoints'] if manifest.has_checkpoints else 'not included'}",
        f"journals: {numbers['journals'] if manifest.has_journals else 'not included'}",
    ]
    if manifest.left_out:
        lines.append(f"settings left out: {', '.join(manifest.left_out)}")
    lines += [f"damaged before the backup: {name}: {why}" for name, why in manifest.damaged.items()]
    for line in lines:
        say_line(line, err=to_stderr)


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    """Exit with an error message instead of an exception.

    Args:
        doing: what is done with files, such as `write FILE`.
    """
    from tinkercloud_api.catalog.backup import BackupError
    from tinkercloud_api.config.state_folder import StateFolderError

    try:
        yield
    except (BackupError, StateFolderError) as error:
        fail(str(error))
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        fail(f"cannot {doing} ({named}{error.strerror or error}); nothing was written or changed")


@contextmanager
def _recorded(catalog: Path, command: str) -> Iterator[None]:
    """Record a backup before the copy, which has the hashes of all keys, and then its outcome.

    The file of a catalog is neither created nor migrated. A backup is needed most when it can't be
    written: then a warning replaces the record.
    """
    from tinkercloud_api.catalog.access.audit_log import AuditLog
    from tinkercloud_api.catalog.schema.connection import described, open_database
    from tinkercloud_api.catalog.schema.tables import AuditEntry
    from tinkercloud_protocol.wire.errors import Unavailable

    async def write(status: str, entry: AuditEntry | None = None) -> AuditEntry:
        engine = open_database(f"sqlite+aiosqlite:///{catalog}")
        try:
            log = AuditLog(engine)
            if entry is not None:
                await log.finish(entry, {"status": status})
                return entry
            details = {"method": "COMMAND", "path": command, "status": status, "objects": []}
            return await log.begin(command_owner(), None, "backup_create", details)
        finally:
            await engine.dispose()

    def record(status: str, entry: AuditEntry | None = None) -> AuditEntry | None:
        try:
            return asyncio.run(write(status, entry))
        except Unavailable as error:
            why = described(error.__cause__ or error)
            typer.echo(f"not recorded in the audit log of {catalog}: {why}", err=True)
            return None

    started, status = record("started") if catalog.is_file() else None, "failed"
    try:
        yield
        status = "done"
    finally:
        if started is not None:
            record(status, started)


@contextmanager
def _output(file: str) -> Iterator[IO[bytes]]:
    """Return where a backup is written; a file exists only once it is complete."""
    if file == _PIPE:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target, staged = Path(file), Path(f"{file}{_INCOMPLETE}")
    with staged.open("ab") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"{file} is being written by another command; choose another file")
        try:
            if target.exists():
                fail(f"{file} already exists; choose a new file")
            output.truncate(0)
            yield output
            output.flush()
            os.fsync(output.fileno())
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)


@contextmanager
def _workspace(file: str) -> Iterator[Path]:
    """Return a temporary folder: next to a file, or that of the system."""
    folder_of_file = None if file == _PIPE else Path(file).absolute().parent
    with tempfile.TemporaryDirectory(dir=folder_of_file, prefix=".tinkercloud-backup-") as folder:
        yield Path(folder)


@contextmanager
def _input(file: str) -> Iterator[tuple[IO[bytes], str]]:
    if file == _PIPE:
        yield sys.stdin.buffer, "standard input"
        return
    with Path(file).open("rb") as stream:
        yield stream, file


def _size(file: str) -> int | None:
    return None if file == _PIPE else Path(file).stat().st_size
