"""Rebuilds the catalog's rows of runs and checkpoints from the manifests in the checkpoint store.

This is for a catalog that was lost while the checkpoints were not. A manifest states the owner,
base model and training parameters of a checkpoint; runs and their sessions are derived from these.
Data that was only in the catalog is lost: keys, the public flag of checkpoints, expiry times
changed after saving, and the metadata of runs and sessions.

A run whose latest manifest belongs to a suspended state resumes with its client's next request. If
the run had continued after that state, the request's sequence number reveals it. All other runs are
reported as lost, with the checkpoint to resume from, because their generation matches no head.
"""

from dataclasses import dataclass, field
from datetime import datetime

from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    SuspendedManifest,
    decode_manifest,
    suspended_key,
)
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath, run_prefix

_RUNS = "runs/"
_NO_HEAD = "lost-with-the-catalog"
_UNKNOWN = "unknown"


@dataclass(slots=True)
class Rebuilt:
    """Result of a rebuild."""

    folders: int = 0
    """Folders of runs in the store."""
    runs: int = 0
    checkpoints: int = 0
    damaged: list[str] = field(default_factory=list)
    """One sentence for each item that cannot be read, with the reason."""


async def rebuild(
    catalog: Catalog, objects: ObjectStoreClient, rebuilt: Rebuilt | None = None
) -> Rebuilt:
    """Add the runs and checkpoints in a store that are missing from a catalog.

    Existing rows are kept, so a rebuild can be repeated, even while a server is running.

    Args:
        catalog: the catalog.
        objects: the store.
        rebuilt: is filled meanwhile, so that others see how far it is, and returned.

    Raises:
        Unavailable: the store or the database does not respond; repeat the call to continue.
    """
    rebuilt = Rebuilt() if rebuilt is None else rebuilt
    names = await objects.folders(_RUNS)
    rebuilt.folders = len(names)
    for run_id in names:
        try:
            model_id = ModelId.parse(run_id)
        except InvalidRequest:
            rebuilt.damaged.append(f"{_RUNS}{run_id} is not the folder of a training run")
            continue
        await _rebuild_run(model_id, catalog, objects, rebuilt)
    return rebuilt


async def has_checkpoints(objects: ObjectStoreClient) -> bool:
    """Whether a store contains checkpoints or suspended runs.

    Raises:
        Unavailable: the store does not respond.
    """
    return await objects.has_any(_RUNS)


@dataclass(slots=True)
class _Saved:
    """The checkpoints in a run's folder."""

    manifests: list[CheckpointManifest] = field(default_factory=list)
    damaged: dict[CheckpointPath, str] = field(default_factory=dict)
    """Unreadable checkpoints, with the reason."""
    others: list[str] = field(default_factory=list)
    """One sentence for each folder that is not a checkpoint."""

    def leave_out_autosaves(self) -> None:
        """Forget automatic checkpoints, which the run's head may replace and delete."""
        self.manifests = [m for m in self.manifests if not m.path.is_autosave]
        self.damaged = {p: why for p, why in self.damaged.items() if not p.is_autosave}


async def _saved(model_id: ModelId, objects: ObjectStoreClient) -> _Saved:
    saved = _Saved()
    for kind in CheckpointKind:
        for name in await objects.folders(f"{run_prefix(str(model_id))}/{kind}/"):
            try:
                path = CheckpointPath(str(model_id), kind, name)
            except InvalidRequest as error:
                saved.others.append(error.message)
                continue
            content = await objects.read(path.manifest_key)
            try:
                if content is not None:
                    saved.manifests.append(decode_manifest(CheckpointManifest, content, str(path)))
            except InvalidRequest as error:
                saved.damaged[path] = error.message
    return saved


async def _rebuild_run(
    model_id: ModelId, catalog: Catalog, objects: ObjectStoreClient, rebuilt: Rebuilt
) -> None:
    saved = await _saved(model_id, objects)
    rebuilt.damaged += [*saved.others, *saved.damaged.values()]
    suspended = await _suspended(model_id, objects, rebuilt)
    described: list[CheckpointManifest | SuspendedManifest] = [*saved.manifests]
    if suspended is not None:
        described.append(suspended)
    if not described:
        return
    await _add_run(model_id, described, catalog)
    run = await catalog.run(str(model_id))
    if run is None or run.generation != _NO_HEAD:
        saved.leave_out_autosaves()
    for manifest in saved.manifests:
        row = await catalog.checkpoint(manifest.path)
        if row is None or row.damage is not None:
            await catalog.index_checkpoint(manifest)
    for path, damage in saved.damaged.items():
        # The owner is taken from another manifest of the run.
        await catalog.record_pending_checkpoint(path, described[0].owner)
        await catalog.mark_damaged(path, damage, is_indexed=True)
    rebuilt.runs += 1
    rebuilt.checkpoints += len(saved.manifests)


async def _suspended(
    model_id: ModelId, objects: ObjectStoreClient, rebuilt: Rebuilt
) -> SuspendedManifest | None:
    content = await objects.read(suspended_key(str(model_id)))
    if content is None:
        return None
    try:
        name = f"the suspended state of training run {model_id}"
        return decode_manifest(SuspendedManifest, content, name)
    except InvalidRequest as error:
        rebuilt.damaged.append(error.message)
        return None


async def _add_run(
    model_id: ModelId, described: list[CheckpointManifest | SuspendedManifest], catalog: Catalog
) -> None:
    """Add the rows of a run and its session, as described by the run's manifests."""
    if await catalog.run(str(model_id)) is not None:
        return
    last = max(described, key=_moment)
    created, used = min(map(_moment, described)), _moment(last)
    if await catalog.session(model_id.session_id) is None:
        await catalog.add_session(
            Session(
                id=model_id.session_id,
                owner=last.owner,
                created_at=created,
                last_heartbeat_at=used,
                sdk_version=_UNKNOWN,
                tags=[],
                user_metadata={},
            )
        )
    spec = ModelSpec(owner=last.owner, lora=last.lora)
    if isinstance(last, CheckpointManifest):
        spec = spec.model_copy(update={"optimizer": last.optimizer})
    await catalog.add_run(
        TrainingRun(
            id=str(model_id),
            session_id=model_id.session_id,
            owner=last.owner,
            base_model=last.base_model,
            spec=spec.model_dump(mode="json", exclude_defaults=True),
            created_at=created,
            last_request_at=used,
            generation=last.generation if isinstance(last, SuspendedManifest) else _NO_HEAD,
        )
    )


def _moment(manifest: CheckpointManifest | SuspendedManifest) -> datetime:
    return manifest.created_at
