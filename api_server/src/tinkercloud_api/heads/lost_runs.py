"""Messages about runs that no head has."""

from tinkercloud_api.catalog.schema.tables import EXPIRED, STORED
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.checkpoint_rows import latest
from tinkercloud_api.config.readable import moment
from tinkercloud_protocol.responses.listings import CheckpointInfo
from tinkercloud_protocol.wire.paths import CheckpointKind


async def why_deleted(catalog: Catalog, checkpoints: Checkpoints, run_id: str) -> str:
    """Return why a deleted run has no model, and what remains of it."""
    row = await catalog.run(run_id)
    if row is not None and row.generation == STORED:
        return (
            f"training run {run_id} only holds a copied or imported checkpoint; create a model"
            " from it with create_training_client_from_state"
        )
    if row is not None and row.stopped_by is not None:
        what_remains = await _how_to_continue(checkpoints, run_id)
        return (
            f"training run {run_id} was stopped by {row.stopped_by} at {moment(row.deleted_at)};"
            f" {what_remains}"
        )
    session = await catalog.session(row.session_id) if row is not None else None
    expired = session is not None and session.finish_reason == EXPIRED
    why = f" ({session.finish_detail})" if session is not None and expired else ""
    return f"training run {run_id} was deleted{why}; its checkpoints remain"


async def _how_to_continue(checkpoints: Checkpoints, run_id: str) -> str:
    saved = await _last_of(checkpoints, run_id)
    if saved is None:
        return "it has no checkpoint to continue from"
    return (
        f"to continue from its last checkpoint, {saved.tinker_path}, use `tinkercloud runs attach"
        f" {run_id}`, or create_training_client_from_state_with_optimizer"
    )


async def lost_message(checkpoints: Checkpoints, run_id: str) -> str:
    """Return how much of a run was lost with its head, and how to resume it."""
    what_remains = await remains(checkpoints, run_id)
    return (
        f"training run {run_id} is lost: its session head stopped without saving it, and"
        f" {what_remains}"
    )


async def remains(checkpoints: Checkpoints, run_id: str) -> str:
    """Return what remains of a run that can't continue, and how to resume it."""
    saved = await _last_of(checkpoints, run_id)
    if saved is None:
        return "it has no checkpoint, so all of its training is lost"
    return (
        "all training since its last checkpoint is lost; resume with"
        f" create_training_client_from_state_with_optimizer({saved.tinker_path!r})"
    )


async def _last_of(checkpoints: Checkpoints, run_id: str) -> CheckpointInfo | None:
    """Return the last checkpoint of a run that has ended.

    It may be an automatic one, which is listed from now on.
    """
    await checkpoints.index.discover(run_id)
    await checkpoints.index.keep_autosaves(run_id)
    return latest(await checkpoints.of_run(run_id), CheckpointKind.TRAINING)
