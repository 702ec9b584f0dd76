"""The audit log, as `AdminClient.get_audit_log` reads it: of an owner, or of all for admins."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from tinkercloud_api.catalog.access.audit_log import AuditQuery
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.responses.account_listings import AuditAnswer, AuditEvent

router = APIRouter(prefix="/api/v1", tags=["audit"])

_PREFIXES = {
    "all": "",
    "checkpoints": "checkpoint_",
    "projects": "project_",
    "teams": "team_",
    "organizations": "organization_",
}
"""Events of each type that the SDK knows; there are no teams and organizations here."""


@router.get("/audit")
async def show_audit(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
) -> AuditAnswer:
    """List the requests of a day (UTC; default: today) that changed something, earliest first.

    Admins see those of all owners.
    """
    midnight = datetime.combine(day or now().date(), time(), UTC)
    query = AuditQuery(
        owner=caller.owner_filter("accessible"),
        since=midnight,
        until=midnight + timedelta(days=1),
        event_prefix=_PREFIXES[event_type],
    )
    rows = await server.auditing.entries.entries(query, Page(offset, limit))
    return AuditAnswer(
        entries=[
            AuditEvent(
                timestamp=row.at,
                event=row.event,
                event_details={**row.details, "owner": row.owner, "key_id": row.key_id},
            )
            for row in rows
        ]
    )
