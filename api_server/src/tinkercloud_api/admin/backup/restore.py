"""Restores a backup: everything is written and checked next to the old state, then replaces it.

`config.pending_restore` makes that one decision, which the next command or server completes if this
process is killed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tinkercloud_api.admin.backup import archive, contents
from tinkercloud_api.admin.backup.archive import Header, Manifest, Progress
from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_api.config import pending_restore, state_folder
from tinkercloud_api.config.pending_restore import Restore
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.heads import journal_copy

_NO_STATE = {state_folder.PID_FILE, state_folder.VERSION_FILE, pending_restore.STAGING}
_OF_THE_DISK = {"lost+found"}
_OF_THE_LOG = ("catalog.db-wal", "catalog.db-shm", "catalog.db-journal")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a backup is restored."""

    state_dir: Path
    store_url: str
    """URL of the checkpoint store."""
    replaces: bool
    """Whether what is there may be replaced."""

    @property
    def store(self) -> Path:
        """The folder of the checkpoint store.

        Raises:
            BackupError: it is not a folder on this machine.
        """
        parsed = urlsplit(self.store_url)
        if parsed.scheme != "file":
            raise BackupError(
                f"the backup has checkpoints, and the checkpoint store is {self.store_url}; restore"
                " with TINKERCLOUD_CHECKPOINT_ROOT set to a folder, and copy its content there"
            )
        return Path(url2pathname(parsed.path))


def target(settings: Settings, *, replaces: bool) -> Target:
    """Return where a server with these settings expects its state.

    Args:
        settings: the settings.
        replaces: whether what is there may be replaced.

    Raises:
        BackupError: its catalog is not in its state folder.
    """
    if settings.database_url is not None:
        raise BackupError(
            "database_url: a backup is restored to the state folder; unset"
            " TINKERCLOUD_DATABASE_URL. A catalog in PostgreSQL is restored with pg_restore"
        )
    return Target(settings.state_dir.absolute(), settings.checkpoint_url, replaces)


def restore(stream: IO[bytes], name: str, where: Target, progress: Progress) -> Manifest:
    """Restore a backup.

    Args:
        stream: the backup.
        name: its name in messages.
        where: where it is restored.
        progress: is called with the bytes of its files.

    Raises:
        BackupError: the backup can't be used, or the target has something that it may not replace;
            nothing has changed.
        StateFolderError: a server or another restore uses the state folder.
    """
    folder = where.state_dir
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with state_folder.StateFolderLock(folder, state_folder.RESTORE):
        with _write_errors(folder):
            pending_restore.finish(folder)
        _check_heads(folder)
        staged = _Staged(name, where)
        try:
            with _write_errors(folder):
                manifest = archive.read(stream, name, staged, progress)
                contents.check(manifest, staged.catalog, staged.manifests, name)
                staged.complete()
                pending_restore.commit(folder, staged.restore)
        except BaseException:
            pending_restore.finish(folder)
            raise
        try:
            pending_restore.finish(folder)
        except OSError as error:
            raise BackupError(
                f"{name} is checked and written, but its files can't be moved into place ({error});"
                " repair the disk: the next command or server that uses the folder continues"
            ) from None
    return manifest


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = error.filename or f"the files of {folder}"
        raise BackupError(f"cannot write {what} ({error.strerror}); nothing was changed") from None


def _check_heads(folder: Path) -> None:
    """Check that no session head of a killed server is left."""
    for path in sorted(folder.glob("heads/*/head.lock")):
        with path.open("a+") as file:
            if not state_folder.lock(file):
                raise BackupError(
                    f"the session head in {path.parent} is still running; it ends by itself"
                    " orphan_grace_seconds after its server. Stop it or wait"
                )


def _entries(folder: Path) -> set[str]:
    """Return the names in a folder that are of a state; nothing if there is no folder."""
    ignored = _NO_STATE | _OF_THE_DISK
    if not folder.exists():
        return set()
    return {
        each.name for each in folder.iterdir() if each.name not in ignored and not _is_empty(each)
    }


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not _entries(path)


class _Staged:
    """Implements `archive.Sink`: writes the files of a backup next to those that they replace."""

    def __init__(self, name: str, where: Target) -> None:
        self._name, self._where = name, where
        self._header: Header | None = None
        self._has_version = False
        self.restore = Restore(targets=[], obsolete=[])
        """What replaces what."""
        self.manifests: dict[str, bytes] = {}
        """The manifests of its checkpoints, by name."""

    @property
    def catalog(self) -> Path:
        """The catalog that was written."""
        return pending_restore.new_files(self._where.state_dir) / archive.CATALOG

    def begin(self, header: Header) -> None:
        """See `Sink.begin`."""
        contents.check_header(header, self._name)
        where, self._header = self._where, header
        targets = [where.state_dir]
        if header.has_checkpoints:
            where.store.mkdir(parents=True, exist_ok=True)
            targets.append(where.store)
        for each in targets:
            found = sorted(_entries(each))
            if found and not where.replaces:
                raise BackupError(
                    f"{each} is not empty: it has {', '.join(found[:3])}; choose another folder"
                    " with --state-dir, or replace what is there with --replace"
                )
        self.restore = Restore(targets=targets, obsolete=[])
        pending_restore.begin(where.state_dir, self.restore)

    def write(self, name: str, size: int, mode: int, content: Iterator[bytes]) -> None:
        """See `Sink.write`."""
        if name == archive.VERSION:
            read = b"".join(content)
            contents.check_version(read, self._name)
            self._has_version, content = True, iter([read])
        elif contents.is_small_manifest(name, size):
            content = iter([self.manifests.setdefault(name, b"".join(content))])
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(content)
            os.fchmod(descriptor, mode & 0o777)
            file.flush()
            os.fsync(descriptor)

    def _path(self, name: str) -> Path:
        folder, _, rest = name.partition("/")
        if folder != archive.CHECKPOINTS:
            return pending_restore.new_files(self._where.state_dir) / name
        if self._header is None or not self._header.has_checkpoints:
            raise BackupError(f"{self._name} is damaged: its header does not mention checkpoints")
        return pending_restore.new_files(self._where.store) / rest

    def complete(self) -> None:
        """Have everything on the disk, and know what is replaced."""
        state_dir = self._where.state_dir
        if not self._has_version:
            state_folder.write_version(pending_restore.new_files(state_dir))
        obsolete = [state_dir / name for name in _OF_THE_LOG]
        for each in self.restore.targets:
            new = pending_restore.new_files(each)
            for path, _, _ in os.walk(new):
                pending_restore.synchronize(Path(path))
            kept = {entry.name for entry in new.iterdir()}
            obsolete += [each / name for name in self._replaced(each) if name not in kept]
        self.restore = self.restore.model_copy(update={"obsolete": obsolete})

    def _replaced(self, folder: Path) -> set[str]:
        """Return the names in a folder that the backup replaces, whether or not it has them."""
        assert self._header is not None  # noqa: S101 - `begin` was called
        if folder == self._where.state_dir:
            replaced = {archive.SETTINGS}
            return replaced | {archive.HEADS} if self._header.has_journals else replaced
        copies = set() if self._header.has_journals else {journal_copy.FOLDER}
        return _entries(folder) - copies
