"""Object store client: reads small objects, lists folders, deletes both, uploads and copies files.

All failures of the store (unreachable, credentials rejected, too slow) are raised as `Unavailable`:
the client may repeat its request, and a long poll continues. A missing object is not an error.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import structlog
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from tinkercloud_protocol.heads.object_store import has_endpoint
from tinkercloud_protocol.wire.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from obstore import GetOptions

log = structlog.get_logger(__name__)

_PROBE = "health-probe"
_MAX_COPIED_BYTES = 5 << 30
"""Maximum size of an object that S3 copies in one request."""
_PART_BYTES = 64 << 20
"""Part of a larger object that is copied; S3 accepts 10,000 of them."""
_IN_FLIGHT = 4
"""Parts of one object that are in memory, while they are sent to the store."""
_SIGNING = S3Store | GCSStore | AzureStore
_MISSING = (FileNotFoundError, NotFoundError)


@dataclass(frozen=True, slots=True)
class Described:
    """Metadata of an object."""

    size: int
    etag: str | None
    """Changes with the content; None if the store has none."""


class ObjectStoreClient:
    """Accesses objects by key. Every method raises `Unavailable` if the store fails."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def has_public_urls(self) -> bool:
        """Whether the store can sign URLs and is at its provider's public address."""
        return isinstance(self._store, _SIGNING) and not has_endpoint(os.environ)

    async def sign(self, keys: Sequence[str], lifetime: timedelta) -> Sequence[str]:
        """Return a URL for each object, by which it can be read without credentials.

        Raises:
            Unavailable: this store, or its credentials, can't sign URLs.
        """
        if not isinstance(self._store, _SIGNING):
            raise Unavailable(
                "downloads.source: is 'store', but this checkpoint store can't sign URLs; set it to"
                " 'auto' or 'server'"
            )
        with _translate_errors():
            return await obstore.sign_async(self._store, "GET", list(keys), lifetime)

    async def describe(self, key: str) -> Described | None:
        """Return the metadata of an object, or None if it does not exist."""
        with _translate_errors(), suppress(*_MISSING):
            found = await obstore.head_async(self._store, key)
            return Described(found["size"], found["e_tag"])
        return None

    async def read_range(self, key: str, part: range, etag: str | None) -> bytes:
        """Return some bytes of an object that exists; also Unavailable if its tag has changed."""
        options: GetOptions = {"range": (part.start, part.stop)}
        if etag is not None:
            options["if_match"] = etag
        with _translate_errors():
            result = await obstore.get_async(self._store, key, options=options)
            return bytes(await result.bytes_async())

    async def ping(self) -> None:
        """Check that the store responds."""
        with _translate_errors(), suppress(*_MISSING):
            await obstore.head_async(self._store, _PROBE)

    async def probe(self) -> None:
        """Check that the store accepts writes; a full or read-only store still serves reads."""
        with _translate_errors():
            await obstore.put_async(self._store, _PROBE, b"written by health checks\n")

    async def upload(self, key: str, file: Path) -> None:
        """Upload a local file as an object."""
        with _translate_errors():
            await obstore.put_async(self._store, key, file)

    async def upload_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Upload an object in parts, as they arrive. Without all of them, it does not exist.

        Errors that `chunks` raises are raised unchanged, unless they are errors of the system.
        """
        with _translate_errors():
            await obstore.put_async(self._store, key, chunks, max_concurrency=_IN_FLIGHT)
            await self._synchronize(key)

    async def copy(self, key: str, target: str, size_bytes: int) -> None:
        """Copy an object within the store.

        Raises:
            NotFound: the object does not exist.
        """
        with _translate_errors():
            try:
                if size_bytes <= _MAX_COPIED_BYTES:
                    await obstore.copy_async(self._store, key, target)
                else:
                    result = await obstore.get_async(self._store, key)
                    await obstore.put_async(
                        self._store,
                        target,
                        result.stream(_PART_BYTES),
                        chunk_size=_PART_BYTES,
                        max_concurrency=_IN_FLIGHT,
                    )
            except _MISSING:
                raise NotFound(f"the object {key} is missing in the checkpoint store") from None
            await self._synchronize(target)

    async def create(self, key: str, content: bytes) -> bool:
        """Write a small object atomically, unless it exists; return whether it was written."""
        with _translate_errors():
            try:
                if not isinstance(self._store, LocalStore):
                    await obstore.put_async(self._store, key, content, mode="create")
                    return True
                # A file that is renamed before it is on disk may be empty after a power failure.
                staged = f"{key}.{uuid.uuid4().hex}"
                await obstore.put_async(self._store, staged, content)
                await self._synchronize(staged)
                try:
                    await obstore.rename_async(self._store, staged, key, overwrite=False)
                except BaseException:
                    await obstore.delete_async(self._store, staged)
                    raise
                await self._synchronize(key)
            except AlreadyExistsError:
                return False
        return True

    async def replace(self, key: str, content: bytes) -> None:
        """Write a small object atomically, whether or not it exists."""
        with _translate_errors():
            await obstore.put_async(self._store, key, content)
            await self._synchronize(key)

    async def _synchronize(self, key: str) -> None:
        """Write a file of a local folder, and the folders that lead to it, to the disk."""
        if isinstance(self._store, LocalStore):
            await asyncio.to_thread(_fsync_path, Path(self._store.prefix or "/"), key)

    async def read(self, key: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""
        with _translate_errors(), suppress(*_MISSING):
            result = await obstore.get_async(self._store, key)
            return bytes(await result.bytes_async())
        return None

    async def read_start(self, key: str, num_bytes: int) -> bytes | None:
        """Return the first bytes of an object, or None if it does not exist."""
        with _translate_errors(), suppress(*_MISSING):
            options: GetOptions = {"range": (0, num_bytes)}
            result = await obstore.get_async(self._store, key, options=options)
            return bytes(await result.bytes_async())
        return None

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects of a folder. The prefix must end with a slash."""
        with _translate_errors():
            return [e["path"] for e in await obstore.list(self._store, prefix).collect_async()]

    async def folders(self, prefix: str) -> list[str]:
        """Return the names of the subfolders of a folder. The prefix must end with a slash."""
        with _translate_errors():
            listed = await obstore.list_with_delimiter_async(self._store, prefix)
            return [found.rstrip("/").rpartition("/")[2] for found in listed["common_prefixes"]]

    async def has_any(self, prefix: str) -> bool:
        """Return whether a folder contains any object. The prefix must end with a slash."""
        with _translate_errors():
            async for batch in obstore.list(self._store, prefix, chunk_size=1):
                return bool(batch)
        return False

    async def delete(self, key: str) -> None:
        """Delete an object. A missing object is not an error."""
        with _translate_errors(), suppress(*_MISSING):
            await obstore.delete_async(self._store, key)

    async def delete_others(self, prefix: str, kept: Collection[str]) -> None:
        """Delete the objects of a folder, except some. The prefix must not end with a slash."""
        with _translate_errors():
            entries = await obstore.list(self._store, f"{prefix}/").collect_async()
            stray = [entry["path"] for entry in entries if entry["path"] not in kept]
            if stray:
                with suppress(*_MISSING):
                    await obstore.delete_async(self._store, stray)

    async def delete_folder(self, prefix: str) -> None:
        """Delete all objects of a folder. The prefix must not end with a slash."""
        with _translate_errors():
            # With concurrent deletes, a local file store stops at the first missing file; the next
            # iteration deletes the rest.
            while entries := await obstore.list(self._store, f"{prefix}/").collect_async():
                with suppress(*_MISSING):
                    await obstore.delete_async(self._store, [entry["path"] for entry in entries])


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        log.warning("object store request failed", error=str(error))
        raise Unavailable(
            "the object store for checkpoints failed or did not respond; send the request again"
        ) from error


def _fsync_path(root: Path, key: str) -> None:
    path = root / key
    for each in (path, *path.parents):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if each == root:
            return
