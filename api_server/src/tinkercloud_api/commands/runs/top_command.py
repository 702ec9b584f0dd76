"""`tinkercloud top`: the models, problems and runs of a server, on a screen that is refreshed."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
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
from tinkercloud_api.commands.run_commands import age_of, mean_text, path_of
from tinkercloud_api.config.readable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MODEL_COLUMNS = ["model", "runs", "state"]
_RUN_COLUMNS = [
    *("run", "name", "owner", "model", "state", "step", "tokens/min", "loss", "last seen"),
    "waits for",
]
_SHORTENED = {"name", "owner", "model", "waits for"}
"""Columns whose texts a narrow terminal shortens; ids are meant to be copied."""
_LEFT_OUT = {150: {"name", "model", "tokens/min", "last seen"}, 100: {"owner", "waits for"}}
"""Columns of runs that a terminal of less than some characters has no room for."""
_PATIENCE_SECONDS = 10.0
"""Time after which a server that does not respond counts as away."""

Loss = dict[str, Any]
"""A metric of a point of a curve, as GET runs/{id}/curve returns it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The responses of a server."""

    base_models: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    """Those of GET runs, with their `loss`."""

    @property
    def counts(self) -> str:
        """How many runs and problems there are, as a line."""
        return f"runs: {len(self.runs)}, problems: {len(self.problems)} (tinkercloud problems)"


class _Reader:
    """Reads the state of a server, and of each curve only what is new."""

    def __init__(self, url: str, api_key: str, limit: int) -> None:
        self._url, self._api_key, self._limit = url, api_key, limit
        self._losses: dict[str, tuple[int, Loss | None]] = {}
        """By run: the step of the last point of its curve, and the loss there."""

    def read(self) -> Seen:
        """Return the state.

        Raises:
            CallError: as `call`.
        """
        return asyncio.run(self._read())

    async def _read(self) -> Seen:
        models, problems, runs = await asyncio.gather(
            self._get("base_models"),
            self._get("problems"),
            self._get(f"runs?access_scope=accessible&limit={self._limit}"),
        )
        losses = await asyncio.gather(*map(self._loss, runs["runs"]))
        return Seen(
            models["base_models"],
            problems["problems"],
            [{**run, "loss": loss} for run, loss in zip(runs["runs"], losses, strict=True)],
        )

    async def _loss(self, run: dict[str, Any]) -> Loss | None:
        name, step = run["run_id"], run["step"]
        known_step, known = self._losses.get(name, (None, None))
        if not step or step == known_step:
            return known
        points = (await self._get(f"{path_of(name)}/curve"))["points"]
        if not points:
            return None
        loss: Loss | None = points[-1]["metrics"].get("loss")
        self._losses[name] = points[-1]["step"], loss
        return loss

    async def _get(self, path: str) -> Any:  # noqa: ANN401 - any JSON
        return await call("GET", self._url, self._api_key, path, patience=_PATIENCE_SECONDS)


def show_top(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="Maximum number of runs to show.")
    ] = 20,
    *,
    as_json: Json = False,
) -> None:
    """Show models, problems and runs on one screen, refreshed every two seconds, until Ctrl-C.

    The runs are those that you may see, the last used first. Without a terminal, they are printed
    once.
    """
    reader = _Reader(server_url(base_url), api_key, limit)
    try:
        if as_json:
            typer.echo(json.dumps(asdict(reader.read())))
        elif sys.stdout.isatty():
            _follow(reader.read)
        else:
            _print(reader.read())
    except CallError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print(seen: Seen) -> None:
    typer.echo(seen.counts)
    show(_model_rows(seen), _MODEL_COLUMNS, as_json=False)
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
                tables = _tables(read(), live.console.width)
            except NoAnswerError as error:
                first = f"trying again: {printable(str(error))}"
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            live.update(Group(Text(f"{clock}  {first}"), *tables), refresh=True)
            time.sleep(WATCH_SECONDS)


def _tables(seen: Seen, width: int) -> "list[RenderableType]":
    models = _table(_model_rows(seen), _MODEL_COLUMNS)
    omitted = {name for least, names in _LEFT_OUT.items() if width < least for name in names}
    columns = [column for column in _RUN_COLUMNS if column not in omitted]
    return [seen.counts, models, _table(_run_rows(seen), columns)]


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
