"""`tinkercloud audit`: the requests to a running server that changed something."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.shared import ApiKey, BaseUrl, Json, request, show


class Of(StrEnum):
    """Which events to list."""

    ALL = "all"
    CHECKPOINTS = "checkpoints"
    PROJECTS = "projects"


def show_audit(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    of: Annotated[Of, typer.Option(help="Which events to list.")] = Of.ALL,
    day: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Day, in UTC. Default: today.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the requests of a day that changed something; admins see those of all owners."""
    query = {"event_type": str(of)}
    if day is not None:
        query["day"] = day.date().isoformat()
    answer = request("GET", base_url, api_key, f"audit?{urlencode(query)}")
    rows = []
    for entry in answer["entries"]:
        details = entry["event_details"]
        rows.append(
            {
                "time (UTC)": entry["timestamp"][:19].replace("T", " "),
                "owner": details["owner"],
                "key": details["key_id"],
                "event": entry["event"],
                "status": details["status"],
                "path": details["path"],
                **details,
            }
        )
    columns = ["time (UTC)", "owner", "key", "event", "status", "path"]
    show(rows, columns, as_json=as_json)
