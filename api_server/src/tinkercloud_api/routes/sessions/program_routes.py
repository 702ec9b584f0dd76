"""Programs: running, listing, observing and stopping them, and their progress reports."""

from contextlib import suppress
from math import isfinite
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from tinkercloud_api.access.effects import WORKS, changes, declares, names_no_object
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.runs import owner_programs
from tinkercloud_protocol.programs.program_messages import (
    ProgramInfo,
    ProgramList,
    ProgramLogs,
    ProgramProgress,
    RunProgramRequest,
)
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, NotFound

router = APIRouter(prefix="/api/v1/programs", tags=["programs"])

REWARD = "reward"
"""The name of the rewards of a program among what its run has logged."""


@router.post("")
@declares(changes("program_start"))
async def run_program(request: RunProgramRequest, server: Server, caller: Caller) -> ProgramInfo:
    """Train a model with RLVE, or run a Python file or an installed module on the server."""
    if request.model_id is not None:
        await server.locator.known.authorize_run(request.model_id, caller)
        if request.rlve_config is not None:
            run = caller.require(
                await server.catalog.run(request.model_id), f"model {request.model_id!r}"
            )
            base_model = server.training_runs.served(run.base_model)
            started = await server.programs.run_rlve_on(
                request.rlve_config, run.id, base_model, caller
            )
            caller.named_objects.add(started.program_id)
            return started
    if request.base_model is not None:
        server.training_runs.served(request.base_model)
    started = await server.programs.run(request, caller)
    caller.named_objects.add(started.program_id)
    return started


@router.get("")
@names_no_object
async def list_programs(
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> ProgramList:
    """List programs, newest first."""
    owner = caller.owner_filter(access_scope)
    return ProgramList(programs=await server.programs.list(owner, offset, limit))


@router.get("/{program_id}")
async def show_program(program_id: str, server: Server, caller: Caller) -> ProgramInfo:
    """Show a program and its progress."""
    return owner_programs.describe(await server.programs.find(program_id, caller))


@router.get("/{program_id}/logs")
async def show_logs(
    program_id: str,
    server: Server,
    caller: Caller,
    max_bytes: Annotated[int, Query(ge=1, le=owner_programs.LOG_BYTES)] = owner_programs.LOG_BYTES,
) -> ProgramLogs:
    """Return the newest output of a program."""
    text = await server.programs.logs(program_id, caller, max_bytes)
    return ProgramLogs(program_id=program_id, text=text)


@router.post("/{program_id}/stop")
@declares(changes("program_stop"))
async def stop_program(program_id: str, server: Server, caller: Caller) -> ProgramInfo:
    """Stop a program."""
    return await server.programs.halt(program_id, caller)


@router.post("/{program_id}/progress")
@declares(WORKS)
async def report_progress(
    program_id: str, progress: ProgramProgress, server: Server, caller: Caller
) -> dict[str, str]:
    """Report progress; programs call this with their own key.

    The reward of a step is also logged for the run that the program trains.
    """
    program = await server.programs.report(program_id, progress, caller)
    run_id, step, reward = trained_run(program), program.progress.step, progress.reward
    if run_id is None or step is None or reward is None or not isfinite(reward):
        return {}
    # A program may name any run, and has reported its progress in any case.
    with suppress(Forbidden, InvalidRequest, NotFound):
        await server.locator.known.authorize_run(run_id, caller)
        await server.logged.log(run_id, step, {REWARD: reward}, now())
    return {}


def trained_run(program: ProgramInfo) -> str | None:
    """Return the run that a program trains now; None if it has named none."""
    return program.progress.model_id or program.model_id
