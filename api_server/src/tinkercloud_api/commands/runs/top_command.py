"""`tinkercloud top`: models, clusters, problems and runs of a server, refreshed on one screen."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinkercloud_api.commands.common.shared import (
    WATCH_SECONDS,
    ApiKey,
    BaseUrl,
    CallError,
    Json,
    NoAnswerError,
    call,
    fail,
    server_url,
    show,
)
from tinkercloud_api.commands.model_commands import cluster_row, clusters_of
from tinkercloud_api.commands.run_commands import mean_text
from tinkercloud_api.config.readable import age_of, moment, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MODEL_COLUMNS = ["model", "runs", "state"]
_CLUSTER_COLUMNS = ["cluster", "state", "slots", "memory", "free", "gpus", "gpu hours idle"]
_PROBLEM_COLUMNS = ["problem", "reason", "remedy"]
_RUN_COLUMNS = [
    *("run", "name", "owner", "model", "state", "step", "tokens/min", "loss", "last seen"),
    "waits for",
]
_SHORTENED = {"name", "owner", "model", "waits for", "problem", "reason", "remedy"}
"""Columns whose texts a narrow terminal shortens; ids are meant to be copied."""
_LEFT_OUT = {150: {"name", "model", "tokens/min", "last seen"}, 100: {"owner", "waits for"}}
"""Columns of runs that a terminal of less than some characters has no room for."""
_MOST_OF_SCREEN = 4
"""The part of the lines of a terminal, one in four, that clusters or problems take at most."""
_PATIENCE_SECONDS = 10.0
"""Time after which a server that does not respond counts as away."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The responses of a server."""

    base_models: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    """Those of GET runs."""

    @property
    def counts(self) -> str:
        """How many runs and problems there are, as a line."""
        return f"runs: {len(self.runs)}, problems: {len(self.problems)} (tinkercloud problems)"


async def _read(url: str, api_key: str, limit: int) -> Seen:
    """Return the state of a server.

    Raises:
        CallError: as `call`.
    """

    async def get(path: str) -> Any:  # noqa: ANN401 - any JSON
        return await call("GET", url, api_key, path, patience=_PATIENCE_SECONDS)

    models, problems, runs = await asyncio.gather(
        get("base_models"), get("problems"), get(f"runs?access_scope=accessible&limit={limit}")
    )
    return Seen(models["base_models"], problems["problems"], runs["runs"])


def show_top(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="Maximum number of runs to show.")
    ] = 20,
    *,
    as_json: Json = False,
) -> None:
    """Show models, clusters, problems and runs on one screen, until Ctrl-C.

    It is refreshed every two seconds. The runs are those that you may see, the last used first.
    Without a terminal, all is printed once.
    """
    url = server_url(base_url)

    def read() -> Seen:
        return asyncio.run(_read(url, api_key, limit))

    try:
        if as_json:
            typer.echo(json.dumps(asdict(read())))
        elif sys.stdout.isatty():
            _follow(read)
        else:
            _print(read())
    except CallError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print(seen: Seen) -> None:
    typer.echo(seen.counts)
    show(_model_rows(seen), _MODEL_COLUMNS, as_json=False)
    if clusters := _cluster_rows(seen):
        show(clusters, _CLUSTER_COLUMNS, as_json=False)
    if problems := _problem_rows(seen):
        show(problems, _PROBLEM_COLUMNS, as_json=False)
    show(_run_rows(seen), _RUN_COLUMNS, as_json=False)


def _follow(read: Callable[[], Seen]) -> None:
    """Refresh the screen until Ctrl-C; while the server is away, with what it returned last.

    Raises:
        CallError: the server rejects the request.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    tables: list[RenderableType] = []
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            first = ""
            try:
                tables = _tables(read(), *live.console.size)
            except NoAnswerError as error:
                first = f"trying again: {printable(str(error))}"
            clock = moment(datetime.now(UTC))
            live.update(Group(Text(f"{clock}  {first}"), *tables), refresh=True)
            time.sleep(WATCH_SECONDS)


def _tables(seen: Seen, width: int, height: int) -> "list[RenderableType]":
    omitted = {name for least, names in _LEFT_OUT.items() if width < least for name in names}
    columns = [column for column in _RUN_COLUMNS if column not in omitted]
    most = max(1, height // _MOST_OF_SCREEN)
    shown: list[RenderableType] = [seen.counts, _table(_model_rows(seen), _MODEL_COLUMNS)]
    for rows, of in (
        (_cluster_rows(seen), _CLUSTER_COLUMNS),
        (_problem_rows(seen), _PROBLEM_COLUMNS),
    ):
        if rows:
            shown.append(_table(rows[:most], of))
        if len(rows) > most:
            shown.append(f"  and {len(rows) - most} more")
    return [*shown, _table(_run_rows(seen), columns)]


def _table(rows: Sequence[dict[str, object]], columns: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    cells = [[printable(str(row[column])) for column in columns] for row in rows]
    widths = (max(map(len, texts)) for texts in zip(columns, *cells, strict=True))
    for column, width in zip(columns, widths, strict=True):
        # A table that is too wide takes the space from the columns without a minimum.
        least = None if column in _SHORTENED else width
        head = Text(column, no_wrap=True, overflow="ellipsis")
        table.add_column(head, no_wrap=least is not None, min_width=least)
    for texts in cells:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
    return table


def _model_rows(seen: Seen) -> list[dict[str, object]]:
    return [
        {"model": each["model_name"], "runs": each["runs"], "state": each["state"] or "unknown"}
        for each in seen.base_models
    ]


def _cluster_rows(seen: Seen) -> list[dict[str, object]]:
    return list(map(cluster_row, clusters_of(seen.base_models, seen.runs)))


def _problem_rows(seen: Seen) -> list[dict[str, object]]:
    return [
        {
            "problem": f"{each['kind']} {each['subject']}",
            "reason": each["reason"],
            "remedy": each["remedy"],
        }
        for each in seen.problems
    ]


def _run_rows(seen: Seen) -> list[dict[str, object]]:
    return [
        {
            "run": run["run_id"],
            "name": run["name"] or "",
            "owner": run["owner"],
            "model": run["base_model"],
            "state": run["state"],
            "step": "" if run["step"] is None else run["step"],
            "tokens/min": f"{run['tokens_per_minute']:.0f}",
            "loss": mean_text(run["loss"]),
            "last seen": f"{age_of(run['last_seen_at'])} ago",
            "waits for": _wait(run),
        }
        for run in seen.runs
    ]


def _wait(run: dict[str, Any]) -> str:
    if run["queue_state"] in {"idle", "running"}:
        return ""
    return ": ".join(filter(None, (run["queue_state"], run["queue_reason"])))
