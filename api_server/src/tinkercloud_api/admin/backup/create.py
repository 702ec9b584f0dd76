"""Makes a backup while the server and its heads run.

The catalog is copied first, because what it names is older than the copy of the rest: runs in it
are found in journals and suspended states that are copied later. What has changed until then is
corrected in the copy of the catalog, which is written last: it lists the checkpoints that are in
the backup, and no others.

Journals are copied before the suspended states in the store, and both again for runs that were in
neither, because a run that is suspended or resumed moves from one to the other.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from sqlalchemy import URL, make_url

from tinkercloud_api.admin.backup import archive, open_files
from tinkercloud_api.admin.backup.archive import Header, Manifest, Progress, Writer
from tinkercloud_api.admin.backup.open_files import OpenFile, Unit
from tinkercloud_api.catalog import backup as catalog_backup
from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_api.catalog.schema.connection import newest_revision, open_database
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config import pending_restore, server_settings, state_folder
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.heads import descriptors, journal_copy
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import (
    CheckpointKind,
    CheckpointPath,
    evicted_prefix,
)

_RUNS = "runs"
_UNFINISHED = "#"
"""In the names of files that the store's client has not finished."""
_CATALOG_COPY = "catalog.db"

Find = Callable[[ExitStack], Unit | None]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a backup has, and where it is."""

    catalog: Path
    state_dir: Path
    store: Path | None
    """Folder of the checkpoint store; None if the backup has no checkpoints."""
    has_journals: bool


def sources(settings: Settings, *, checkpoints: bool, journals: bool) -> Sources:
    """Return what is backed up.

    Args:
        settings: the settings of the server.
        checkpoints: whether the checkpoint store is.
        journals: whether the journals of heads are.

    Raises:
        BackupError: it is not on this machine, or another server's.
        StateFolderError: the state folder is of a newer release, or a backup is restored to it.
    """
    state_dir = settings.state_dir.absolute()
    url = make_url(settings.catalog_url)
    if url.get_backend_name() != "sqlite":
        raise BackupError(_dump(url))
    state_folder.finish_restore(state_dir)
    state_folder.check_version(state_dir)
    if journals and settings.provider == "kubernetes":
        raise BackupError(
            "--journals: with provider=kubernetes, journals are on the disks of the heads' pods;"
            " back up without it, and with head.durability.level: remote the checkpoint store has"
            " copies of them"
        )
    store = _store(settings, state_dir) if checkpoints else None
    return Sources(Path(url.database or ""), state_dir, store, journals)


def _dump(url: URL) -> str:
    shown = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
    return (
        f"the catalog is the database {shown}; back it up with `pg_dump --format=custom"
        f" --file=catalog.dump --dbname={shown}`, and restore it with `pg_restore --clean"
        f" --if-exists --single-transaction --dbname={shown} catalog.dump`"
    )


def _store(settings: Settings, state_dir: Path) -> Path:
    parsed = urlsplit(settings.checkpoint_url)
    if parsed.scheme != "file":
        raise BackupError(
            f"--checkpoints: the checkpoint store is {settings.checkpoint_url}, not a folder on"
            " this machine; back it up with its provider's tools, and leave the option out"
        )
    recorded = state_dir / server_settings.FILE
    if recorded.exists():
        used = server_settings.checkpoint_root(recorded.read_text())
        if used != settings.checkpoint_root:
            raise BackupError(
                f"--checkpoints: the server was started with checkpoint_root {used!r}, and this"
                f" command has {settings.checkpoint_root!r}; set TINKERCLOUD_CHECKPOINT_ROOT, or"
                " unset it, to what the server has"
            )
    return Path(url2pathname(parsed.path))


def check_place(file: Path, source: Sources) -> None:
    """Check that a backup is not written among the files that it copies.

    Raises:
        BackupError: it would contain itself, and be lost with what it is a backup of.
    """
    for folder in (source.state_dir, source.store):
        if folder is not None and file.resolve().is_relative_to(folder.resolve()):
            raise BackupError(
                f"{file} is in {folder}, which is backed up; choose a file elsewhere, best on"
                " another disk, or - for standard output"
            )


def size_of(source: Sources) -> int:
    """Return about how many bytes a backup has."""
    folders = [source.store] if source.store is not None else []
    if source.has_journals:
        heads = open_files.entries(source.state_dir / archive.HEADS)
        folders += [head / name for head in heads for name in ("journals", "unsaved")]
    sizes = [_size(path) for folder in folders for path in _files(folder)]
    return sum(sizes) + _size(source.catalog)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def create(source: Sources, output: IO[bytes], workspace: Path, progress: Progress) -> Manifest:
    """Write a backup.

    Args:
        source: what it has.
        output: where it is written.
        workspace: an empty folder with room for the catalog.
        progress: is called with the bytes of the files.

    Raises:
        BackupError: something can't be read.
        OSError: the output or the workspace can't be written.
    """
    descriptors.raise_limit()
    created_at, copied = now(), workspace / _CATALOG_COPY
    catalog_backup.back_up(source.catalog, copied)
    header = Header(
        release=this_release(),
        created_at=created_at,
        catalog_revisions=catalog_backup.revisions(copied),
        has_checkpoints=source.store is not None,
        has_journals=source.has_journals,
    )
    _require_current(header)
    if source.store is not None:
        _require_mounted(source.store, catalog_backup.named_checkpoints(copied))
    backup = _Backup(source, Writer(output, header, progress))
    backup.copy_files()
    if source.store is not None:
        missing = asyncio.run(_list_what_is_copied(copied, source.catalog, backup.checkpoints))
        # It may have been unmounted meanwhile.
        _require_mounted(source.store, missing)
        backup.damaged = {**missing, **backup.damaged}
    with copied.open("rb") as file:
        backup.writer.add(archive.CATALOG, file, copied.stat().st_size, 0o600)
    return backup.finish()


def _require_current(header: Header) -> None:
    if header.catalog_revisions != [newest := newest_revision()]:
        raise BackupError(
            f"the catalog has revision {', '.join(header.catalog_revisions)}, and this release has"
            f" {newest}; use the `tinkercloud` command of the release that the server has"
        )


def _require_mounted(store: Path, named: Collection[object]) -> None:
    if named and not open_files.entries(store):
        raise BackupError(
            f"--checkpoints: {store} is empty or missing, and the catalog lists {len(named)}"
            " checkpoints; mount the store, or leave the option out"
        )


class _Backup:
    """A backup that is being written."""

    def __init__(self, source: Sources, writer: Writer) -> None:
        self._source = source
        self.writer = writer
        self.checkpoints: list[CheckpointManifest] = []
        """Those that were copied and are not damaged."""
        self.damaged: dict[str, str] = {}
        self._left_out: list[str] = []
        self._done: set[Path] = set()
        """Folders of the units that were copied."""

    def copy_files(self) -> None:
        """Copy everything but the catalog."""
        state_dir, store = self._source.state_dir, self._source.store
        for name in (archive.VERSION, archive.SETTINGS):
            self._copy(partial(open_files.single, state_dir / name), state_dir, "")
        recorded = state_dir / archive.SETTINGS
        if recorded.exists():
            self._left_out = server_settings.left_out(recorded.read_text())
        while self._copy_runs():
            pass
        if store is None:
            return
        for path in _checkpoints(store):
            self._copy(partial(open_files.checkpoint, store, path), store, archive.CHECKPOINTS)
        for file in _other_files(store):
            self._copy(partial(open_files.single, file), store, archive.CHECKPOINTS)

    def _copy_runs(self) -> bool:
        """Copy the states of runs that were not copied yet; return whether there were any."""
        heads, store = self._source.state_dir / archive.HEADS, self._source.store
        found = False
        if self._source.has_journals:
            for head in open_files.entries(heads):
                found |= self._copy_each(
                    head / "journals", open_files.journal, heads, archive.HEADS
                )
                found |= self._copy_each(
                    head / "unsaved", open_files.suspended, heads, archive.HEADS
                )
        if store is not None:
            found |= self._copy_each(store, open_files.suspended, store, archive.CHECKPOINTS)
        if store is not None and self._source.has_journals:
            journals = store / journal_copy.FOLDER
            found |= self._copy_each(
                journals, open_files.shared_journal, store, archive.CHECKPOINTS
            )
        return found

    def _copy_each(
        self,
        root: Path,
        unit: Callable[[Path, str, ExitStack], Unit | None],
        relative_to: Path,
        prefix: str,
    ) -> bool:
        """Copy what there is of each run below a folder; return whether anything was."""
        found = False
        for folder in open_files.entries(root / _RUNS):
            if folder not in self._done and self._copy(
                partial(unit, root, folder.name), relative_to, prefix
            ):
                self._done.add(folder)
                found = True
        return found

    def _copy(self, find: Find, relative_to: Path, prefix: str) -> bool:
        """Copy open files that belong together; return whether there were any."""
        with open_files.opened(find) as unit:
            if unit is None:
                return False
            damage = unit.damage
            for each in unit.files:
                name = "/".join(
                    [*filter(None, [prefix]), *each.path.relative_to(relative_to).parts]
                )
                damage = self._add(name, each) or damage
        if damage is not None:
            self.damaged[unit.name] = damage
        elif unit.checkpoint is not None:
            self.checkpoints.append(unit.checkpoint)
        return True

    def _add(self, name: str, each: OpenFile) -> str | None:
        """Copy a file; return how it differs from what its manifest says."""
        stored = self.writer.add(name, each.file, each.size, each.mode)
        if each.expected is None or stored == each.expected:
            return None
        return f"its file {each.path.name} differs from its manifest"

    def finish(self) -> Manifest:
        """Write the manifest."""
        return self.writer.finish(self._left_out, self.damaged)


def _checkpoints(store: Path) -> Iterator[CheckpointPath]:
    """Yield the paths of the checkpoints in a store, incomplete ones included."""
    for run in open_files.entries(store / _RUNS):
        for kind in CheckpointKind:
            for folder in open_files.entries(run / kind):
                try:
                    yield CheckpointPath(run.name, kind, folder.name)
                except InvalidRequest:
                    continue


def _other_files(store: Path) -> Iterator[Path]:
    """Yield the files of a store that belong to no checkpoint, journal or suspended state."""
    for run in open_files.entries(store / _RUNS):
        yield from _files(store / evicted_prefix(run.name))
    units = {_RUNS, journal_copy.FOLDER, pending_restore.STAGING}
    for entry in open_files.entries(store):
        if entry.name not in units:
            yield from _files(entry)


def _files(folder: Path) -> Iterator[Path]:
    """Yield a file, or all files in a folder."""
    if folder.is_file():
        yield folder
    for path, _, names in os.walk(folder):
        yield from (Path(path) / name for name in sorted(names) if _UNFINISHED not in name)


async def _list_what_is_copied(
    copied: Path, catalog: Path, found: Iterable[CheckpointManifest]
) -> dict[str, str]:
    """Make a copied catalog list the checkpoints that were copied.

    Args:
        copied: the copy.
        catalog: the catalog, which its server has changed meanwhile.
        found: the checkpoints that were copied.

    Returns:
        The checkpoints that the catalog still names and that are not in the store, and why.
    """
    engine = open_database(f"sqlite+aiosqlite:///{copied}")
    opened = Catalog(engine)
    manifests = {manifest.path: manifest for manifest in found}
    try:
        # Their files are not copied: the client sends them again.
        await opened.forget_unfinished_uploads()
        for path, manifest in manifests.items():
            row = await opened.checkpoint(path)
            is_listed = row is not None and row.is_indexed and row.created_at == manifest.created_at
            if is_listed or (row is None and path.is_autosave):
                # Autosaves of lost runs are listed: heads replace those of all others.
                continue
            if await opened.run(path.run_id) is not None:
                await opened.index_checkpoint(manifest)
        named = catalog_backup.named_checkpoints(copied).keys()
        gone = named - manifests.keys()
        still_named = catalog_backup.named_checkpoints(catalog) if gone else {}
        for path in gone - still_named.keys():
            await opened.forget_checkpoint(path)
    finally:
        await opened.close()
    catalog_backup.seal(copied)
    return {str(path): "it is not in the checkpoint store" for path in gone & still_named.keys()}
