"""The files of a run's journal. All methods block, except where they say so."""

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinkercloud_protocol.heads import journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import decode_manifest, encode_manifest
from tinkercloud_protocol.heads.journal_files import Deaths, JournalManifest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import suspended_prefix
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.records import Record

_SUFFIX = ".log"
_DEATHS = "deaths.json"


class Segment:
    """A file of records that grows."""

    def __init__(self, path: Path) -> None:
        """Create an empty segment."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0

    def write(self, content: bytes) -> None:
        """Append whole records. After a failure the segment is as before, if the disk allows it."""
        left, offset = memoryview(content), self._size
        try:
            while left:
                done = os.pwrite(self._descriptor, left, offset)
                left, offset = left[done:], offset + done
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size = offset

    def synchronize(self) -> None:
        """Return once all that was written is on the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JournalFolder:
    """A run's folder in the journal folder of a head."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.run_id = run_id
        self._folder = journal_files.segments_folder(root, run_id)

    def manifest(self) -> JournalManifest | None:
        """Return the manifest; see `journal_files.read_manifest`."""
        return journal_files.read_manifest(self.root, self.run_id)

    def exists(self) -> bool:
        """Whether there is a manifest, which may be damaged."""
        return journal_files.manifest_path(self.root, self.run_id).exists()

    def write_manifest(self, manifest: JournalManifest) -> None:
        """Write the manifest, which makes the journal exist, atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        staged = self._folder / f"manifest.{uuid.uuid4().hex}"
        with staged.open("wb") as file:
            file.write(encode_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        staged.replace(journal_files.manifest_path(self.root, self.run_id))
        _synchronize(self._folder)

    def withdraw(self) -> None:
        """Make the journal not exist, so that no head continues from it."""
        journal_files.manifest_path(self.root, self.run_id).unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete everything of the run. Idempotent."""
        self.withdraw()
        shutil.rmtree(journal_files.run_folder(self.root, self.run_id), ignore_errors=True)

    def clear_before(self, number: int) -> None:
        """Delete everything of a journal that no head may continue, except later segments.

        Args:
            number: the first segment that is kept.
        """
        self.withdraw()
        self.remove_before(number)
        shutil.rmtree(self.root / suspended_prefix(self.run_id), ignore_errors=True)

    def deaths(self) -> dict[int, int]:
        """Return how many heads ended while they repeated a request, by the request's number.

        A damaged file says nothing, nor does one of a newer release: then all start from 0.
        """
        try:
            content = (self._folder / _DEATHS).read_bytes()
            return decode_manifest(Deaths, content, _DEATHS).deaths
        except (FileNotFoundError, InvalidRequest):
            return {}

    def write_deaths(self, deaths: Mapping[int, int]) -> None:
        """Replace what `deaths` returns, atomically.

        It survives the end of the process. If the machine ends too, it is older.
        """
        path = self._folder / _DEATHS
        if not deaths:
            path.unlink(missing_ok=True)
            return
        staged = path.with_suffix(f".{uuid.uuid4().hex}")
        staged.write_bytes(encode_manifest(Deaths(deaths=dict(deaths))))
        staged.replace(path)

    def create(self, number: int) -> Segment:
        """Create the segment of a number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        segment = Segment(self._path(number))
        try:
            _synchronize(self._folder)
        except OSError:
            # A failing disk is tried again and again.
            segment.close()
            raise
        return segment

    def restore(self, manifest: JournalManifest, found: Sequence[Record]) -> None:
        """Write a whole journal, of which nothing is here."""
        segment = self.create(1)
        try:
            segment.write(b"".join(map(records.encode, found)))
            segment.synchronize()
        finally:
            segment.close()
        self.write_manifest(manifest)

    def numbers(self) -> list[int]:
        """Return the numbers of the segments, in order."""
        return sorted(int(path.stem) for path in self._folder.glob(f"*{_SUFFIX}"))

    def read(self) -> list[Record]:
        """Return all records, in order.

        Raises:
            DamagedJournal: a record is damaged or missing.
        """
        segments = []
        for number in self.numbers():
            name = f"segment {number} of the journal of training run {self.run_id}"
            found, _ = records.decode(self._path(number).read_bytes(), name)
            segments.append((name, found))
        return records.join(segments)

    def synchronize(self) -> None:
        """Return once all segments are on the disk."""
        for number in self.numbers():
            _synchronize(self._path(number))

    def remove_before(self, number: int) -> None:
        """Delete the segments before this one, the oldest first."""
        for each in self.numbers():
            if each < number:
                self._path(each).unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{_SUFFIX}"


def _synchronize(path: Path) -> None:
    """Return once a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
