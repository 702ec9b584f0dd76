"""The catalog's index of the manifests of checkpoints, which heads write to the store."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from tinkercloud_api.catalog.schema.tables import Checkpoint
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_rows import has_timed_out, name_of, path_of
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest, decode_manifest
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable, WireError
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath, run_prefix

log = structlog.get_logger(__name__)

_CONCURRENT_READS = 16
"""Limit of manifests that one request reads concurrently. If a folder has more pending checkpoints
than this, the folder is listed first."""


@dataclass(frozen=True, slots=True)
class ManifestIndex:
    """Reads manifests, and updates the index from them."""

    catalog: Catalog
    objects: ObjectStoreClient

    async def read(self, path: CheckpointPath) -> CheckpointManifest | None:
        """Return the manifest of a checkpoint, of any owner; None if there is none.

        Raises:
            InvalidRequest: it was written by a newer release, or is damaged.
        """
        content = await self.objects.read(path.manifest_key)
        return None if content is None else decode_manifest(CheckpointManifest, content, str(path))

    async def update(self, manifest: CheckpointManifest) -> None:
        """Update the index from a manifest.

        If the index is already up to date, a pending overwrite of the checkpoint stays pending.
        """
        row = await self.catalog.checkpoint(manifest.path)
        if row is None or row.created_at != manifest.created_at:
            await self.catalog.index_checkpoint(manifest)

    async def refresh(self, rows: Sequence[Checkpoint]) -> None:
        """Read the manifests of pending checkpoints.

        A failure does not affect the other checkpoints and is retried the next time.
        """
        limit = asyncio.Semaphore(_CONCURRENT_READS)
        rows = await self._with_files(rows)

        async def read(row: Checkpoint) -> None:
            async with limit:
                try:
                    await self._refresh_one(row)
                except WireError as error:
                    log.warning(
                        "cannot read a checkpoint manifest", path=name_of(row), error=error.message
                    )

        await asyncio.gather(*[read(row) for row in rows])

    async def _with_files(self, rows: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Skip checkpoints without files in folders with many pending checkpoints.

        These belong to saves that are queued or have failed, of which there may be thousands.
        """
        folders: dict[str, list[Checkpoint]] = {}
        for row in rows:
            folders.setdefault(f"{run_prefix(row.run_id)}/{row.kind}/", []).append(row)
        kept = []
        for folder, inside in folders.items():
            names = {row.name for row in inside}
            if len(inside) > _CONCURRENT_READS:
                with suppress(Unavailable):
                    names &= set(await self.objects.folders(folder))
            kept += [row for row in inside if row.name in names or has_timed_out(row)]
        return kept

    async def _refresh_one(self, row: Checkpoint) -> None:
        is_over = has_timed_out(row)
        try:
            manifest = await self.read(path_of(row))
        except InvalidRequest as error:
            # It is listed as damaged. Until the time limit, an overwrite may replace it.
            if row.damage is None or is_over:
                await self.catalog.mark_damaged(path_of(row), error.message, is_indexed=is_over)
            raise
        # An overwrite has completed when the manifest has changed. Comparing its time with that of
        # the request would compare the clocks of two machines.
        if manifest is not None and (is_over or manifest.created_at != row.created_at):
            await self.catalog.reindex_checkpoint(manifest)
        elif manifest is None and is_over:
            await self.catalog.forget_checkpoint(path_of(row))

    async def discover(self, run_id: str) -> None:
        """Index the training checkpoints that a head has written without a request.

        Automatic ones are left out: a head replaces and deletes them.
        """
        found = await self.in_store(run_id)
        await self._discover_all(run_id, [path for path in found if not path.is_autosave])

    async def keep_autosaves(self, run_id: str) -> None:
        """Index the automatic checkpoints of a lost run: now they are checkpoints like others."""
        found = await self.in_store(run_id)
        await self._discover_all(run_id, [path for path in found if path.is_autosave])

    async def in_store(self, run_id: str) -> list[CheckpointPath]:
        """Return the training checkpoints in a run's folder, incomplete ones included."""
        folder, paths = f"{run_prefix(run_id)}/{CheckpointKind.TRAINING}/", []
        for name in await self.objects.folders(folder):
            try:
                paths.append(CheckpointPath(run_id, CheckpointKind.TRAINING, name))
            except InvalidRequest as error:
                log.warning(
                    "skipping an invalid checkpoint folder", path=folder + name, error=error.message
                )
        return paths

    async def _discover_all(self, run_id: str, paths: Sequence[CheckpointPath]) -> None:
        known = await self.catalog.names_of_checkpoints(run_id, CheckpointKind.TRAINING)
        for path in paths:
            if path.name in known:
                continue
            try:
                manifest = await self.read(path)
            except InvalidRequest as error:
                log.warning("skipping a damaged checkpoint", path=str(path), error=error.message)
                continue
            if manifest is not None:
                await self.catalog.index_checkpoint(manifest)
