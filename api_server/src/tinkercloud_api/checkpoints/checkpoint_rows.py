"""Checkpoints as rows of the catalog, as list entries, and as paths."""

from collections.abc import Sequence
from datetime import timedelta

from tinkercloud_api.catalog.schema.tables import Checkpoint, now
from tinkercloud_protocol.responses.listings import CheckpointInfo
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_PENDING_LIMIT = timedelta(hours=6)
"""How long the manifest of a pending checkpoint is looked for."""


def name_of(row: Checkpoint) -> str:
    """Return the `tinker://` path of a checkpoint."""
    return str(path_of(row))


def path_of(row: Checkpoint) -> CheckpointPath:
    """Return the path of a checkpoint."""
    return CheckpointPath(row.run_id, CheckpointKind(row.kind), row.name)


def info(row: Checkpoint) -> CheckpointInfo:
    """Return the list entry of a checkpoint."""
    path = path_of(row)
    return CheckpointInfo(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.kind.checkpoint_type,
        time=row.created_at or row.asked_at,
        tinker_path=str(path),
        size_bytes=row.size_bytes or 0,
        public=row.is_public,
        base_model=row.base_model,
        user_metadata=row.user_metadata,
        expires_at=row.expires_at,
        damage=row.damage,
    )


def latest(infos: Sequence[CheckpointInfo], kind: CheckpointKind) -> CheckpointInfo | None:
    """Return the newest readable checkpoint of a kind."""
    of_kind = [
        entry
        for entry in infos
        if entry.checkpoint_type == kind.checkpoint_type and entry.damage is None
    ]
    return max(of_kind, key=lambda entry: entry.time, default=None)


def has_timed_out(row: Checkpoint) -> bool:
    """Whether a pending checkpoint is looked for no longer."""
    return now() - row.asked_at > _PENDING_LIMIT
