"""Searching sessions: an experimental call of SDKs from 0.36."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, AwareDatetime, Field

from tinkercloud_api.access.effects import READS, declares
from tinkercloud_api.catalog.runs.session_search import Search, Status, matching
from tinkercloud_api.catalog.schema.tables import EXPIRED, Session, now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.routes.account.session_usage import LIVE
from tinkercloud_protocol.responses.listings import (
    SessionCursor,
    SessionSummary,
    SessionSummaryList,
)
from tinkercloud_protocol.wire.json_model import (
    MAX_METADATA_ENTRIES,
    Items,
    Name,
    Storable,
    WireModel,
)

router = APIRouter(prefix="/api/v1", tags=["sessions"])


def _addressable(key: str) -> str:
    # SQLite cannot address such keys.
    if '"' in key or "\\" in key:
        raise ValueError(
            'contains the character " or \\, and sessions cannot be searched by such a key'
        )
    return key


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=128), Storable, AfterValidator(_addressable)],
        Annotated[str, Field(max_length=4096), Storable],
    ],
    Field(max_length=MAX_METADATA_ENTRIES),
]
FewNames = Annotated[Items[Name], Field(max_length=100)]


class SessionSearchOwner(WireModel):
    """Whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: FewNames = Field(default_factory=list)
    """Names of owners, if the type is `user`."""


class SearchStatus(WireModel):
    """A state of sessions."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: FewNames | None = None


class SearchCursor(WireModel):
    """Position after a page, as the previous response contains it."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Name


class SessionSearch(WireModel):
    """POST sessions/search. Absent fields match everything."""

    session_id: Name | None = None
    project_ids: FewNames | None = None
    user_metadata: Metadata = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1, max_length=256), Storable] | None = None
    owner: SessionSearchOwner = SessionSearchOwner()
    statuses: Annotated[Items[SearchStatus], Field(min_length=1, max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


@router.post("/sessions/search")
@declares(READS)
async def search_sessions(
    request: SessionSearch, server: Server, caller: Caller
) -> SessionSummaryList:
    """Search sessions, newest first."""
    live_since = now() - LIVE
    for project_id in request.project_ids or ():
        await server.projects.require(project_id, caller)
    search = Search(
        visible=caller.visible("owned" if request.owner.type == "own" else "accessible"),
        owners=request.owner.owner_urns if request.owner.type == "user" else None,
        session_id=request.session_id,
        display_name=request.display_name,
        user_metadata=request.user_metadata,
        project_ids=request.project_ids,
        statuses=[Status(type=each.type, reasons=each.reasons) for each in request.statuses or ()]
        or None,
        live_since=live_since,
        after=(request.cursor.last_created_at, request.cursor.last_session_id)
        if request.cursor
        else None,
    )
    found = await server.catalog.find_sessions(matching(search).limit(request.limit + 1))
    page = found[: request.limit]
    cursor = None
    if len(found) > len(page):
        cursor = SessionCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].id)
    counts = await _checkpoints(page, server)
    return SessionSummaryList(
        sessions=[
            SessionSummary(
                session_id=row.id,
                created_at=row.created_at,
                owner=row.owner,
                project_id=row.project_id or "",
                status=_status(row, is_live=row.last_heartbeat_at >= live_since),
                checkpoints_count=counts[row.id][0],
                checkpoint_storage_bytes=counts[row.id][1],
                display_name=row.display_name,
                user_metadata=row.user_metadata,
            )
            for row in page
        ],
        next_cursor=cursor,
    )


def _status(row: Session, *, is_live: bool) -> dict[str, object] | None:
    if row.finished_at is None:
        return {"type": "active"} if is_live else None
    if row.finish_reason == EXPIRED:
        return {"type": "cancelled", "detail": row.finish_detail}
    reason = {"type": row.finish_reason}
    return {"type": "client_finished", "reason": reason, "detail": row.finish_detail}


async def _checkpoints(sessions: list[Session], server: Context) -> dict[str, tuple[int, int]]:
    """Return the number of checkpoints of each session, and their size in bytes."""
    runs = await server.catalog.runs_of_sessions([row.id for row in sessions])
    found = await server.checkpoints.of_runs([run.id for run in runs])
    counts = {row.id: (0, 0) for row in sessions}
    for run in runs:
        number, size = counts[run.session_id]
        own = found[run.id]
        counts[run.session_id] = number + len(own), size + sum(each.size_bytes for each in own)
    return counts
