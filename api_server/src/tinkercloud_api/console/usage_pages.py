"""The page about usage and its cost."""

from datetime import date, timedelta
from typing import Annotated, Literal

from fastapi import Query
from fastapi.responses import Response

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.console.pages import Session, page_router, show
from tinkercloud_api.context import Server
from tinkercloud_api.routes.account import usage_routes

_SCOPE: Literal["accessible"] = "accessible"
_ROWS = 200
"""Rows of a table: a thousand take 0.2 s to write."""

router = page_router()


@router.get("/usage")
@names_no_object
async def show_usage(
    server: Server, session: Session, month: Annotated[str | None, Query(max_length=7)] = None
) -> Response:
    """Show the usage of a month by project and by day, and the size of checkpoints.

    Args:
        server: the server.
        session: the session of the browser.
        month: year and month (UTC), such as 2026-11; None for this one.
    """
    chosen = month or f"{now():%Y-%m}"
    caller, scope = session.caller, _SCOPE
    of_month = await usage_routes.show_month(server, caller, chosen, access_scope=scope)
    of_days = await usage_routes.show_month(server, caller, chosen, "day", access_scope=scope)
    found = await usage_routes.show_usage(
        server, caller, limit=_ROWS + 1, offset=0, access_scope=scope
    )
    first = date.fromisoformat(f"{chosen}-01")
    return await show(
        "usage.html",
        session=session,
        of_month=of_month,
        of_days=of_days,
        rows=_ROWS,
        has_prices=bool(server.settings.prices.models),
        months=[f"{each:%Y-%m}" for each in (first - timedelta(1), first + timedelta(31))],
        is_current=f"{now():%Y-%m}" <= chosen,
        storage=found.storage,
        twin=f"usage/month?month={chosen}&access_scope=accessible",
        command=f"tinkercloud usage --month {chosen} --all",
    )
