"""The server's view of checkpoints: an index in the catalog, the truth in the object store.

The head writes checkpoints; the server learns of one when it forwards the request for it, and
looks at the manifest when somebody asks. So a checkpoint is listed if and only if its manifest
exists, whichever of the two processes died in between.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import obstore
import structlog
from obstore.store import ObjectStore, from_url
from pydantic import ValidationError

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.store import Catalog, Page
from tinkercloud_api.catalog.tables import Checkpoint
from tinkercloud_protocol.catalogue import CheckpointInfo
from tinkercloud_protocol.checkpoints import Manifest, SuspendedManifest, suspended_key
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.paths import (
    CheckpointKind,
    CheckpointPath,
    run_prefix,
    suspended_prefix,
)

log = structlog.get_logger(__name__)

_GIVE_UP = timedelta(hours=6)
"""How long the manifest of a requested checkpoint is looked for."""


def open_store(url: str) -> ObjectStore:
    """Open the object store at a URL; credentials come from the environment."""
    if url.startswith("file:"):
        return from_url(url, mkdir=True)
    return from_url(url, client_options={"allow_http": True})


class Checkpoints:
    """All checkpoints of all owners."""

    def __init__(self, catalog: Catalog, store: ObjectStore) -> None:
        self._catalog = catalog
        self._store = store

    async def ping(self) -> None:
        """Return if the object store answers."""
        with contextlib.suppress(FileNotFoundError):
            await obstore.head_async(self._store, "ping")

    async def expect(self, path: CheckpointPath, owner: str) -> None:
        """Note that a head is about to be asked for a checkpoint."""
        await self._catalog.expect_checkpoint(path, owner)

    async def manifest(self, path: CheckpointPath, principal: Principal) -> Manifest:
        """Return the manifest of a checkpoint that exists for this principal.

        Raises:
            NotFound: it does not.
        """
        manifest = await self._read(path)
        if manifest is None or manifest.is_expired(datetime.now(UTC)):
            raise NotFound(f"checkpoint {path} does not exist, or belongs to another owner")
        row = await self._catalog.checkpoint(path)
        if row is None or not row.is_public:
            principal.require(manifest.owner, f"checkpoint {path}")
        return manifest

    async def of_run(self, run_id: str) -> list[CheckpointInfo]:
        """Return a run's checkpoints, oldest first."""
        await self._refresh()
        return [info(row) for row in await self._catalog.checkpoints_of_run(run_id)]

    async def discover(self, run_id: str) -> None:
        """Note the training checkpoints that a head has written of its own accord."""
        folder = f"{run_prefix(run_id)}/{CheckpointKind.TRAINING}/"
        listed = await obstore.list_with_delimiter_async(self._store, folder)
        for prefix in listed["common_prefixes"]:
            name = prefix.rstrip("/").rpartition("/")[2]
            path = CheckpointPath(run_id, CheckpointKind.TRAINING, name)
            if await self._catalog.checkpoint(path) is None:
                manifest = await self._read(path)
                if manifest is not None:
                    await self._catalog.index_checkpoint(manifest)

    async def is_suspended(self, run_id: str, generation: str) -> bool:
        """Whether the head of that generation has left what a run had become in it."""
        try:
            answer = await obstore.get_async(self._store, suspended_key(run_id))
        except FileNotFoundError:
            return False
        content = bytes(await answer.bytes_async())
        try:
            return SuspendedManifest.model_validate_json(content).goes_on_from(generation)
        except ValidationError:
            log.exception("a suspended state can't be read", run_id=run_id)
            return False

    async def delete_suspended(self, run_id: str) -> None:
        """Delete what a head has left of a run, its manifest first. Nothing is fine."""
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, suspended_key(run_id))
        await self._delete_folder(suspended_prefix(run_id))

    async def page(self, owner: str | None, page: Page) -> tuple[list[CheckpointInfo], int]:
        """Return checkpoints, newest first, and how many there are; owner None: everybody's."""
        await self._refresh()
        rows, total = await self._catalog.checkpoints(owner, page)
        return [info(row) for row in rows], total

    async def delete(self, path: CheckpointPath, principal: Principal) -> None:
        """Delete a checkpoint.

        Raises:
            NotFound: it does not exist for this principal.
        """
        principal.require((await self._required(path)).owner, f"checkpoint {path}")
        await self._delete(path)

    async def publish(self, path: CheckpointPath, principal: Principal, *, is_public: bool) -> None:
        """Let everybody read a checkpoint, or only its owner.

        Raises:
            NotFound: it does not exist for this principal.
        """
        principal.require((await self._required(path)).owner, f"checkpoint {path}")
        await self._catalog.index_checkpoint(await self._required(path))
        await self._catalog.set_public(path, is_public=is_public)

    async def set_ttl(
        self, path: CheckpointPath, principal: Principal, ttl_seconds: int | None
    ) -> None:
        """Let a checkpoint expire so many seconds from now; None means never.

        Raises:
            NotFound: it does not exist for this principal.
        """
        manifest = await self._required(path)
        principal.require(manifest.owner, f"checkpoint {path}")
        expires_at = None
        if ttl_seconds is not None:
            expires_at = datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        changed = manifest.model_copy(update={"expires_at": expires_at})
        content = changed.model_dump_json(indent=2).encode()
        await obstore.put_async(self._store, path.manifest_key, content)
        await self._catalog.index_checkpoint(changed)

    async def delete_expired(self) -> None:
        """Delete the checkpoints whose time to live has passed."""
        await self._refresh()
        for row in await self._catalog.expired_checkpoints(datetime.now(UTC)):
            path = _path(row)
            manifest = await self._read(path)
            if manifest is not None and not manifest.is_expired(datetime.now(UTC)):
                await self._catalog.index_checkpoint(manifest)
                continue
            log.info("checkpoint expired", path=str(path))
            await self._delete(path)

    async def _required(self, path: CheckpointPath) -> Manifest:
        manifest = await self._read(path)
        if manifest is None:
            raise NotFound(f"checkpoint {path} does not exist, or belongs to another owner")
        return manifest

    async def _read(self, path: CheckpointPath) -> Manifest | None:
        try:
            answer = await obstore.get_async(self._store, path.manifest_key)
        except FileNotFoundError:
            return None
        try:
            return Manifest.model_validate_json(bytes(await answer.bytes_async()))
        except ValidationError as error:
            raise InvalidRequest(
                f"{path} can't be read: its manifest is damaged ({error})"
            ) from None

    async def _delete(self, path: CheckpointPath) -> None:
        """Delete the manifest, with which the checkpoint ends, and then the files."""
        await obstore.delete_async(self._store, path.manifest_key)
        await self._delete_folder(path.prefix)
        await self._catalog.forget_checkpoint(path)

    async def _delete_folder(self, prefix: str) -> None:
        async for batch in obstore.list(self._store, f"{prefix}/"):
            await obstore.delete_async(self._store, [entry["path"] for entry in batch])

    async def _refresh(self) -> None:
        """Look at the manifests of all checkpoints that were asked for and not seen yet."""
        rows = await self._catalog.unindexed_checkpoints()
        await asyncio.gather(*[self._look_at(row) for row in rows])

    async def _look_at(self, row: Checkpoint) -> None:
        manifest = await self._read(_path(row))
        is_given_up = datetime.now(UTC) - row.asked_at > _GIVE_UP
        # An overwrite is over when the manifest is another one; comparing it with the time of the
        # request would compare the clocks of two machines.
        if manifest is not None and (is_given_up or manifest.created_at != row.created_at):
            await self._catalog.index_checkpoint(manifest)
        elif manifest is None and is_given_up:
            await self._catalog.forget_checkpoint(_path(row))


def _path(row: Checkpoint) -> CheckpointPath:
    return CheckpointPath(row.run_id, CheckpointKind(row.kind), row.name)


def info(row: Checkpoint) -> CheckpointInfo:
    """Return what a list shows of a checkpoint."""
    path = _path(row)
    return CheckpointInfo(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.kind.checkpoint_type,
        time=row.created_at or row.asked_at,
        tinker_path=str(path),
        size_bytes=row.size_bytes or 0,
        public=row.is_public,
        user_metadata=row.user_metadata,
        expires_at=row.expires_at,
    )


def latest(infos: Sequence[CheckpointInfo], kind: CheckpointKind) -> CheckpointInfo | None:
    """Return the newest checkpoint of a kind."""
    of_kind = [entry for entry in infos if entry.checkpoint_type == kind.checkpoint_type]
    return max(of_kind, key=lambda entry: entry.time, default=None)
