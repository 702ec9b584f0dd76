"""Opens files that belong together, while a server and its heads replace and delete them.

Only opening them has to be quick: files are replaced by renaming others, or deleted, and what is
open stays as it was. Two kinds of files are different. Segments of a journal grow: the bytes that
one has when it is opened are those that a killed head could have left. And files are deleted one
after another: so the manifest that names them is read again, and if it has changed, or a file is
missing, all of them are opened again.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_protocol.heads import journal_copy, journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    SuspendedManifest,
    decode_manifest,
    suspended_key,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointPath

_ATTEMPTS = 100
_PAUSE_SECONDS = 0.05
"""Attempts to open files that change meanwhile, and the pause after each. Heads change the files of
a run every few seconds at most."""

T = TypeVar("T")
DescribedT = TypeVar("DescribedT", CheckpointManifest, SuspendedManifest)


class _Changed(Exception):
    """Files were replaced or deleted while they were opened."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file to copy."""

    path: Path
    file: IO[bytes]
    size: int
    """Its first bytes, in number, that are copied."""
    mode: int
    expected: StoredFile | None = None
    """What a manifest says of it."""


@dataclass(slots=True)
class Unit:
    """Open files that belong together."""

    name: str
    """The checkpoint or run, in messages."""
    files: list[OpenFile] = field(default_factory=list)
    damage: str | None = None
    """How it was damaged already."""
    checkpoint: CheckpointManifest | None = None
    """The manifest, if it is an undamaged checkpoint."""

    def add(self, stack: ExitStack, path: Path, expected: StoredFile | None = None) -> IO[bytes]:
        """Open another file of the unit.

        Raises:
            FileNotFoundError: it does not exist.
        """
        file = stack.enter_context(path.open("rb"))
        status = os.fstat(file.fileno())
        mode = status.st_mode & 0o777
        self.files.append(OpenFile(path, file, status.st_size, mode, expected))
        return file


@contextmanager
def opened(find: Callable[[ExitStack], Unit | None]) -> Iterator[Unit | None]:
    """Open a unit, however often its files change meanwhile; close them afterwards.

    Args:
        find: opens the files, or raises FileNotFoundError or `_Changed`; returns None if the unit
            does not exist.

    Raises:
        BackupError: they change each time.
    """
    with ExitStack() as stack:
        yield _retried(find, stack)


def _retried(find: Callable[[ExitStack], T], stack: ExitStack) -> T:
    for _ in range(_ATTEMPTS):
        with ExitStack() as attempt:
            try:
                found = find(attempt)
            except (FileNotFoundError, _Changed):
                time.sleep(_PAUSE_SECONDS)
                continue
            stack.push(attempt.pop_all())
            return found
    raise BackupError("files of the server change too often to be copied; run the command again")


def single(path: Path, stack: ExitStack) -> Unit | None:
    """Open one file that belongs to no other."""
    unit = Unit(path.name)
    try:
        unit.add(stack, path)
    except FileNotFoundError:
        return None
    return unit


def checkpoint(store: Path, path: CheckpointPath, stack: ExitStack) -> Unit | None:
    """Open a checkpoint in a store's folder."""
    unit = Unit(str(path))
    manifest = _described(unit, stack, store, path.manifest_key, CheckpointManifest)
    unit.checkpoint = manifest if unit.damage is None else None
    return unit if unit.files else None


def suspended(store: Path, run_id: str, stack: ExitStack) -> Unit | None:
    """Open the suspended state of a run."""
    unit = Unit(f"the suspended state of training run {run_id}")
    _described(unit, stack, store, suspended_key(run_id), SuspendedManifest)
    return unit if unit.files else None


def _described(
    unit: Unit, stack: ExitStack, store: Path, key: str, model: type[DescribedT]
) -> DescribedT | None:
    """Open a manifest and the files that it names; None if there is none, or it is damaged."""
    try:
        content = unit.add(stack, store / key).read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    unit.files[0].file.seek(0)
    try:
        manifest = decode_manifest(model, content, unit.name)
    except InvalidRequest as error:
        unit.damage = error.message
        return None
    for name, stored in manifest.files.items():
        try:
            unit.add(stack, store / manifest.key_of(name), stored)
        except FileNotFoundError:
            if _content(store / key) == content:
                unit.damage = f"its file {name} is missing"
    if _content(store / key) != content:
        raise _Changed
    return manifest


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def journal(root: Path, run_id: str, stack: ExitStack) -> Unit | None:
    """Open the journal of a run and its snapshot, in the folder of a head's journals.

    A head writes a snapshot before it deletes the segments that the snapshot replaces, the oldest
    first. So with the same snapshot before and after, all segments that follow it were there.
    """
    manifest, folder = _journal_files(root, run_id)
    snapshot = root / suspended_key(run_id)
    before = _content(manifest), _content(snapshot)
    if before[0] is None:
        return None
    unit = Unit(f"the journal of training run {run_id}")
    segments = sorted(folder.glob("*.log"))
    for segment in segments:
        unit.add(stack, segment)
    later = set(folder.glob("*.log")).difference(segments)
    if segments and later and min(later) < segments[-1]:
        # The list of a folder may lack files that are created meanwhile.
        raise _Changed
    for path in (manifest, folder / "deaths.json"):
        if path.exists():
            unit.add(stack, path)
    if before[1] is not None:
        state = Unit(f"the snapshot of training run {run_id}")
        _described(state, stack, root, suspended_key(run_id), SuspendedManifest)
        unit.files += state.files
        unit.damage = state.damage
    if before != (_content(manifest), _content(snapshot)):
        raise _Changed
    return unit


def _journal_files(root: Path, run_id: str) -> tuple[Path, Path]:
    return journal_files.manifest_path(root, run_id), journal_files.segments_folder(root, run_id)


def shared_journal(root: Path, run_id: str, stack: ExitStack) -> Unit | None:
    """Open the copy of a run's journal in a store, and its snapshot.

    Objects never change, are created in order, and are deleted, the oldest first, once a newer one
    names a snapshot that replaces them.
    """
    folder = root / journal_copy.objects_folder(run_id)
    numbers = journal_copy.numbers(path.name for path in entries(folder))
    if not numbers:
        return None
    unit = Unit(f"the copied journal of training run {run_id}")
    headers: dict[int, journal_copy.Header] = {}
    for number in numbers:
        path = root / journal_copy.object_key(run_id, number)
        start = unit.add(stack, path).read(journal_copy.HEADER_LIMIT)
        unit.files[-1].file.seek(0)
        try:
            headers[number], _ = journal_copy.decode(start, journal_copy.name_of(run_id, number))
        except InvalidRequest as error:
            unit.damage = error.message
    try:
        _add_base(unit, stack, root, headers)
    except FileNotFoundError as error:
        if journal_copy.numbers(path.name for path in entries(folder)) != numbers:
            raise
        unit.damage = f"its snapshot lacks the file {Path(error.filename).name}"
    return unit


def _add_base(
    unit: Unit, stack: ExitStack, root: Path, headers: Mapping[int, journal_copy.Header]
) -> None:
    """Open the files of the snapshot that the newest objects follow.

    Raises:
        _Changed: an object after it was created while they were listed, or a file was deleted.
    """
    based = [number for number, header in headers.items() if header.base is not None]
    if not based or unit.damage is not None:
        return
    if any(number not in headers for number in range(max(based), max(headers))):
        raise _Changed
    base = headers[max(based)].base
    if base is not None and base.snapshot is not None:
        for name, stored in base.snapshot.files.items():
            unit.add(stack, root / base.snapshot.key_of(name), stored)


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, in order; nothing if there is none."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
