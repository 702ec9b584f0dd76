"""The audit log, as `AdminClient.get_audit_log` reads it: of an owner, or of all for admins."""

import json
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.access.audit_log import AuditQuery
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.responses.account_listings import AuditAnswer, AuditEvent
from tinkercloud_protocol.wire.exact_json import SURROGATE

router = APIRouter(prefix="/api/v1", tags=["audit"])

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PREFIXES = {
    "all": "",
    "checkpoints": "checkpoint_",
    "projects": "project_",
    "teams": "team_",
    "organizations": "organization_",
}
"""Events of each type that the SDK knows; there are no teams and organizations here."""


@router.get("/audit")
@names_no_object
async def show_audit(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
) -> AuditAnswer:
    """List the requests of a day (UTC; default: today) that changed something, earliest first.

    With `since` or `until`, those between the two instead. Admins see those of all owners.
    """
    # Databases and time zones have limits that clients could exceed.
    last = now() + timedelta(days=1)
    if day is not None or (since is None and until is None):
        since = datetime.combine(min(day or now().date(), last.date()), time(), UTC)
        until = since + timedelta(days=1)
    query = AuditQuery(
        owner=caller.owner_filter("accessible"),
        since=min(max(since or _EPOCH, _EPOCH), last),
        until=min(max(until or last, _EPOCH), last),
        event_prefix=_PREFIXES[event_type],
    )
    rows = await server.auditing.entries.entries(query, Page(offset, limit))
    return AuditAnswer(
        entries=[
            AuditEvent(
                timestamp=row.entry.at,
                event=row.entry.event,
                event_details=_encodable(
                    {
                        **row.entry.details,
                        **row.outcome,
                        "owner": row.entry.owner,
                        "key_id": row.entry.key_id,
                        "number": row.entry.id,
                        "hash": row.entry.hash,
                    }
                ),
            )
            for row in rows
        ]
    )


def _encodable(details: dict[str, Any]) -> dict[str, Any]:
    """Return details whose texts UTF-8 can encode: arguments of commands may be no text."""
    text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(details, ensure_ascii=False))
    encodable: dict[str, Any] = json.loads(text)
    return encodable
