"""Checkpoints as seen by the server: an index in the catalog of manifests in the object store.

Heads write checkpoints. The server records a pending checkpoint when it forwards the save request,
and reads the manifest when the checkpoint is requested. A checkpoint is therefore listed if and
only if its manifest exists, even if the server or the head died in between. Only the public flag,
and an expiry time that was changed after saving, are stored in the catalog alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog
from obstore.store import ObjectStore

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.runs.counts import Storage
from tinkercloud_api.catalog.runs.indexed_checkpoints import CheckpointSearch
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Checkpoint
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_rows import info, name_of, path_of
from tinkercloud_api.checkpoints.deferred_requests import DeferredRequests
from tinkercloud_api.checkpoints.journal_removal import SharedJournals
from tinkercloud_api.checkpoints.manifest_index import ManifestIndex
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.checkpoints.storage_quota import StorageQuota
from tinkercloud_api.checkpoints.suspended_states import SuspendedStates
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    encode_manifest,
)
from tinkercloud_protocol.responses.listings import CheckpointInfo
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

log = structlog.get_logger(__name__)

_LARGEST_LISTED = 3
"""Number of large checkpoints that the error message of the quota lists."""
_PROBE_SECONDS = 30.0
"""Interval between health checks that write, as object stores charge for requests."""


class Checkpoints:
    """The checkpoints of all owners."""

    def __init__(
        self, catalog: Catalog, store: ObjectStore, quota: StorageQuota | None = None
    ) -> None:
        self._catalog = catalog
        self._quota = quota or StorageQuota(catalog, Tenants())
        self._objects = ObjectStoreClient(store)
        self.index = ManifestIndex(catalog, self._objects)
        self.suspended = SuspendedStates(catalog, self._objects, self.index)
        self.journals = SharedJournals(self._objects)
        self.deferred = DeferredRequests(self._objects)
        self._writable_until = 0.0

    async def ping(self) -> None:
        """Check that the store responds, and has accepted a write within `_PROBE_SECONDS`.

        Raises:
            Unavailable: it does not, or not in time; all other methods may raise this as well.
        """
        try:
            async with asyncio.timeout(4):
                if time.monotonic() >= self._writable_until:
                    await self._objects.probe()
                    self._writable_until = time.monotonic() + _PROBE_SECONDS
                await self._objects.ping()
        except TimeoutError:
            raise Unavailable("the object store for checkpoints did not respond") from None

    async def record_pending_unless_rejected(
        self, path: CheckpointPath, owner: str, send: Callable[[], Awaitable[int | None]]
    ) -> None:
        """Send a save request to a head, and record its checkpoint unless the head rejects it.

        The record is written first, so that the checkpoint is found even if a process dies.

        Args:
            path: path of the checkpoint.
            owner: owner of the caller's key.
            send: sends the request and returns the status of the response.
        """
        recorded_at = await self._catalog.record_pending_checkpoint(path, owner)
        status = await send()
        if recorded_at is not None and status is not None and 400 <= status < 500:
            # The response has been sent. A record that remains is checked in vain for some hours.
            with suppress(Unavailable):
                await self._catalog.cancel_pending_checkpoint(path, recorded_at)

    async def check_quota(self, path: CheckpointPath, limit: int | None) -> None:
        """Check that a run's owner has quota for another checkpoint.

        Overwriting a checkpoint and repeating a request are always allowed. Saves in progress are
        not counted: saves that start below the limit may end above it.

        Args:
            path: path of the checkpoint.
            limit: maximum bytes of all checkpoints of one owner; None means no limit.

        Raises:
            InvalidRequest: the checkpoints of the owner, or of its tenant, have reached a limit.
        """
        run = await self._catalog.run(path.run_id)
        if run is not None and not await self._catalog.is_known(path):
            await self.check_room(run.owner, 1, limit)

    async def check_room(self, owner: str, size_bytes: int, limit: int | None) -> None:
        """Check that an owner has quota for some more bytes.

        Args:
            owner: the owner.
            size_bytes: number of bytes to add.
            limit: as for `check_quota`.

        Raises:
            InvalidRequest: the owner's checkpoints and open uploads would exceed the limit.
        """
        if limit is None and not self._quota.is_limited(owner):
            return
        await self.index.refresh(await self._quota.pending(owner))
        await self._quota.check(owner, size_bytes)
        if limit is None:
            return
        size = await self._catalog.size_of_checkpoints(owner)
        unfinished = (await self._catalog.sizes_of_uploads(owner)).get(owner, 0)
        if size + unfinished + size_bytes > limit:
            largest = await self._catalog.largest_checkpoints(owner, _LARGEST_LISTED)
            named = ", ".join(f"{name_of(row)} ({row.size_bytes} bytes)" for row in largest)
            raise InvalidRequest(
                f"the checkpoints of {owner!r} use {size} of {limit} bytes"
                f" (max_checkpoint_bytes_per_owner), unfinished uploads and copies {unfinished},"
                f" and this needs at least {size_bytes} more; delete some, or let some expire; the"
                f" largest are {named}"
            )

    async def manifest(self, path: CheckpointPath, principal: Principal) -> CheckpointManifest:
        """Return the manifest of a checkpoint that exists for this principal.

        Raises:
            NotFound: the checkpoint does not exist for this principal.
            InvalidRequest: the manifest was written by a newer release, or is damaged.
        """
        try:
            manifest, row = await self._unexpired(path)
        except NotFound as error:
            raise await self._with_others(path, principal, error) from None
        if row is None or not row.is_public:
            principal.require_read(await self._catalog.claim(manifest), f"checkpoint {path}")
        return manifest

    async def _with_others(
        self, path: CheckpointPath, principal: Principal, error: NotFound
    ) -> NotFound:
        """Return the error for a missing checkpoint, with those that have its name."""
        found, moment = [], datetime.now(UTC)
        for other in (replace(path, kind=kind) for kind in CheckpointKind if kind is not path.kind):
            with suppress(NotFound):
                row = principal.require_read(await self._catalog.checkpoint(other), "")
                if row.damage is None and (row.expires_at is None or row.expires_at > moment):
                    found.append(str(other))
        return NotFound(f"{error.message}; there is {', '.join(found)}") if found else error

    async def manifest_of_grant(self, path: CheckpointPath) -> CheckpointManifest:
        """Return the manifest of a checkpoint for the holder of a signed URL.

        Raises:
            NotFound: the checkpoint does not exist any more.
            InvalidRequest: the manifest is damaged.
        """
        return (await self._unexpired(path))[0]

    async def _unexpired(
        self, path: CheckpointPath
    ) -> tuple[CheckpointManifest, Checkpoint | None]:
        manifest = await self._required(path)
        row = await self._catalog.checkpoint(path)
        if row is not None and row.created_at == manifest.created_at:
            manifest = manifest.model_copy(update={"expires_at": row.expires_at})
        if manifest.is_expired(datetime.now(UTC)):
            raise _not_found(path)
        return manifest, row

    async def add(self, manifest: CheckpointManifest) -> None:
        """Make a checkpoint exist whose files are in the store; do nothing if it exists."""
        await self._objects.create(manifest.path.manifest_key, encode_manifest(manifest))
        await self.index.update(await self._required(manifest.path))

    async def of_run(self, run_id: str) -> list[CheckpointInfo]:
        """Return a run's checkpoints, oldest first."""
        return (await self.of_runs([run_id]))[run_id]

    async def of_runs(self, run_ids: Sequence[str]) -> dict[str, list[CheckpointInfo]]:
        """Return the checkpoints of each run, oldest first."""
        await self.index.refresh(await self._catalog.unindexed_checkpoints_of_runs(run_ids))
        found: dict[str, list[CheckpointInfo]] = {run_id: [] for run_id in run_ids}
        for row in await self._catalog.checkpoints_of_runs(run_ids):
            found[row.run_id].append(info(row))
        return found

    async def to_resume_from(self, run_id: str, count: int) -> list[CheckpointManifest]:
        """Return a run's newest training checkpoints, automatic ones included, newest first.

        A head that is alive may be deleting automatic ones; damaged and expired ones are left out.
        """
        await self.index.discover(run_id)
        kind, moment = CheckpointKind.TRAINING.checkpoint_type, datetime.now(UTC)
        listed = [
            each
            for each in await self.of_run(run_id)
            if each.checkpoint_type == kind and each.damage is None
        ]
        # Oldest first: only so many manifests are read as will be shown. Lifetimes are those of the
        # catalog, since they may have been changed; automatic checkpoints have none.
        newest = [each for each in listed if each.expires_at is None or each.expires_at > moment]
        paths = {CheckpointPath.parse(each.tinker_path) for each in newest[-count:]}
        paths |= {path for path in await self.index.in_store(run_id) if path.is_autosave}
        found = []
        for path in paths:
            with suppress(InvalidRequest):
                manifest = await self.index.read(path)
                if manifest is not None:
                    found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.created_at, reverse=True)[:count]

    async def page(self, visible: Visibility, page: Page) -> tuple[list[CheckpointInfo], int]:
        """Return checkpoints, newest first, and their total number."""
        await self.index.refresh(await self._catalog.unindexed_checkpoints(visible))
        rows, total = await self._catalog.checkpoints(visible, page)
        return [info(row) for row in rows], total

    async def storage(self, owner: str | None, page: Page) -> Sequence[Storage]:
        """Return what checkpoints occupy, by owner, the largest first; owner None means all."""
        await self.index.refresh(await self._catalog.unindexed_checkpoints(Visibility(owner)))
        return await self._catalog.storage(owner, page)

    async def search(self, wanted: CheckpointSearch) -> list[CheckpointInfo]:
        """Return the checkpoints that match a search, newest first."""
        await self.index.refresh(await self._catalog.unindexed_checkpoints(wanted.visible))
        return [info(row) for row in await self._catalog.search_checkpoints(wanted)]

    async def delete(self, path: CheckpointPath, principal: Principal) -> None:
        """Delete a checkpoint, including damaged and partially deleted ones.

        Raises:
            NotFound: it does not exist for this principal.
        """
        row = await self._catalog.checkpoint(path)
        try:
            manifest = await self.index.read(path)
        except InvalidRequest:
            if row is None:
                raise
            manifest = None
        if manifest is not None:
            principal.require(await self._catalog.claim(manifest), f"checkpoint {path}")
            if not path.is_autosave:
                await self.index.update(manifest)
        elif row is not None and (row.is_indexed or row.damage is not None):
            principal.require(row, f"checkpoint {path}")
        else:
            # The checkpoint does not exist, or is still being saved.
            raise _not_found(path)
        principal.named_objects.add(str(path))
        await self._delete(path)

    async def publish(self, path: CheckpointPath, principal: Principal, *, is_public: bool) -> None:
        """Make a checkpoint readable by everybody, or only by its owner.

        Raises:
            NotFound: it does not exist for this principal.
            InvalidRequest: it is an automatic one, which a head may replace.
        """
        manifest = await self._lasting(path, principal)
        await self.index.update(manifest)
        await self._catalog.set_public(path, is_public=is_public)

    async def set_ttl(
        self, path: CheckpointPath, principal: Principal, ttl_seconds: int | None
    ) -> None:
        """Set a checkpoint to expire in `ttl_seconds`; None means never.

        The expiry time is stored only in the catalog, as a head may be replacing the manifest.

        Raises:
            NotFound: it does not exist for this principal.
            InvalidRequest: it is an automatic one, which a head may replace.
        """
        manifest = await self._lasting(path, principal)
        expires_at = None
        if ttl_seconds is not None:
            expires_at = datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        await self.index.update(manifest)
        await self._catalog.set_expiry(path, expires_at)

    async def expire_at(self, path: CheckpointPath, moment: datetime) -> None:
        """Let a checkpoint expire that this server has had saved."""
        await self._catalog.set_expiry(path, moment)

    async def _lasting(self, path: CheckpointPath, principal: Principal) -> CheckpointManifest:
        """Return the manifest of a principal's checkpoint that only its owner deletes."""
        manifest = await self._required(path)
        principal.require(await self._catalog.claim(manifest), f"checkpoint {path}")
        principal.named_objects.add(str(path))
        if path.is_autosave and await self._catalog.checkpoint(path) is None:
            raise InvalidRequest(
                f"{path} is an automatic checkpoint, which the session head of its run replaces;"
                " save one under a name with save_state"
            )
        return manifest

    async def delete_expired(self) -> None:
        """Delete expired checkpoints.

        A failure does not affect the other checkpoints and is retried the next time.
        """
        await self.index.refresh(await self._catalog.unindexed_checkpoints(EVERYTHING))
        for row in await self._catalog.expired_checkpoints(datetime.now(UTC)):
            try:
                await self._expire(row)
            except WireError as error:
                log.warning(
                    "cannot delete an expired checkpoint", path=name_of(row), error=error.message
                )

    async def _expire(self, row: Checkpoint) -> None:
        """Delete an expired checkpoint, unless another one was saved in its place."""
        path = path_of(row)
        manifest = await self.index.read(path)
        if manifest is not None and manifest.created_at != row.created_at:
            await self._catalog.reindex_checkpoint(manifest)
            return
        log.info("checkpoint expired", path=str(path))
        await self._delete(path)

    async def _required(self, path: CheckpointPath) -> CheckpointManifest:
        manifest = await self.index.read(path)
        if manifest is None:
            raise _not_found(path)
        return manifest

    async def _delete(self, path: CheckpointPath) -> None:
        """Delete the manifest, after which the checkpoint no longer exists, and then the files.

        The checkpoint is marked as expired first, so that `delete_expired` completes the deletion
        if this process dies.
        """
        await self._catalog.set_expiry(path, datetime.now(UTC))
        await self._objects.delete(path.manifest_key)
        await self._objects.delete_folder(path.prefix)
        await self._catalog.forget_checkpoint(path)


def _not_found(path: CheckpointPath) -> NotFound:
    return NotFound(f"checkpoint {path} does not exist, or belongs to another owner")
