"""`tinkercloud usage`: what the owners of a running server have used."""

import csv
import json
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from itertools import count
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Since,
    Until,
    csv_cell,
    fail,
    request,
    say_line,
    show,
)
from tinkercloud_api.config.readable import binary_size, moment


class By(StrEnum):
    """What each row sums up."""

    HOUR = "hour"
    DAY = "day"
    MODEL = "model"
    PROJECT = "project"
    KEY = "key"


_GROUPED: dict[object, tuple[str, ...]] = {
    By.MODEL: ("model_id",),
    By.PROJECT: ("project_id",),
    By.KEY: ("key_id", "key_name"),
}
"""Columns of CSV that rows have only if they sum up nothing else: a day is of all projects."""
_STRING_OR_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+e[-+]?[0-9]+')
_PAGE = 1000
"""Rows of a request with --csv, which are all in the end."""
_AMOUNTS = {
    "trained": "trained_tokens",
    "forward": "forward_tokens",
    "prefill": "prefill_tokens",
    "cached": "cached_tokens",
    "sampled": "sampled_tokens",
}


_OF_MONTH = (
    *("base_model", "train_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"),
    *("engine_seconds", "storage_gib_months", "cost"),
)
_MONTH_GROUPS: dict[By, tuple[str, ...]] = {
    By.PROJECT: ("owner", "project_id"),
    By.KEY: ("owner", "key_id", "key_name"),
    By.DAY: ("day", "owner"),
}
"""Columns of what the rows of a month can sum up."""
_MONTH_COLUMNS = {
    "trained": "train_tokens",
    "prefill": "prefill_tokens",
    "cached": "cached_tokens",
    "sampled": "sampled_tokens",
    "engine s": "engine_seconds",
    "GiB-months": "storage_gib_months",
    "cost": "cost",
    "base model": "base_model",
}


def show_usage(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    by: Annotated[
        By | None, typer.Option(help="What to sum up; days are in UTC. Default: model.")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(help="List the usage of this owner (admins only).")
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", help="List the usage of all owners (admins only).")
    ] = False,
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int | None, typer.Option(help="Maximum number of rows to list. Default: 100.")
    ] = None,
    month: Annotated[
        str | None,
        typer.Option(
            metavar="YYYY-MM",
            help="Sum up this month (UTC) by owner, base model and project, or --by key or --by"
            " day, with its cost.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print all rows as CSV, without storage and limits.")
    ] = False,
) -> None:
    """List the tokens and the time of the engine that were used, the storage, and the limits."""
    if as_csv and as_json:
        fail("--csv, --json: choose one of them")
    times = {"since": since, "until": until}
    if month is not None:
        by = by or By.PROJECT
        _refuse({"by": None if by in _MONTH_GROUPS else by, **times, "limit": limit})
        scope = "accessible" if everybody else "owned"
        asked = {"month": month, "by": str(by), "access_scope": scope}
        asked |= {"owner": owner} if owner else {}
        _show_month(asked, base_url, api_key, as_json=as_json, as_csv=as_csv)
        return
    by = by or By.MODEL
    query = {"by": str(by), "limit": 100 if limit is None else limit}
    query["access_scope"] = "accessible" if everybody else "owned"
    query |= {name: moment(t) for name, t in times.items() if t is not None}
    if owner is not None:
        query["owner"] = owner
    if as_csv:
        _print_csv(base_url, api_key, query)
        return
    answer = request("GET", base_url, api_key, f"usage?{urlencode(query)}")
    if as_json:
        typer.echo(_without_exponents(json.dumps(answer)))
        return
    _print(answer, str(by) if by in _GROUPED else "from (UTC)")


def _refuse(selecting: Mapping[str, object]) -> None:
    """Exit if any option was given that a month would ignore."""
    if given := [f"--{name}" for name, value in selecting.items() if value is not None]:
        fail(
            f"--month, {', '.join(given)}: a month is listed as a whole, by owner, base model, and"
            " project, key or day; leave out one or the other"
        )


