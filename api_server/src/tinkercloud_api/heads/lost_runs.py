"""Messages about runs that no head has."""

from tinkercloud_api.catalog.schema.tables import EXPIRED, STORED
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_index import Checkpoints
from tinkercloud_api.checkpoints.checkpoint_rows import latest
from tinkercloud_protocol.wire.paths import CheckpointKind


async def why_deleted(catalog: Catalog, run_id: str) -> str:
    """Return why a deleted run has no model, and what remains of it."""
    row = await catalog.run(run_id)
    if row is not None and row.generation == STORED:
        return (
            f"training run {run_id} only holds a copied or imported checkpoint; create a model"
            " from it with create_training_client_from_state"
        )
    session = await catalog.session(row.session_id) if row is not None else None
    expired = session is not None and session.finish_reason == EXPIRED
    why = f" ({session.finish_detail})" if session is not None and expired else ""
    return f"training run {run_id} was deleted{why}; its checkpoints remain"


async def lost_message(checkpoints: Checkpoints, run_id: str) -> str:
    """Return how much of a run was lost with its head, and how to resume it."""
    what_remains = await remains(checkpoints, run_id)
    return (
        f"training run {run_id} is lost: its session head stopped without saving it, and"
        f" {what_remains}"
    )


async def remains(checkpoints: Checkpoints, run_id: str) -> str:
    """Return what remains of a run that can't continue, and how to resume it.

    Its latest checkpoint may be an automatic one, which is listed from now on.
    """
    await checkpoints.index.discover(run_id)
    await checkpoints.index.keep_autosaves(run_id)
    saved = latest(await checkpoints.of_run(run_id), CheckpointKind.TRAINING)
    if saved is None:
        return "it has no checkpoint, so all of its training is lost"
    return (
        "all training since its last checkpoint is lost; resume with"
        f" create_training_client_from_state_with_optimizer({saved.tinker_path!r})"
    )
