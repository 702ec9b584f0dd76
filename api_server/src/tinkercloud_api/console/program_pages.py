"""The pages about programs: progress, output, and stopping them."""

import asyncio
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from tinkercloud_api.access.browser_sessions import BrowserSession
from tinkercloud_api.access.effects import changes, declares, names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.console.curve_range import ComparedMetric, compared
from tinkercloud_api.console.pages import (
    OWN_FORM,
    Follow,
    Session,
    follow_up,
    lead_to,
    page_router,
    segment,
    show,
)
from tinkercloud_api.context import Context, Server
from tinkercloud_api.routes.sessions import program_routes, run_state_routes
from tinkercloud_protocol.wire.errors import NotFound

_PAGE = 50
"""Programs of a page."""
_LOG_BYTES = 16 << 10
"""How much of a program's output its page shows."""

router = page_router()


@router.get("/programs")
@names_no_object
async def list_programs(
    server: Server, session: Session, page: Annotated[int, Query(ge=1, le=1_000_000)] = 1
) -> Response:
    """Show the programs that the caller may see, newest first."""
    offset = (page - 1) * _PAGE
    found = await program_routes.list_programs(server, session.caller, _PAGE, offset, "accessible")
    return await show(
        "programs.html",
        session=session,
        programs=found.programs,
        page=page,
        may_have_more=len(found.programs) == _PAGE,
        twin=f"programs?access_scope=accessible&limit={_PAGE}&offset={offset}",
        command="tinkercloud programs list --all",
    )


@router.get("/programs/{program_id}")
async def show_program(
    program_id: str, server: Server, session: Session, follow: Follow = None
) -> Response:
    """Show a program, its progress and the end of its output."""
    program = await program_routes.show_program(program_id, server, session.caller)
    output = await program_routes.show_logs(program_id, server, session.caller, _LOG_BYTES)
    run_id = program_routes.trained_run(program)
    rewards = await _rewards(run_id, server, session)
    may_stop = session.caller.role is not Role.READ_ONLY and not program.phase.is_final
    answer = await show(
        "program.html",
        session=session,
        program=program,
        output=output.text,
        trained=run_id,
        rewards=rewards,
        charts=[rewards.chart] if rewards is not None and rewards.chart is not None else [],
        may_stop=may_stop,
        follow=follow,
        twin=f"programs/{segment(program_id)}",
        command=f"tinkercloud programs show {program_id}",
    )
    return follow_up(answer, follow)


async def _rewards(
    run_id: str | None, server: Context, session: BrowserSession
) -> ComparedMetric | None:
    """Return the rewards of a program's run; None without a run, and if the caller sees no such."""
    if run_id is None:
        return None
    try:
        curve = await run_state_routes.show_curve(run_id, server, session.caller)
    except NotFound:
        return None
    metrics = await asyncio.to_thread(compared, [curve])
    return next((each for each in metrics if each.name == program_routes.REWARD), None)


@router.post("/programs/{program_id}/stop", dependencies=[OWN_FORM])
@declares(changes("program_stop"))
async def stop_program(program_id: str, server: Server, session: Session) -> Response:
    """Stop a program, and show it again."""
    await program_routes.stop_program(program_id, server, session.caller)
    return lead_to(f"programs/{segment(program_id)}")
