"""Reads checkpoints, and writes them atomically: each is complete or absent if the writer dies.

`protocol.checkpoints` explains the order of writes; each write survives a power failure before the
next one starts (`durable`). The store is a local folder, S3, Google Cloud Storage or Azure,
selected by URL (obstore).
"""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import obstore
import structlog
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore

from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    SuspendedManifest,
    decode_manifest,
    encode_manifest,
    suspended_key,
)
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, WireError
from tinkercloud_protocol.wire.paths import (
    CheckpointKind,
    CheckpointPath,
    is_reserved,
    run_prefix,
    suspended_prefix,
)
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints.suspended import EvictedSampler
from tinkercloud_worker.checkpoints.tensor_file import Growing
from tinkercloud_worker.checkpoints.upload_parts import IN_FLIGHT, parts

log = structlog.get_logger(__name__)


class StoreFailed(WireError):
    """An operation of the checkpoint store failed; nothing of it counts as written."""

    status = 503
    category = "server"


@contextmanager
def store_errors() -> Iterator[None]:
    """Convert errors of the store for clients, except that an object is missing or exists."""
    try:
        yield
    except (NotFoundError, FileNotFoundError, AlreadyExistsError):
        raise
    except (BaseError, OSError) as error:
        # What is raised refers to it.
        log.warning("object store request failed", error=str(error))
        raise StoreFailed(_words(error)) from error


def _words(error: Exception) -> str:
    details = str(error)
    if "No space left" in details or "Disk quota exceeded" in details:
        return (
            "the checkpoint store is full (no space left on device): delete checkpoints, or"
            " ask an administrator to add space, then send the request again"
        )
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if denied or "Permission denied" in details or "Read-only file system" in details:
        return (
            "the checkpoint store denies access: ask an administrator to check its"
            " credentials or the permissions of its folder, then send the request again"
        )
    return (
        f"the checkpoint store failed or did not respond ({type(error).__name__}); send the request"
        " again, and see the head's log for details"
    )


