"""Keeping only the newest checkpoints of a run: which go, and deleting them."""

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import changes, declares
from tinkercloud_api.checkpoints.surplus_checkpoints import surplus_of
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_protocol.responses.listings import SurplusCheckpoints
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.paths import CheckpointPath

router = APIRouter(prefix="/api/v1", tags=["training runs"])

MAX_KEPT = 100_000
Keep = Annotated[int, Query(ge=1, le=MAX_KEPT)]


@router.get("/runs/{run_id}/surplus_checkpoints")
async def show_surplus(
    run_id: str, keep: Keep, server: Server, caller: Caller, until: AwareDatetime | None = None
) -> SurplusCheckpoints:
    """Return which checkpoints of a run go if `keep` of each kind stay, the newest ones.

    Checkpoints that were saved after `until` are neither counted nor deleted.
    """
    return await _surplus(run_id, keep, until, server, caller)


@router.delete("/runs/{run_id}/surplus_checkpoints")
@declares(changes("checkpoint_delete"))
async def delete_surplus(
    run_id: str, keep: Keep, server: Server, caller: Caller, until: AwareDatetime | None = None
) -> SurplusCheckpoints:
    """Delete the checkpoints of a run that GET returns with the same parameters.

    With the `until` of that response, none goes that it did not show, and a repeated call deletes
    no others.
    """
    found = await _surplus(run_id, keep, until, server, caller)
    for each in found.checkpoints:
        # Another call may be deleting the same ones.
        with suppress(NotFound):
            await server.checkpoints.delete(CheckpointPath.parse(each.tinker_path), caller)
    return found


async def _surplus(
    run_id: str, keep: int, until: AwareDatetime | None, server: Context, caller: Principal
) -> SurplusCheckpoints:
    caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    await server.checkpoints.index.discover(run_id)
    listed = await server.checkpoints.of_run(run_id)
    uses = await server.catalog.uses_of_checkpoints(run_id, caller.visible("accessible"))
    return surplus_of(listed, keep, until, uses)
