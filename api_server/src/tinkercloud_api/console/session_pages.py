"""The page about sessions: who is connected, with which runs, and what they wait for."""

from collections.abc import Mapping
from shlex import quote
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Query
from fastapi.responses import Response

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.console.pages import Session, page_router, show
from tinkercloud_api.context import Server
from tinkercloud_api.routes.account import session_usage
from tinkercloud_protocol.responses.listings import SessionStatus
from tinkercloud_protocol.wire.json_model import Storable

_PAGE = 20
"""Sessions of a page."""
_RUNS = 10
"""Runs that the page shows of a session."""
_STATUSES: Mapping[SessionStatus | Literal[""], str] = {
    "": "all",
    "live": "live: its client sends heartbeats",
    "silent": "silent: not ended, but without a heartbeat for two minutes",
    "waiting": "waiting: a run or its next request waits",
    "failed": "failed: its client has failed, or was silent for too long",
    "ended": "ended",
}
"""What each status of a search means."""

_Text = Annotated[str, Query(max_length=256), Storable]

router = page_router()


@router.get("/sessions")
@names_no_object
async def list_sessions(  # noqa: PLR0917 - query parameters
    server: Server,
    session: Session,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    search: _Text = "",
    owner: _Text = "",
    project: _Text = "",
    status: Literal[SessionStatus, ""] = "",
) -> Response:
    """Show the sessions that the caller may see, or those of a search, with their runs."""
    offset = (page - 1) * _PAGE
    found = await session_usage.list_usage(
        server,
        session.caller,
        _PAGE,
        offset,
        "accessible",
        search,
        owner,
        project,
        status or None,
    )
    wanted = {"search": search, "owner": owner, "project": project, "status": status}
    chosen = {name: value for name, value in wanted.items() if value}
    of_api = {"project_id" if name == "project" else name: chosen[name] for name in chosen}
    return await show(
        "sessions.html",
        session=session,
        sessions=found.sessions,
        total=found.total_count,
        page=page,
        **wanted,
        statuses=_STATUSES,
        most_runs=_RUNS,
        chosen=urlencode(chosen),
        pages=max(1, -(-found.total_count // _PAGE)),
        twin="session_usage?"
        + urlencode({"access_scope": "accessible", "limit": _PAGE, "offset": offset, **of_api}),
        command=" ".join(
            (
                "tinkercloud sessions list --all",
                *(f"--{each} {quote(chosen[each])}" for each in chosen),
            )
        ),
    )
