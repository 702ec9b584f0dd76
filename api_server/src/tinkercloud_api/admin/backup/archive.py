"""The file of a backup: a tar that is written and read in one pass, so that it can be piped.

Its members are

    backup.json      a `Header`, first, so that a reader refuses what it can't use at once
    version.json     of the state folder
    settings.toml    of the last server (`config.server_settings`), if there was one
    heads/...        journals and unsaved states of session heads, as in the state folder
    checkpoints/...  objects of the checkpoint store, by key
    catalog.db       the catalog, in one file
    manifest.json    a `Manifest`, last: a file without it is incomplete

Both JSON files have a checksum of themselves (`encode_manifest`).
"""

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, ClassVar, Protocol, cast

from pydantic import AwareDatetime, BaseModel, ConfigDict

from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_protocol.heads.checkpoint_manifest import (
    ManifestT,
    StoredFile,
    decode_manifest,
    encode_manifest,
)
from tinkercloud_protocol.heads.releases import Versions
from tinkercloud_protocol.wire.errors import InvalidRequest

HEADER, MANIFEST = "backup.json", "manifest.json"
CATALOG = "catalog.db"
VERSION, SETTINGS = "version.json", "settings.toml"
HEADS, CHECKPOINTS = "heads", "checkpoints"
_FILES = {CATALOG, VERSION, SETTINGS}
_BLOCK_BYTES = 1 << 20
_MAX_JSON_BYTES = 1 << 30

Progress = Callable[[int], object]
"""Is called with each number of bytes that was copied."""


class Header(BaseModel):
    """Content of `backup.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    versions: ClassVar[Versions] = Versions(1, 1)
    format_version: int = versions.newest
    release: str = ""
    """Release of the command that made the backup."""
    created_at: AwareDatetime
    """When the catalog was copied."""
    catalog_revisions: list[str]
    has_checkpoints: bool
    """Whether it has the objects of the checkpoint store."""
    has_journals: bool
    """Whether it has the journals of session heads."""


class Manifest(Header):
    """Content of `manifest.json`."""

    files: dict[str, StoredFile]
    """All members but the two JSON files, by name."""
    left_out: list[str]
    """Settings that are not in `settings.toml`."""
    damaged: dict[str, str]
    """What was damaged or missing already when the backup was made, by name, and how."""

    @property
    def size_bytes(self) -> int:
        """Total size of its files."""
        return sum(file.size_bytes for file in self.files.values())

    def count(self, pattern: str) -> int:
        """Return the number of files whose names match a pattern of `PurePath.match`."""
        return sum(PurePosixPath(name).match(pattern) for name in self.files)


class Sink(Protocol):
    """Where the files of a backup are written when it is read."""

    def begin(self, header: Header, /) -> None:
        """Check that the backup can be used.

        Raises:
            BackupError: it can't.
        """

    def write(self, name: str, size: int, mode: int, content: Iterator[bytes], /) -> None:
        """Write the content of a file, which must be consumed.

        Args:
            name: its name.
            size: number of bytes.
            mode: its permissions.
            content: the content.

        Raises:
            BackupError: it can't be used.
            OSError: it can't be written.
        """


class _Hashed:
    """Reads a part of a file, and describes what was read."""

    def __init__(self, file: IO[bytes], name: str, size: int, progress: Progress) -> None:
        self._file, self._name, self._left, self._progress = file, name, size, progress
        self._digest, self._size = hashlib.sha256(), size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, like a file."""
        wanted = self._left if size < 0 else min(size, self._left)
        try:
            content = self._file.read(wanted)
        except OSError as error:
            raise BackupError(f"cannot read {self._name} ({error.strerror})") from None
        if len(content) < wanted:
            raise BackupError(
                f"{self._name} became shorter while it was copied; run the command again"
            )
        self._left -= len(content)
        self._digest.update(content)
        self._progress(len(content))
        return content

    @property
    def stored(self) -> StoredFile:
        """The bytes that were read."""
        return StoredFile(size_bytes=self._size, sha256=self._digest.hexdigest())


class _Unbuffered:
    """Passes bytes on to a file or a pipe, and counts them.

    A stream of tarfile (`w|`) would write its buffer when it is deleted, to a file that is closed.
    """

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._written = 0

    def write(self, content: bytes) -> int:
        self._written += len(content)
        return self._output.write(content)

    def tell(self) -> int:
        return self._written


