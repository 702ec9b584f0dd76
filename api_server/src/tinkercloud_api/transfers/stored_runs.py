"""Checkpoints that no head writes: a place in the catalog and in the store for each of them.

Each belongs to a training run of its own, without a live model. While the files are written, a row
of the table `uploads` describes it, so that the files of an abandoned one are found and deleted.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from tinkercloud_api.catalog.schema.tables import STORED, Session, TrainingRun, Upload, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded, WireError
from tinkercloud_protocol.wire.ids import ModelId

log = structlog.get_logger(__name__)

MAX_OPEN = 4
"""Maximum number of unfinished uploads and copies per owner."""
_GRACE = timedelta(minutes=10)
"""Time after its expiry by which nothing writes files of an upload any more."""


@dataclass(frozen=True, slots=True)
class StoredRuns:
    """Makes checkpoints of files that are in the store."""

    catalog: Catalog
    checkpoints: Checkpoints
    objects: ObjectStoreClient
    max_checkpoint_bytes: int | None
    """Maximum total size of an owner's checkpoints; None means no limit."""

    async def reserve(self, upload: Upload) -> None:
        """Record that the files of a checkpoint are about to be written.

        Raises:
            InvalidRequest: the owner has no quota for them.
            Overloaded: the owner has too many unfinished uploads and copies.
        """
        await self.checkpoints.check_room(
            upload.owner, upload.size_bytes, self.max_checkpoint_bytes
        )
        if not await self.catalog.add_upload(upload, MAX_OPEN):
            raise Overloaded(
                f"{upload.owner!r} has {MAX_OPEN} unfinished uploads and copies, which is the"
                " maximum; finish or delete one (`tinkercloud checkpoints uploads` lists them), or"
                " wait until it expires"
            )

    async def complete(self, upload_id: str, manifest: CheckpointManifest, spec: ModelSpec) -> str:
        """Add the run, and the manifest last; return the path of the checkpoint. Idempotent.

        Args:
            upload_id: id of the row in the table of uploads.
            manifest: manifest of the checkpoint, whose files are all in the store.
            spec: specification of the run.

        Raises:
            InvalidRequest: the run exists, and holds something else.
        """
        upload = await self.catalog.upload(upload_id)
        await self._add_run(manifest, spec, upload.project_id if upload is not None else None)
        await self.objects.delete_others(manifest.path.prefix, manifest.object_keys)
        await self.checkpoints.add(manifest)
        await self.catalog.mark_finished(upload_id)
        return manifest.tinker_path

    async def _add_run(
        self, manifest: CheckpointManifest, spec: ModelSpec, project_id: str | None
    ) -> None:
        moment, run_id = now(), manifest.path.run_id
        session = Session(
            id=ModelId.parse(run_id).session_id,
            owner=manifest.owner,
            finished_at=moment,
            finish_reason="success",
            finish_detail="it only holds a copied or imported checkpoint",
            sdk_version="none",
            project_id=project_id,
            tags=[],
            user_metadata={},
        )
        await self.catalog.ensure_session(session)
        row = await self.catalog.add_run(
            TrainingRun(
                id=run_id,
                session_id=session.id,
                owner=manifest.owner,
                base_model=manifest.base_model,
                spec=spec.model_dump(mode="json", exclude_defaults=True),
                user_metadata=None,
                generation=STORED,
                deleted_at=moment,
                is_swept=True,
            )
        )
        check_unused(row, spec)

    async def sweep(self) -> None:
        """Delete the files of abandoned uploads and copies; a failure is retried the next time."""
        for upload in await self.catalog.expired_uploads(now() - _GRACE):
            manifest = CheckpointManifest.model_validate(upload.manifest)
            try:
                if (
                    await self.checkpoints.index.read(manifest.path) is None
                    and not upload.is_finished
                ):
                    log.info("deleting an abandoned upload", path=str(manifest))
                    await self.objects.delete_folder(manifest.path.prefix)
                await self.catalog.forget_upload(upload.id)
            except WireError as error:
                log.warning(
                    "cannot delete an abandoned upload", path=str(manifest), error=error.message
                )


def check_unused(row: TrainingRun, spec: ModelSpec) -> None:
    """Check that a run's row is that of the same copied or imported checkpoint.

    Raises:
        InvalidRequest: it is another run.
    """
    if row.generation != STORED or ModelSpec.model_validate(row.spec) != spec:
        raise InvalidRequest(
            f"training run {row.id} exists and holds something else: model_seq_id or the"
            " X-Idempotency-Key was already used for another request; use a new one"
        )


def is_open(upload: Upload, moment: datetime) -> bool:
    """Whether files of an upload are still accepted."""
    return not upload.is_finished and moment < upload.expires_at
