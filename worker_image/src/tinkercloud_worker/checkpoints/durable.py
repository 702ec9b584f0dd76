"""Durable writes: objects that survive a power failure once they are written.

S3, Google Cloud Storage and Azure have stored an object when they respond. In a local folder it is
only in the kernel's memory until fsync, for which obstore has no option.
"""

import asyncio
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

import obstore
from obstore.store import LocalStore, ObjectStore

from tinkercloud_worker.checkpoints.parts import IN_FLIGHT, part_size


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