class Writer:
    """Writes a backup. All methods raise `OSError` if the output can't be written."""

    def __init__(self, output: IO[bytes], header: Header, progress: Progress) -> None:
        """Write the header."""
        self._header = header
        self._progress = progress
        self._tar = tarfile.open(  # noqa: SIM115 - `finish` closes it
            fileobj=cast("IO[bytes]", _Unbuffered(output)), mode="w", format=tarfile.PAX_FORMAT
        )
        self._files: dict[str, StoredFile] = {}
        self._write_json(HEADER, header)

    def add(self, name: str, file: IO[bytes], size: int, mode: int) -> StoredFile:
        """Add the next bytes of a file; return what was read.

        Args:
            name: name of the member.
            file: what to read.
            size: number of bytes.
            mode: permissions of the restored file.

        Raises:
            BackupError: the file can't be read, or is shorter.
        """
        content = _Hashed(file, name, size, self._progress)
        self._add(name, cast("IO[bytes]", content), size, mode)
        self._files[name] = content.stored
        return content.stored

    def finish(self, left_out: list[str], damaged: dict[str, str]) -> Manifest:
        """Write the manifest, which makes the backup complete."""
        described = {name: getattr(self._header, name) for name in Header.model_fields}
        manifest = Manifest(**described, files=self._files, left_out=left_out, damaged=damaged)
        self._write_json(MANIFEST, manifest)
        self._tar.close()
        return manifest

    def _write_json(self, name: str, content: Header) -> None:
        encoded = encode_manifest(content)
        self._add(name, io.BytesIO(encoded), len(encoded), 0o600)

    def _add(self, name: str, file: IO[bytes], size: int, mode: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, mode
        member.mtime = int(self._header.created_at.timestamp())
        self._tar.addfile(member, file)


def read(stream: IO[bytes], name: str, sink: Sink, progress: Progress) -> Manifest:
    """Read a whole backup, and check it against its manifest.

    Args:
        stream: the backup.
        name: its name in error messages.
        sink: receives its files before the manifest is known, so what it has written is of use only
            once this returns.
        progress: is called with the bytes of the files.

    Raises:
        BackupError: the backup is incomplete, damaged or of a newer release.
    """
    damaged = BackupError(f"{name} is damaged or incomplete, or no backup")
    found: dict[str, StoredFile] = {}
    manifest: Manifest | None = None
    with _tar_errors(damaged), tarfile.open(fileobj=stream, mode="r|") as tar:
        for index, member in enumerate(tar):
            content = tar.extractfile(member) if member.isfile() else None
            if content is None or manifest is not None or member.name in found:
                raise damaged
            if index == 0:
                sink.begin(_read_json(Header, HEADER, member, content, name))
            elif member.name == MANIFEST:
                manifest = _read_json(Manifest, MANIFEST, member, content, name)
            elif _is_file_of_state(member.name):
                hashed = _Hashed(content, member.name, member.size, progress)
                sink.write(member.name, member.size, member.mode, _blocks(hashed))
                found[member.name] = hashed.stored
            else:
                raise damaged
    if manifest is None:
        raise BackupError(f"{name} is damaged or incomplete: it has no {MANIFEST} at its end")
    names = found.keys() | manifest.files.keys()
    for each in sorted(each for each in names if found.get(each) != manifest.files.get(each)):
        raise BackupError(f"{name} is damaged: its file {each} differs from its {MANIFEST}")
    return manifest


def _blocks(content: _Hashed) -> Iterator[bytes]:
    while block := content.read(_BLOCK_BYTES):
        yield block


def _read_json(
    model: type[ManifestT], wanted: str, member: tarfile.TarInfo, content: IO[bytes], name: str
) -> ManifestT:
    if member.name != wanted or member.size > _MAX_JSON_BYTES:
        raise BackupError(f"{name} is no backup: its first file is not {wanted}")
    try:
        return decode_manifest(model, content.read(), f"the {wanted} of {name}")
    except InvalidRequest as error:
        raise BackupError(error.message) from None


def _is_file_of_state(name: str) -> bool:
    """Return whether a name is that of a file of a state folder, and of none outside of it."""
    path = PurePosixPath(name)
    if ".." in path.parts or str(path) != name:
        return False
    return name in _FILES or (len(path.parts) > 1 and path.parts[0] in {HEADS, CHECKPOINTS})


@contextmanager
def _tar_errors(damaged: BackupError) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError):
        raise damaged from None
