"""Checks a backup without a server, and without a state folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tinkercloud_api.admin.backup import archive, contents
from tinkercloud_api.admin.backup.archive import Header, Manifest, Progress


def verify(stream: IO[bytes], name: str, workspace: Path, progress: Progress) -> Manifest:
    """Read a whole backup, and check that it can be restored.

    Args:
        stream: the backup.
        name: its name in messages.
        workspace: an empty folder with room for its catalog.
        progress: is called with the bytes of its files.

    Raises:
        BackupError: it is damaged, incomplete or of a newer release.
        OSError: the workspace can't be written.
    """
    sink = _Checks(name, workspace / archive.CATALOG)
    manifest = archive.read(stream, name, sink, progress)
    contents.check(manifest, sink.catalog, sink.manifests, name)
    return manifest


class _Checks:
    """Implements `archive.Sink`: keeps what `contents` checks."""

    def __init__(self, name: str, catalog: Path) -> None:
        self._name = name
        self.catalog = catalog
        self.manifests: dict[str, bytes] = {}

    def begin(self, header: Header) -> None:
        """See `Sink.begin`."""
        contents.check_header(header, self._name)

    def write(self, name: str, size: int, mode: int, content: Iterator[bytes]) -> None:
        """See `Sink.write`."""
        del mode
        if name == archive.CATALOG:
            with self.catalog.open("wb") as file:
                file.writelines(content)
        elif name == archive.VERSION:
            contents.check_version(b"".join(content), self._name)
        elif contents.is_small_manifest(name, size):
            self.manifests[name] = b"".join(content)
        else:
            for _ in content:
                pass
