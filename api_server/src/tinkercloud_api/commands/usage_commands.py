"""`tinkercloud usage`: what the owners of a running server have used."""

import json
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.shared import ApiKey, BaseUrl, Json, request, show


class By(StrEnum):
    """What each row sums up."""

    HOUR = "hour"
    DAY = "day"
    MODEL = "model"
    PROJECT = "project"


_AMOUNTS = {
    "trained": "trained_tokens",
    "forward": "forward_tokens",
    "prefill": "prefill_tokens",
    "cached": "cached_tokens",
    "sampled": "sampled_tokens",
}


def show_usage(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    by: Annotated[By, typer.Option(help="What to sum up in each row; days are in UTC.")] = By.MODEL,
    owner: Annotated[
        str | None, typer.Option(help="List the usage of this owner (admins only).")
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", help="List the usage of all owners (admins only).")
    ] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of rows to list.")] = 100,
    as_json: Json = False,
) -> None:
    """List the tokens and the time of the engine that were used, the storage, and the limits."""
    query = {"by": str(by), "limit": limit, "access_scope": "accessible" if everybody else "owned"}
    if owner is not None:
        query["owner"] = owner
    answer = request("GET", base_url, api_key, f"usage?{urlencode(query)}")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    what = str(by) if by in {By.MODEL, By.PROJECT} else "from (UTC)"
    columns = [what, "owner", *_AMOUNTS, "engine", "base model"]
    show([_row(each, what) for each in answer["usage"]], columns, as_json=False)
    storage = [
        {"owner": s["owner"], "checkpoints": s["checkpoints"], "size": _megabytes(s["size_bytes"])}
        for s in answer["storage"]
    ]
    show(storage, ["owner", "checkpoints", "size"], as_json=False)
    quota = answer.get("quota")
    if quota is not None:
        typer.echo(f"tenant {quota['tenant']}; waiting sessions: {quota['waiting']}")
        limits = [_limit(each) for each in quota["limits"] if each["limit"] is not None]
        show(limits, ["limit", "used", "allowed"], as_json=False)


def _row(usage: dict[str, Any], what: str) -> dict[str, str]:
    firsts = {
        "model": usage["model_id"] or "(base model)",
        "project": usage["project_id"] or "(none)",
    }
    period = usage["starts_at"].removesuffix("Z").replace("T", " ")
    return {
        what: firsts.get(what, period),
        "owner": usage["owner"],
        **{column: str(usage[name]) for column, name in _AMOUNTS.items()},
        "engine": f"{usage['engine_seconds']:.1f} s",
        "base model": usage["base_model"],
    }


def _limit(limit: dict[str, Any]) -> dict[str, str]:
    used = "-" if limit["used"] is None else str(limit["used"])
    return {"limit": limit["name"], "used": used, "allowed": str(limit["limit"])}


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
