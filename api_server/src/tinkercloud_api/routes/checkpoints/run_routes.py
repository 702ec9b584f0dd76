"""Training runs and their checkpoints: list, show, delete, publish and expire."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import changes, declares, names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.checkpoints.checkpoint_rows import latest
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.responses.listings import (
    CheckpointInfo,
    CheckpointList,
    Cursor,
    TrainingRunInfo,
    TrainingRunList,
)
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.json_model import TtlSeconds, WireModel
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

router = APIRouter(prefix="/api/v1", tags=["training runs"])

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=1 << 63)]
Scope = Literal["owned", "accessible"]


class Ttl(WireModel):
    """PUT .../ttl."""

    ttl_seconds: TtlSeconds | None


@router.get("/training_runs")
async def list_runs(
    server: Server,
    caller: Caller,
    *,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> TrainingRunList:
    """List training runs, newest first, optionally of one project."""
    if project_id is not None:
        await server.projects.require(project_id, caller)
    visible = caller.visible(access_scope)
    rows, total = await server.catalog.runs(visible, Page(offset, limit), project_id)
    checkpoints = await server.checkpoints.of_runs([row.id for row in rows])
    infos = [_run_info(row, checkpoints[row.id]) for row in rows]
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return TrainingRunList(training_runs=infos, cursor=cursor)


@router.get("/training_runs/{run_id}")
async def show_run(run_id: str, server: Server, caller: Caller) -> TrainingRunInfo:
    """Return one training run; of another owner's run, only if a checkpoint is public."""
    found = await server.catalog.run(run_id)
    try:
        row = caller.require(found, f"training run {run_id!r}")
    except NotFound:
        public = [each for each in await server.checkpoints.of_run(run_id) if each.public]
        if found is None or not public:
            raise
        return _run_info(found, public)
    await server.checkpoints.index.discover(run_id)
    return _run_info(row, await server.checkpoints.of_run(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, server: Server, caller: Caller) -> CheckpointList:
    """List all checkpoints of a run, oldest first."""
    await _visible_run(run_id, server, caller)
    await server.checkpoints.index.discover(run_id)
    return CheckpointList(checkpoints=await server.checkpoints.of_run(run_id))


@router.get("/checkpoints")
@names_no_object
async def list_checkpoints(
    server: Server,
    caller: Caller,
    limit: Limit = 100,
    offset: Offset = 0,
    access_scope: Scope = "owned",
) -> CheckpointList:
    """List checkpoints of all runs, newest first."""
    visible = caller.visible(access_scope)
    infos, total = await server.checkpoints.page(visible, Page(offset, limit))
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return CheckpointList(checkpoints=infos, cursor=cursor)


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
@declares(changes("checkpoint_unpublish"))
async def unpublish(
    run_id: str, checkpoint_id: str, server: Server, caller: Caller
) -> dict[str, str]:
    """Make a checkpoint readable only by its owner."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    await server.checkpoints.publish(path, caller, is_public=False)
    return {}


@router.post("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish")
@declares(changes("checkpoint_publish"))
async def publish(
    run_id: str, checkpoint_id: str, server: Server, caller: Caller
) -> dict[str, str]:
    """Make a checkpoint readable by everybody with an API key."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    await server.checkpoints.publish(path, caller, is_public=True)
    return {}


@router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl")
@declares(changes("checkpoint_ttl_set"))
async def set_ttl(
    run_id: str, checkpoint_id: str, request: Ttl, server: Server, caller: Caller
) -> dict[str, str]:
    """Set when a checkpoint expires; null means never."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    await server.checkpoints.set_ttl(path, caller, request.ttl_seconds)
    return {}


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}")
@declares(changes("checkpoint_delete"))
async def delete_checkpoint(
    run_id: str, checkpoint_id: str, server: Server, caller: Caller
) -> dict[str, str]:
    """Delete a checkpoint."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    await server.checkpoints.delete(path, caller)
    return {}


async def _visible_run(run_id: str, server: Context, caller: Principal) -> TrainingRun:
    return caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")


def _run_info(row: TrainingRun, checkpoints: list[CheckpointInfo]) -> TrainingRunInfo:
    spec = ModelSpec.model_validate(row.spec)
    return TrainingRunInfo(
        training_run_id=row.id,
        base_model=row.base_model,
        model_owner=row.owner,
        is_lora=spec.lora is not None,
        lora_rank=spec.lora.rank if spec.lora else None,
        last_request_time=row.last_request_at,
        last_checkpoint=latest(checkpoints, CheckpointKind.TRAINING),
        last_sampler_checkpoint=latest(checkpoints, CheckpointKind.SAMPLER),
        user_metadata=row.user_metadata,
    )
