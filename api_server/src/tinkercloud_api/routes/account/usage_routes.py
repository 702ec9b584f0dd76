"""What owners have used, and what their checkpoints occupy (not an SDK call)."""

import asyncio
import re
from calendar import monthrange
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.usage.usage_ledger import Grouping, UsageQuery, UsageTotal
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.runs.month_bill import COST_DECIMALS, MonthGrouping, bill
from tinkercloud_protocol.heads.reports.usage_reports import hour_after, hour_of, start_of
from tinkercloud_protocol.responses.listings import MonthUsage, OwnerStorage, OwnerUsage, UsageList
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound

router = APIRouter(prefix="/api/v1", tags=["usage"])

_MONTH = re.compile(r"2[0-9]{3}-(0[1-9]|1[0-2])")


@router.get("/usage")
@names_no_object
async def show_usage(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    by: Grouping = "model",
    owner: str | None = None,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> UsageList:
    """List what was used, the latest first: in each hour or day (UTC), or by model, project or key.

    `since` and `until` select whole hours: those that end after `since` and start before `until`.
    """
    whose = _whose(caller, owner, access_scope)
    query = UsageQuery(
        by,
        whose,
        since=hour_of(since) if since is not None else None,
        until=hour_after(until) if until is not None else None,
    )
    page = Page(offset, limit)
    totals = await server.usage.totals(query, page)
    storage = await server.checkpoints.storage(whose, page)
    return UsageList(
        usage=[_describe(total) for total in totals],
        storage=[
            OwnerStorage(owner=s.owner, checkpoints=s.checkpoints, size_bytes=s.size_bytes)
            for s in storage
        ],
        quota=await server.quotas.of(whose) if whose is not None else None,
    )


@router.get("/usage/month")
@names_no_object
async def show_month(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    month: str,
    by: MonthGrouping = "project",
    owner: str | None = None,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> MonthUsage:
    """Sum up what was used in a month (UTC), such as 2026-11, and what it costs.

    Rows are by owner, base model, and project, key or day; days are the latest first. Storage has
    no key, and is in rows of its own by key.
    """
    if _MONTH.fullmatch(month) is None:
        raise InvalidRequest(f"month: got {month[:20]!r}; expected year and month, as in 2026-11")
    whose = _whose(caller, owner, access_scope)
    first = date.fromisoformat(f"{month}-01")
    days = monthrange(first.year, first.month)[1]
    start = datetime.combine(first, time(), UTC)
    since, until = hour_of(start), hour_of(start + timedelta(days=days))
    query = UsageQuery(by, whose, since=since, until=until)
    used = await server.usage.totals(query)
    stored = await server.billing.stored(whose, since // 24, until // 24, by_day=by == "day")
    # There may be a row for each owner and day: other requests do not wait for them.
    rows = await asyncio.to_thread(bill, used, stored, days, server.settings.prices, by)
    return MonthUsage(
        month=month,
        currency=server.settings.prices.currency,
        usage=list(rows),
        total=round(sum(row.cost or 0.0 for row in rows), COST_DECIMALS),
    )


def _whose(caller: Principal, owner: str | None, access_scope: str) -> str | None:
    """Return whose usage a caller sees; None means everybody's.

    Raises:
        NotFound: it names another owner, and may not see that owner's objects.
    """
    if owner is None:
        return caller.owner_filter(access_scope)
    if not caller.may_see(owner):
        raise NotFound(f"owner: usage of {owner!r} does not exist, or belongs to another owner")
    return owner


def _describe(total: UsageTotal) -> OwnerUsage:
    return OwnerUsage.model_validate(
        {
            "owner": total.owner,
            "base_model": total.base_model,
            "model_id": total.model_id or None,
            "project_id": total.project_id,
            "key_id": total.key_id,
            "key_name": total.key_name,
            "starts_at": start_of(total.first_hour),
            "ends_at": start_of(total.end_hour),
            **total.amounts,
        }
    )
