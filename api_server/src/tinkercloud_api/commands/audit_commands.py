"""`tinkercloud audit`: what changed something on a server, and whether the record is complete."""

import csv
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.common.local_catalog import (
    StateDir,
    export_audit_log,
    verify_audit_log,
)
from tinkercloud_api.commands.common.shared import (
    BaseUrl,
    Csv,
    Json,
    Since,
    Until,
    csv_cell,
    fail,
    request,
    say_line,
    show,
)
from tinkercloud_api.config.readable import moment

if TYPE_CHECKING:
    from tinkercloud_api.catalog.access.audit_chain import Mark, Verdict

app = typer.Typer(invoke_without_command=True)

_PAGE = 10_000
_COLUMNS = ("time", "owner", "key", "event", "status", "path", "objects")
_FIELDS = (
    *("number", "timestamp", "owner", "key_id", "key_name", "role", "address", "event"),
    *("status", "method", "path", "objects", "project_ids", "hash"),
)


class Of(StrEnum):
    """Which events to list."""

    ALL = "all"
    CHECKPOINTS = "checkpoints"
    PROJECTS = "projects"


@app.callback()
def show_audit(
    context: typer.Context,
    api_key: Annotated[
        str | None, typer.Option(envvar="TINKER_API_KEY", help="API key.", show_default=False)
    ] = None,
    base_url: BaseUrl = None,
    *,
    of: Annotated[Of, typer.Option(help="Which events to list.")] = Of.ALL,
    day: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Day, in UTC. Default: today.", show_default=False),
    ] = None,
    since: Since = None,
    until: Until = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in each line.")
    ] = False,
    as_csv: Csv = False,
) -> None:
    """List what changed something, by default today; admins see the changes of all owners.

    `tinkercloud audit verify` checks that no entry was changed or removed.
    """
    if context.invoked_subcommand is not None:
        return
    if api_key is None:
        raise typer.BadParameter("missing; set it or TINKER_API_KEY", param_hint="--api-key")
    if day is not None and (since is not None or until is not None):
        raise typer.BadParameter("not together with --since or --until", param_hint="--day")
    query = {"event_type": str(of), "limit": str(_PAGE)}
    if day is not None:
        query["day"] = day.date().isoformat()
    else:
        bounds = {"since": since, "until": until}
        given = {name: time for name, time in bounds.items() if time is not None}
        query |= {name: moment(time) for name, time in given.items()}
    entries = _entries(query, base_url, api_key)
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry))
    elif as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(_FIELDS)
        for entry in entries:
            writer.writerow([csv_cell(_cell(entry.get(name))) for name in _FIELDS])
    else:
        show([_row(entry) for entry in entries], _COLUMNS, as_json=False)


@app.command("export")
def export_audit(state_dir: StateDir = None) -> None:
    """Print every row of the log in the catalog of this machine, for `audit verify FILE`.

    A line is one JSON object: a request, or its outcome.
    """
    from tinkercloud_api.catalog.access.audit_export import line_of

    export_audit_log(state_dir, lambda entry: typer.echo(line_of(entry)))


@app.command("verify")
def verify_audit(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A log of `audit export`, which is checked instead of the catalog.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    state_dir: StateDir = None,
    contains: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER:HASH",
            help="An entry that the log must contain, as an earlier `audit verify` printed it.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Check that no entry was changed, inserted or removed, in this machine's catalog or in FILE.

    Keep number and hash of the newest entry elsewhere, and give them to --contains next time: that
    reveals a log that was written again.
    """
    mark = _mark(contains) if contains is not None else None
    if file is None:
        verdict = verify_audit_log(state_dir, mark)
    elif state_dir is None:
        verdict = _verify_file(file, mark)
    else:
        fail("--state-dir: not together with FILE, which is checked without a catalog")
    newest = f"{verdict.newest.number}:{verdict.newest.hash}"
    if as_json:
        found = {"entries": verdict.entries, "removed": verdict.removed, "newest": newest}
        typer.echo(json.dumps({**found, "faults": verdict.faults}))
    else:
        typer.echo(f"rows: {verdict.entries} checked, {verdict.removed} removed by retention")
        say_line(f"newest: {newest}")
        if not verdict.entries + verdict.removed:
            where = file or "this catalog; if your server uses another one, name its --state-dir"
            say_line(f"warning: no row is in {where}", err=True)
        for fault in verdict.faults:
            say_line(f"broken: {fault}", err=True)
    if verdict.faults:
        raise typer.Exit(1)


def _verify_file(file: Path, mark: "Mark | None") -> "Verdict":
    from tinkercloud_api.catalog.access.audit_export import verify_lines
    from tinkercloud_protocol.wire.errors import InvalidRequest

    try:
        with file.open(encoding="utf-8") as lines:
            return verify_lines(lines, mark)
    except (InvalidRequest, OSError, UnicodeDecodeError) as error:
        fail(f"{file}: {error}")


def _mark(text: str) -> "Mark":
    from tinkercloud_api.catalog.access.audit_chain import Mark

    number, _, digest = text.partition(":")
    if not number.isdecimal() or not digest:
        fail(f"--contains: expected NUMBER:HASH as `audit verify` prints it, got {text!r}")
    return Mark(int(number), digest)


def _entries(query: dict[str, str], base_url: str | None, api_key: str) -> Iterator[dict[str, Any]]:
    """Yield entries, the earliest first, page by page."""
    offset, is_more = 0, True
    while is_more:
        page = request("GET", base_url, api_key, f"audit?{urlencode({**query, 'offset': offset})}")
        for entry in page["entries"]:
            named = {"timestamp": entry["timestamp"], "event": entry["event"]}
            yield {**named, **entry["event_details"]}
        offset += _PAGE
        is_more = len(page["entries"]) == _PAGE


def _row(entry: dict[str, Any]) -> dict[str, str]:
    return {
        "time": moment(entry["timestamp"]),
        "owner": entry["owner"],
        "key": str(entry["key_id"] or ""),
        "event": entry["event"],
        # Logins to the console had neither up to release 0.1.
        "status": str(entry.get("status", "")),
        "path": entry.get("path", ""),
        "objects": _cell([*entry.get("objects", []), *entry.get("project_ids", [])]),
    }


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