class CheckpointStore:
    """All checkpoints under one root."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def find(self, path: CheckpointPath) -> CheckpointManifest | None:
        """Return a checkpoint's manifest; None if the checkpoint does not exist.

        Raises:
            InvalidRequest: the manifest was written by a newer release, or is damaged.
        """
        content = await self.read_small(path.manifest_key)
        if content is None:
            return None
        return decode_manifest(CheckpointManifest, content, str(path))

    async def read(
        self, path: CheckpointPath, names: Iterable[str] | None = None
    ) -> tuple[CheckpointManifest, dict[str, memoryview]]:
        """Return the manifest and the contents of some of the files (by default all).

        Raises:
            NotFound: the checkpoint does not exist.
            InvalidRequest: a file is missing or damaged.
        """
        manifest = await self.manifest(path)
        wanted = list(manifest.files) if names is None else list(names)
        contents = await asyncio.gather(*[self.read_file(manifest, name) for name in wanted])
        return manifest, dict(zip(wanted, contents, strict=True))

    async def manifest(self, path: CheckpointPath) -> CheckpointManifest:
        """Return the manifest of a checkpoint that exists.

        The API server decides whether it has expired, since the expiry may have changed after the
        manifest was written.

        Raises:
            NotFound: the checkpoint does not exist.
        """
        manifest = await self.find(path)
        if manifest is None:
            raise NotFound(f"checkpoint {path} does not exist or has expired")
        return manifest

    async def read_file(
        self, manifest: CheckpointManifest | SuspendedManifest, name: str
    ) -> memoryview:
        """Return the contents of one file, in memory once.

        Raises:
            InvalidRequest: the file is missing or damaged.
        """
        stored, what = manifest.files.get(name), f"{manifest}: its file {name}"
        # Without an entry the checkpoint was overwritten after the caller read its manifest.
        content = await self._read(manifest.key_of(name), stored, what) if stored else None
        if content is None:
            raise InvalidRequest(f"{what} is missing")
        return content

    async def _read(self, key: str, stored: StoredFile, what: str) -> memoryview | None:
        """Return the contents of a file; None if there is none.

        Raises:
            InvalidRequest: it is damaged.
        """
        damaged = InvalidRequest(f"{what} is damaged")
        try:
            with store_errors():
                if (await obstore.head_async(self._store, key))["size"] != stored.size_bytes:
                    raise damaged
                content = await self._get(key, stored.size_bytes)
        except FileNotFoundError:
            return None
        if await asyncio.to_thread(_sha256, content) != stored.sha256:
            raise damaged
        return content

    async def read_small(self, key: str) -> bytes | None:
        """Return a small object; None if there is none."""
        try:
            with store_errors():
                answer = await obstore.get_async(self._store, key)
                return bytes(await answer.bytes_async())
        except FileNotFoundError:
            return None

    async def _get(self, key: str, size: int) -> memoryview:
        content, left = np.empty(size, np.uint8), parts(size)

        async def get_some() -> None:
            for part in left:
                got = await obstore.get_range_async(
                    self._store, key, start=part.start, end=part.stop
                )
                await asyncio.to_thread(
                    np.copyto, content[part], np.frombuffer(memoryview(got), np.uint8)
                )

        try:
            await asyncio.gather(*[get_some() for _ in range(IN_FLIGHT)])
        finally:
            # When one has failed, the others get no further parts.
            left.close()
        return content.data

    async def write(
        self, manifest: CheckpointManifest, files: Mapping[str, bytes], *, overwrite: bool
    ) -> CheckpointManifest:
        """Write a checkpoint and return its final manifest.

        Args:
            manifest: its manifest; `files` is filled in here.
            files: contents by file name.
            overwrite: whether a checkpoint of the same name may be replaced.

        Raises:
            InvalidRequest: a checkpoint of the same name exists, and `overwrite` is false.
        """
        path = manifest.path
        await self.refuse_duplicate(path, overwrite=overwrite)
        stored = await asyncio.to_thread(_describe, files)
        manifest = manifest.model_copy(update={"files": stored, "data_prefix": ""})
        if await self.find(path) is None:
            await self._put_files(manifest, files)
            await self._put_manifest(manifest, mode="create")
            return manifest
        staged = manifest.model_copy(update={"data_prefix": f"next-{uuid.uuid4().hex}"})
        await self._put_files(staged, files)
        await self._put_manifest(staged, mode="overwrite")
        # Not a copy within the store: S3 can't copy more than 5 GiB in one request.
        await self._put_files(manifest, files)
        await self._put_manifest(manifest, mode="overwrite")
        await self._delete_others(path.prefix, manifest)
        return manifest

    async def refuse_duplicate(self, path: CheckpointPath, *, overwrite: bool) -> None:
        """Check that a name is unused, or may be overwritten.

        Raises:
            InvalidRequest: the name is in use.
        """
        if not overwrite and await self.find(path) is not None:
            raise _exists(path)

    async def autosaves(self, run_id: str) -> list[CheckpointPath]:
        """Return the automatic checkpoints in a run's folder, incomplete ones included."""
        folder = f"{run_prefix(run_id)}/{CheckpointKind.TRAINING}/"
        with store_errors():
            listed = await obstore.list_with_delimiter_async(self._store, folder)
        names = [found.rstrip("/").rpartition("/")[2] for found in listed["common_prefixes"]]
        return [
            CheckpointPath(run_id, CheckpointKind.TRAINING, name)
            for name in names
            if is_reserved(name)
        ]

    async def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint, its manifest first. A missing checkpoint is not an error."""
        with suppress(FileNotFoundError), store_errors():
            await obstore.delete_async(self._store, path.manifest_key)
        with suppress(FileNotFoundError):
            await self._delete_others(path.prefix, None)

    async def _put_files(self, manifest: CheckpointManifest, files: Mapping[str, bytes]) -> None:
        with store_errors():
            await asyncio.gather(
                *[
                    durable.put(self._store, manifest.key_of(name), content)
                    for name, content in files.items()
                ]
            )

    async def _put_manifest(
        self, manifest: CheckpointManifest, mode: Literal["create", "overwrite"]
    ) -> None:
        content, key = encode_manifest(manifest), manifest.path.manifest_key
        try:
            with store_errors():
                await durable.put_atomically(self._store, key, content, mode)
        except AlreadyExistsError:
            raise _exists(manifest.path) from None

    async def find_suspended(self, run_id: str) -> SuspendedManifest | None:
        """Return the latest suspended state of a run; None if there is none.

        Raises:
            InvalidRequest: the manifest was written by a newer release, or is damaged.
        """
        content = await self.read_small(suspended_key(run_id))
        if content is None:
            return None
        name = f"the suspended state of training run {run_id}"
        return decode_manifest(SuspendedManifest, content, name)

    async def put_suspended(
        self, manifest: SuspendedManifest, name: str, content: bytes | memoryview
    ) -> StoredFile:
        """Write one file of a suspended state, which exists only after `commit_suspended`."""
        with store_errors():
            await durable.put(self._store, manifest.key_of(name), content)
        return (await asyncio.to_thread(_describe, {name: content}))[name]

    def write_suspended(
        self, manifest: SuspendedManifest, name: str, content: Callable[[Growing], object]
    ) -> StoredFile:
        """Write one file of a suspended state into a local folder; see `durable.write`. Blocks."""
        with store_errors():
            return durable.write(self._store, manifest.key_of(name), content)

    async def synchronize_suspended(self, manifest: SuspendedManifest, name: str) -> None:
        """Return once a file from `write_suspended` is on the disk."""
        with store_errors():
            await asyncio.to_thread(durable.synchronize, self._store, manifest.key_of(name))

    async def commit_suspended(self, manifest: SuspendedManifest) -> None:
        """Write the manifest of a suspended state, which replaces the run's previous one."""
        key = suspended_key(manifest.run_id)
        with store_errors():
            await durable.put_atomically(self._store, key, encode_manifest(manifest), "overwrite")
        await self._delete_others(suspended_prefix(manifest.run_id), manifest)

    async def discard_suspended(self, manifest: SuspendedManifest) -> None:
        """Delete the files of a suspended state that will not be committed, as far as possible."""
        with suppress(FileNotFoundError, StoreFailed):
            await self._delete_others(manifest.key_of(""), None)

    async def keep_suspended(self, run_id: str, manifest: SuspendedManifest | None) -> None:
        """Delete the files of other suspended states of a run, as far as possible.

        Args:
            run_id: the run.
            manifest: of the state that is kept, if there is one.
        """
        with suppress(FileNotFoundError, StoreFailed):
            await self._delete_others(suspended_prefix(run_id), manifest)

    async def withdraw_suspended(self, manifest: SuspendedManifest) -> None:
        """Delete a suspended state, its manifest first. Idempotent.

        Files that can't be deleted are deleted with the run's next state, or with the run.
        """
        with suppress(FileNotFoundError), store_errors():
            await obstore.delete_async(self._store, suspended_key(manifest.run_id))
        try:
            await self._delete_others(suspended_prefix(manifest.run_id), None)
        except StoreFailed as error:
            log.warning(
                "failed to delete files of a suspended state", of=str(manifest), error=str(error)
            )

    async def put_evicted(self, key: str, content: bytes) -> StoredFile:
        """Write evicted weights."""
        with store_errors():
            await durable.put(self._store, key, content)
        return (await asyncio.to_thread(_describe, {key: content}))[key]

    async def read_evicted(self, evicted: EvictedSampler) -> memoryview | None:
        """Return the file of evicted weights; None if there is none.

        Raises:
            InvalidRequest: it is damaged.
        """
        file = StoredFile(size_bytes=evicted.size_bytes, sha256=evicted.sha256)
        return await self._read(evicted.key, file, f"the file {evicted.key} of evicted weights")

    async def delete_evicted(self, evicted: EvictedSampler) -> None:
        """Delete evicted weights, which may be missing."""
        with suppress(FileNotFoundError), store_errors():
            await obstore.delete_async(self._store, evicted.key)

    async def _delete_others(
        self, prefix: str, manifest: CheckpointManifest | SuspendedManifest | None
    ) -> None:
        """Delete the files of a folder that do not belong to the one state that it has, if any."""
        kept = manifest.object_keys if manifest is not None else frozenset()
        with store_errors():
            async for batch in obstore.list(self._store, prefix):
                stray = [entry["path"] for entry in batch if entry["path"] not in kept]
                if stray:
                    await obstore.delete_async(self._store, stray)


def _exists(path: CheckpointPath) -> InvalidRequest:
    remedy = {
        CheckpointKind.TRAINING: "save_state with overwrite=True",
        CheckpointKind.SAMPLER: "delete it first",
        CheckpointKind.EXTERNAL: "delete it first",
    }
    return InvalidRequest(
        f"checkpoint {path} already exists: choose another name, or {remedy[path.kind]}"
    )


def _describe(files: Mapping[str, bytes | memoryview]) -> dict[str, StoredFile]:
    return {
        name: StoredFile(size_bytes=len(content), sha256=_sha256(content))
        for name, content in files.items()
    }


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
