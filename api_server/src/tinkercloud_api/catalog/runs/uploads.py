"""Queries and updates for checkpoints that no head writes: copies and uploaded adapters."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import Upload, now

_MAX_SWEPT = 100
"""Limit of uploads per housekeeping round."""


class UploadStatements(Statements):
    """Queries and updates of uploads, as `catalog.store` for everything else."""

    async def add_upload(self, upload: Upload, max_open: int) -> bool:
        """Record a new upload, unless its owner has too many open ones.

        Returns:
            Whether it was recorded.
        """
        is_open = (Upload.owner == upload.owner, Upload.is_finished.is_(False))
        query = select(func.count()).where(*is_open, Upload.expires_at > now())
        async with self._writing() as db:
            if (await db.scalar(query) or 0) >= max_open:
                return False
            db.add(upload)
        return True

    async def upload(self, upload_id: str) -> Upload | None:
        """Return an upload, which may have expired."""
        return await self._one(select(Upload).where(Upload.id == upload_id))

    async def open_uploads(self, owner: str) -> Sequence[Upload]:
        """Return an owner's uploads that are not finished and have not expired, oldest first."""
        query = select(Upload).where(
            Upload.owner == owner, Upload.is_finished.is_(False), Upload.expires_at > now()
        )
        # The ids of copies, which are in the same table, are ids of runs and have colons.
        of_files = query.where(Upload.id.not_like("%:%"))
        return await self._all(of_files.order_by(Upload.expires_at, Upload.id))

    async def forget_unfinished_uploads(self) -> None:
        """Remove all uploads and copies that are not finished."""
        await self._change(delete(Upload).where(Upload.is_finished.is_(False)))

    async def sizes_of_uploads(self, owner: str | None) -> Mapping[str, int]:
        """Return the total declared bytes of open uploads, by owner; owner None means all."""
        query = select(Upload.owner, func.sum(Upload.size_bytes)).group_by(Upload.owner)
        query = query.where(Upload.is_finished.is_(False), Upload.expires_at > now())
        if owner is not None:
            query = query.where(Upload.owner == owner)
        async with self._reading() as db:
            return {name: int(size) for name, size in (await db.execute(query)).all()}

    async def set_manifest(self, upload_id: str, manifest: dict[str, Any]) -> None:
        """Replace the manifest of an upload that is not finished."""
        is_open = (Upload.id == upload_id, Upload.is_finished.is_(False))
        await self._change(update(Upload).where(*is_open).values(manifest=manifest))

    async def set_adapter_config(self, upload_id: str, config: dict[str, Any]) -> None:
        """Record the configuration of an upload."""
        await self._change(
            update(Upload).where(Upload.id == upload_id).values(adapter_config=config)
        )

    async def set_upload_size(self, upload_id: str, size_bytes: int) -> None:
        """Record the size of an upload that did not declare it."""
        await self._change(
            update(Upload).where(Upload.id == upload_id).values(size_bytes=size_bytes)
        )

    async def mark_finished(self, upload_id: str) -> None:
        """Record that the checkpoint of an upload exists."""
        await self._change(update(Upload).where(Upload.id == upload_id).values(is_finished=True))

    async def expired_uploads(self, moment: datetime) -> Sequence[Upload]:
        """Return some uploads that expired before a time."""
        query = select(Upload).where(Upload.expires_at < moment)
        return await self._all(query.order_by(Upload.expires_at).limit(_MAX_SWEPT))

    async def forget_upload(self, upload_id: str) -> None:
        """Remove an upload."""
        await self._change(delete(Upload).where(Upload.id == upload_id))
