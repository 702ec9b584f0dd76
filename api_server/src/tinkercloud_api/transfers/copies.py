"""Copies of checkpoints (`copy_weights`): each is a checkpoint of a new run of the caller.

The store copies the files itself. A copy gets a folder of its own in each attempt, and its manifest
is written last. If the source was overwritten or deleted in the meantime, the attempt fails and
leaves no copy. The run's id is derived from the idempotency key, so a repeated request finds the
first one's copy, or joins it while it is being made.
"""

import asyncio
import hashlib
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from pydantic import Field, model_validator

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.project_rights import Projects
from tinkercloud_api.catalog.schema.tables import Upload, now
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.transfers.stored_runs import StoredRuns, check_unused
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import Name, TtlSeconds, Uri, WireModel
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_LIMIT = timedelta(hours=6)
"""Maximum time that copying may take."""


class CopyWeightsRequest(WireModel):
    """POST copy_weights. With a session, the copy belongs to that session and its project."""

    source_path: Uri
    destination_project_id: Name | None = None
    session_id: Name | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ttl_seconds: TtlSeconds | None = None
    """Absent means that the copy does not expire, even if the source does."""
    weights_access_token: Name | None = None

    @model_validator(mode="after")
    def _has_a_whole_run(self) -> "CopyWeightsRequest":
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("set both session_id and model_seq_id, or neither of them")
        return self


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies checkpoints. Belongs to one event loop."""

    checkpoints: Checkpoints
    training_runs: TrainingRuns
    stored_runs: StoredRuns
    projects: Projects
    _running: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    """Copies that are being made, by the run that they will belong to."""

    async def copy(
        self, request: CopyWeightsRequest, key: str | None, caller: Principal, reader: Principal
    ) -> str:
        """Copy a checkpoint and return the path of the copy.

        Args:
            request: the request.
            key: the idempotency key; requests of one owner with equal keys make one copy.
            caller: the caller, who owns the copy.
            reader: whose access to the source counts.

        Raises:
            NotFound: the source, the session or the project does not exist for them.
            Forbidden: the caller is only a viewer of the project.
            InvalidRequest: there is no quota, or the run or the key was used for something else.
            Overloaded: the caller has too many unfinished copies and uploads.
            Unavailable: the source changed in the meantime.
        """
        source = CheckpointPath.parse(request.source_path)
        if source.kind not in {CheckpointKind.TRAINING, CheckpointKind.SAMPLER}:
            raise InvalidRequest(
                f"source_path: {source} can't be copied; use a path with weights or sampler_weights"
            )
        manifest = await self.checkpoints.manifest(source, reader)
        if request.session_id is not None:
            await self.training_runs.active_session(request.session_id, caller)
        elif request.destination_project_id is not None:
            await self.projects.require_member(request.destination_project_id, caller)
        run_id = _run_id(request, key, caller.owner)
        task = self._running.get(run_id)
        if task is None:
            task = asyncio.create_task(self._copy(manifest, request, run_id, caller.owner))
            self._running[run_id] = task
            task.add_done_callback(lambda _: self._running.pop(run_id, None))
        return await asyncio.shield(task)

    async def _copy(
        self, source: CheckpointManifest, request: CopyWeightsRequest, run_id: str, owner: str
    ) -> str:
        target = CheckpointPath(run_id, source.path.kind, source.path.name)
        spec = ModelSpec(
            owner=owner, lora=source.lora, optimizer=source.optimizer, restore_from=str(source)
        )
        catalog = self.stored_runs.catalog
        if (row := await catalog.run(run_id)) is not None:
            check_unused(row, spec)
        if await self.checkpoints.index.read(target) is not None:
            return str(target)
        copy = _manifest(source, target, owner, request.ttl_seconds)
        if await catalog.upload(run_id) is None:
            await self.stored_runs.reserve(
                Upload(
                    id=run_id,
                    owner=owner,
                    project_id=request.destination_project_id,
                    manifest=copy.model_dump(mode="json"),
                    adapter_config={},
                    size_bytes=source.size_bytes,
                    expires_at=now() + _LIMIT,
                )
            )
        try:
            async with asyncio.timeout(_LIMIT.total_seconds()):
                await self._copy_files(source, copy)
        except Exception:
            await self.stored_runs.objects.delete_folder(f"{target.prefix}/{copy.data_prefix}")
            await catalog.forget_upload(run_id)
            raise
        return await self.stored_runs.complete(run_id, copy, spec)

    async def _copy_files(self, source: CheckpointManifest, copy: CheckpointManifest) -> None:
        changed = Unavailable(
            f"{source} was overwritten or deleted while it was copied; send the request again"
        )
        for name, file in source.files.items():
            try:
                await self.stored_runs.objects.copy(
                    source.key_of(name), copy.key_of(name), file.size_bytes
                )
            except NotFound:
                raise changed from None
        latest = await self.checkpoints.index.read(source.path)
        if latest is None or (latest.files, latest.data_prefix) != (
            source.files,
            source.data_prefix,
        ):
            raise changed


def _run_id(request: CopyWeightsRequest, key: str | None, owner: str) -> str:
    if request.session_id is not None and request.model_seq_id is not None:
        return str(ModelId(request.session_id, request.model_seq_id))
    if key is None:
        return str(ModelId(str(uuid.uuid4()), 0))
    digest = hashlib.sha256(f"copy_weights\0{owner}\0{key}".encode()).digest()
    return str(ModelId(str(uuid.UUID(bytes=digest[:16], version=4)), 0))


def _manifest(
    source: CheckpointManifest, target: CheckpointPath, owner: str, ttl_seconds: int | None
) -> CheckpointManifest:
    moment = now()
    return source.model_copy(
        update={
            "tinker_path": str(target),
            "owner": owner,
            "created_at": moment,
            "expires_at": moment + timedelta(seconds=ttl_seconds) if ttl_seconds else None,
            "copied_from": str(source),
            "data_prefix": f"copy-{uuid.uuid4().hex}",
        }
    )
