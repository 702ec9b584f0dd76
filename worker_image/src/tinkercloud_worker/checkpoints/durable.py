"""Durable writes: objects that survive a power failure once they are written.

S3, Google Cloud Storage and Azure have stored an object when they respond. In a local folder it is
only in the kernel's memory until fsync, for which obstore has no option.
"""

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import obstore
from obstore.store import LocalStore, ObjectStore

from tinkercloud_protocol.heads.checkpoint_manifest import StoredFile
from tinkercloud_worker.checkpoints.tensor_file import Growing
from tinkercloud_worker.checkpoints.upload_parts import IN_FLIGHT, part_size


async def put(store: ObjectStore, key: str, content: bytes | memoryview) -> None:
    """Write an object of any size, replacing the one under this key."""
    await obstore.put_async(
        store, key, content, chunk_size=part_size(len(content)), max_concurrency=IN_FLIGHT
    )
    if isinstance(store, LocalStore):
        await asyncio.to_thread(_synchronize, _root(store), key)


async def put_atomically(
    store: ObjectStore, key: str, content: bytes, mode: Literal["create", "overwrite"]
) -> None:
    """Write a small object atomically, even if this process dies.

    Raises:
        AlreadyExistsError: the key exists, and the mode is `create`.
    """
    if not isinstance(store, LocalStore):
        await obstore.put_async(store, key, content, mode=mode)
        return
    # A file that is renamed before it is on disk may be empty after a power failure, and the file
    # that it replaced would be lost too.
    staged = f"{key}.{uuid.uuid4().hex}"
    await put(store, staged, content)
    try:
        await obstore.rename_async(store, staged, key, overwrite=mode == "overwrite")
    except BaseException:
        # A rename whose caller was cancelled may have happened all the same.
        with suppress(FileNotFoundError):
            await obstore.delete_async(store, staged)
        raise
    await asyncio.to_thread(_synchronize, _root(store), key)


class _Described:
    """A growing file, with what the manifest says of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size, self._digest = 0, hashlib.sha256()

    def write(self, content: bytes | memoryview, /) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    @property
    def stored(self) -> StoredFile:
        return StoredFile(size_bytes=self._size, sha256=self._digest.hexdigest())


def write(store: ObjectStore, key: str, content: Callable[[Growing], object]) -> StoredFile:
    """Write a file part by part, with no copy in memory, replacing the one under this key. Blocks.

    It survives a power failure only after `synchronize`.

    Args:
        store: a local folder.
        key: where to write.
        content: writes the content to the file that it is given.
    """
    path = _root(_local(store)) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        content(described := _Described(file))
    return described.stored


def synchronize(store: ObjectStore, key: str) -> None:
    """Return once a file from `write` is on the disk. Blocks."""
    _synchronize(_root(_local(store)), key)


def _local(store: ObjectStore) -> LocalStore:
    assert isinstance(store, LocalStore)  # noqa: S101 - only snapshots are written so
    return store


def _root(store: LocalStore) -> Path:
    return Path(store.prefix or "/")


def _synchronize(root: Path, key: str) -> None:
    path = root / key
    _fsync(path)
    # A new folder is itself an entry of its parent.
    while path != root:
        path = path.parent
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