def _print(answer: dict[str, Any], what: str) -> None:
    """Print usage, storage and limits as tables.

    Args:
        answer: the answer of the server.
        what: the first column of the usage.
    """
    columns = [what, "owner", *_AMOUNTS, "engine", "base model"]
    show([_row(each, what) for each in answer["usage"]], columns, as_json=False)
    storage = [
        {"owner": s["owner"], "checkpoints": s["checkpoints"], "size": binary_size(s["size_bytes"])}
        for s in answer["storage"]
    ]
    show(storage, ["owner", "checkpoints", "size"], as_json=False)
    quota = answer.get("quota")
    if quota is not None:
        say_line(f"tenant {quota['tenant']}; waiting sessions: {quota['waiting']}")
        limits = [_limit(each) for each in quota["limits"] if each["limit"] is not None]
        show(limits, ["limit", "used", "allowed"], as_json=False)


def _row(usage: dict[str, Any], what: str) -> dict[str, str]:
    firsts = {
        "model": usage["model_id"] or "(base model)",
        "project": usage["project_id"] or "(none)",
        "key": _key(usage),
    }
    return {
        what: firsts.get(what, moment(usage["starts_at"])),
        "owner": usage["owner"],
        **{column: str(usage[name]) for column, name in _AMOUNTS.items()},
        "engine": f"{usage['engine_seconds']:.1f} s",
        "base model": usage["base_model"],
    }


def _key(usage: Mapping[str, Any]) -> str:
    return "(unknown)" if usage["key_id"] is None else f"{usage['key_id']} {usage['key_name']}"


def _limit(limit: dict[str, Any]) -> dict[str, str]:
    readable = binary_size if limit["name"].endswith("Bytes") else str
    used = "-" if limit["used"] is None else readable(limit["used"])
    return {"limit": limit["name"], "used": used, "allowed": readable(limit["limit"])}


def _print_csv(base_url: str | None, api_key: str, query: Mapping[str, object]) -> None:
    """Print all rows of a query, with the fields of the API as columns."""
    names = ["starts_at", "ends_at", "owner", "base_model", *_GROUPED.get(query["by"], ())]
    columns = [*names, *_AMOUNTS.values(), "engine_seconds"]
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    for offset in count(step=_PAGE):
        page = urlencode({**query, "limit": _PAGE, "offset": offset})
        rows = request("GET", base_url, api_key, f"usage?{page}")["usage"]
        if offset == 0:
            writer.writeheader()
        writer.writerows({name: _plain(row.get(name)) for name in columns} for row in rows)
        if len(rows) < _PAGE:
            return


def _show_month(
    query: dict[str, str], base_url: str | None, api_key: str, *, as_json: bool, as_csv: bool
) -> None:
    """Print the usage of a month.

    Args:
        query: `month`, such as 2026-11, what the rows are `by`, and whose usage.
        base_url: URL of the server; None means the running server of this machine.
        api_key: the caller's key.
        as_json: whether to print the answer of the server.
        as_csv: whether to print CSV.
    """
    answer = request("GET", base_url, api_key, f"usage/month?{urlencode(query)}")
    rows: list[dict[str, Any]] = answer["usage"]
    by = By(query["by"])
    groups = _MONTH_GROUPS[by]
    if as_json:
        typer.echo(_without_exponents(json.dumps(answer)))
    elif as_csv:
        columns = [*groups, *_OF_MONTH]
        writer = csv.writer(sys.stdout)
        writer.writerow([*columns, "currency"])
        for row in rows:
            writer.writerow([*(_plain(row[name]) for name in columns), answer["currency"]])
    else:
        texts = [
            {
                **row,
                "project": row["project_id"] or "-",
                "key": _key(row),
                **{column: _text(row[name]) for column, name in _MONTH_COLUMNS.items()},
            }
            for row in rows
        ]
        first = {By.PROJECT: ["owner", "project"], By.KEY: ["owner", "key"]}
        columns = [*first.get(by, groups), *_MONTH_COLUMNS]
        show(texts, columns, as_json=False)
        unpriced = sum(row["cost"] is None for row in rows)
        if unpriced < len(rows):
            typer.echo(f"total: {_text(answer['total'])} {answer['currency']}")
        if unpriced:
            typer.echo("-: no price in the setting `prices` of the server")


def _plain(value: object) -> str:
    """Return a cell of CSV, without an exponent: spreadsheets take `1.2e-05` for a text."""
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else csv_cell(value)


def _without_exponents(text: str) -> str:
    """Return JSON whose numbers are all decimals, such as 0.000012."""
    return _STRING_OR_EXPONENT.sub(
        lambda found: found[0] if found[0].startswith('"') else format(Decimal(found[0]), "f"), text
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        value = round(value, 4)
    return "-" if value is None else str(value)
