"""Container images without a registry: layers are tar files, and nodes load an archive.

Layers are named by their content, so that images share them on disk and on the node. Files have
fixed times and owners, so that equal content results in equal layers.
"""

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tinkercloud_testing.cluster.image_build.programs import locked

USER = 65532
"""The user id of programs: neither root nor a user of the host."""
_KEPT_SECONDS = 7 * 24 * 3600
_OCI = "application/vnd.oci.image"


@dataclass(frozen=True)
class Layer:
    """An uncompressed tar file, named by the SHA-256 of its content."""

    path: Path
    digest: str

    @property
    def descriptor(self) -> dict[str, Any]:
        """The entry for this layer in a manifest."""
        size = self.path.stat().st_size
        return {"mediaType": f"{_OCI}.layer.v1.tar", "digest": self.digest, "size": size}


@dataclass(frozen=True)
class Image:
    """Layers, lowest first, and the way to run them."""

    name: str
    layers: Sequence[Layer]
    settings: Mapping[str, Any]
    """The `config` of its configuration: user, command, environment and so on."""

    @property
    def config(self) -> bytes:
        """The configuration of the image, as JSON."""
        content = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(self.settings),
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
        }
        return json.dumps(content).encode()

    @property
    def manifest(self) -> bytes:
        """The manifest of the image, as JSON."""
        content = {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _described(f"{_OCI}.config.v1+json", self.config),
            "layers": [layer.descriptor for layer in self.layers],
        }
        return json.dumps(content).encode()


def one_program(name: str, layer: Layer, program: str) -> Image:
    """Return an image of a program that needs nothing else."""
    return Image(name, [layer], {"User": f"{USER}:{USER}", "Entrypoint": [program]})


class LayerCache:
    """Layers on disk, built once for each key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def layer(self, key: str, fill: Callable[[tarfile.TarFile], None]) -> Layer:
        """Return the layer of a key; build it if it is missing.

        Args:
            key: Everything that determines the content.
            fill: Adds the files.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        path, record = self._folder / f"{name}.tar", self._folder / f"{name}.digest"
        with locked(self._folder / f"{name}.lock"):
            if not record.exists():
                self._remove_unused()
                scratch = path.with_suffix(".partial")
                with tarfile.open(scratch, "w", format=tarfile.GNU_FORMAT) as tar:
                    fill(tar)
                digest = _digest_of(scratch)
                scratch.replace(path)
                # The record is written last and atomically: the layer is complete if it exists.
                unfinished = record.with_suffix(".unfinished")
                unfinished.write_text(digest)
                unfinished.replace(record)
            record.touch()
        return Layer(path, record.read_text())

    def _remove_unused(self) -> None:
        """Remove layers that were not used for a week: they can be gigabytes each."""
        oldest = time.time() - _KEPT_SECONDS
        for record in self._folder.glob("*.digest"):
            if record.stat().st_mtime < oldest:
                record.unlink(missing_ok=True)
                record.with_suffix(".tar").unlink(missing_ok=True)


def add_bytes(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file with this content."""
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def add_folder(tar: tarfile.TarFile, path: str, mode: int = 0o755) -> None:
    """Add an empty folder."""
    entry = tarfile.TarInfo(path.strip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def add_link(tar: tarfile.TarFile, path: str, target: str) -> None:
    """Add a symbolic link."""
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def add_tree(
    tar: tarfile.TarFile, source: Path, target: str, *, without: Iterable[str] = ()
) -> None:
    """Add a file or a folder, owned by root and readable by everyone.

    Args:
        tar: The archive.
        source: The file or folder to add.
        target: Its path in the image.
        without: Names of files and folders to leave out, at any depth.
    """
    left_out = {"__pycache__", *without}

    def normalised(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if left_out & set(Path(entry.name).parts[len(Path(target.lstrip("/")).parts) :]):
            return None
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode |= 0o755 if entry.isdir() or entry.mode & 0o100 else 0o444
        return entry

    tar.add(source, target.lstrip("/"), filter=normalised)


def write_archive(
    images: Sequence[Image], target: IO[bytes], *, without: Collection[str] = ()
) -> None:
    """Write images as one OCI archive, which containerd, Docker and kind can load.

    Args:
        images: The images to write.
        target: The output, which need not be seekable.
        without: Digests of layers that the reader already has.
    """
    layers = {layer.digest: layer for image in images for layer in image.layers}
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        add_bytes(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        add_bytes(tar, "index.json", _index(images))
        for image in images:
            for content in (image.config, image.manifest):
                add_bytes(tar, _blob(_digest(content)), content)
        for digest in layers.keys() - set(without):
            tar.add(layers[digest].path, _blob(digest))


def _index(images: Sequence[Image]) -> bytes:
    manifests = [
        {
            **_described(f"{_OCI}.manifest.v1+json", image.manifest),
            "annotations": {"io.containerd.image.name": image.name},
            "platform": {"architecture": "amd64", "os": "linux"},
        }
        for image in images
    ]
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()


def _described(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _digest_of(path: Path) -> str:
    with path.open("rb") as source:
        return f"sha256:{hashlib.file_digest(source, 'sha256').hexdigest()}"
