"""What the groups of `tinkercloud` commands share: options, requests to a server, and output.

This module and those of the commands load what only a running command needs when it runs: the shell
starts them at each completion.
"""

import asyncio
import csv
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tinkercloud_api.commands.common.progress import CopyProgress, copying, note_output, waiting
from tinkercloud_api.config.readable import parse_moment, printable

if TYPE_CHECKING:
    import aiohttp

    from tinkercloud_api.config.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8000"
Json = Annotated[bool, typer.Option("--json", help="Print the output as JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print the output as CSV.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Print it again every two seconds, until Ctrl-C.")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="TINKER_BASE_URL",
        help="URL of the server. Default: the running server of the default state folder, or"
        f" {DEFAULT_URL} if there is none.",
        show_default=False,
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

WATCH_SECONDS = 2.0
"""Time between what `--watch` prints."""
_FOLDED_WIDTH = 40
"""Minimum width, in characters, of a table's last column, which may wrap."""
_READ_SECONDS = 600.0
_CLEAR = "\x1b[2J\x1b[H"
"""Clears a terminal."""
_PART_BYTES = 1 << 20
_FORMULAS = ("=", "+", "-", "@")
"""Starts of cells that spreadsheets compute."""


def _moment_option(text: str) -> datetime:
    try:
        return parse_moment(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Since = Annotated[
    datetime | None,
    typer.Option(
        parser=_moment_option,
        metavar="TIME",
        help="Only from this time on, in UTC unless it has a zone.",
        show_default=False,
    ),
]
Until = Annotated[
    datetime | None,
    typer.Option(
        parser=_moment_option,
        metavar="TIME",
        help="Only before this time, in UTC unless it has a zone.",
        show_default=False,
    ),
]


class CallError(Exception):
    """A request that failed; its text says why."""


class NoAnswerError(CallError):
    """A request that a server which is away, or has too much to do, may answer later."""


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, emoji=False, highlight=False)
    # Not wrapped: it may have a command or a path to copy.
    shown = escape(printable(message, kept="\n"))
    console.print(f"[red]error:[/red] {shown}", soft_wrap=True)
    raise typer.Exit(1)


def read_settings(**overrides: Any) -> "Settings":  # noqa: ANN401 - any field of Settings
    """Return the settings, or exit with an error that names the invalid one."""
    from tinkercloud_api.config.settings import InvalidSettingsError, load_settings

    try:
        return load_settings(**overrides)
    except InvalidSettingsError as error:
        fail(f"settings: {error}")


def pip_install(*packages: str) -> str:
    """Return the command that installs packages into the environment of this program."""
    if find_spec("pip"):
        return shlex.join([sys.executable, "-m", "pip", "install", *packages])
    # uv makes environments without pip. That of a clone is not on the path.
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.prefix).parent / ".uv" / "bin")]
    uv = shutil.which("uv", path=os.pathsep.join(folders)) or "uv"
    return shlex.join([uv, "pip", "install", "-p", sys.executable, *packages])


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows as a table of some columns, or as JSON with all fields."""
    if as_json:
        typer.echo(json.dumps(list(rows), default=str))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(str(row[column])) for column in columns] for row in rows]
    widths = [max(map(cell_len, column)) + 2 for column in zip(columns, *cells, strict=True)]
    table = Table(box=None)
    for column in columns[:-1]:
        # Plain text: `:train:`, a part of ids, is also the name of an emoji.
        table.add_column(Text(column), no_wrap=True)
    table.add_column(Text(columns[-1]), overflow="fold")
    for texts in cells:
        table.add_row(*map(Text, texts))
    # Ids and paths are meant to be copied, and pipes to be read by lines: lines exceed the width of
    # the terminal rather than break one.
    longest_word = max((cell_len(word) for row in cells for word in row[-1].split()), default=0) + 2
    folded = min(widths[-1], max(_FOLDED_WIDTH, longest_word))
    needed = sum(widths[:-1]) + (folded if sys.stdout.isatty() else widths[-1])
    console = Console(width=max(Console().width, needed))
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))
    note_output()


def show_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print some columns of rows as CSV; fields that a row lacks, or that are None, are empty."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([csv_cell(row.get(column)) for column in columns])


def csv_cell(value: object) -> str:
    """Return a cell of CSV that no spreadsheet takes for a formula; empty for None.

    Others may have written it: a text such as `=1+1` gets an apostrophe, and a number stays.
    """
    text = "" if value is None else printable(str(value))
    if not text.startswith(_FORMULAS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def say_line(text: str, *, err: bool = False) -> None:
    """Print one line, whose control characters are replaced: a terminal would obey them.

    Args:
        text: the line, which may contain what others have written.
        err: whether to print it on standard error.
    """
    typer.echo(printable(text), err=err)
    note_output()


def say(sentence: str, content: object, *, as_json: bool) -> None:
    """Print the outcome of a command: a sentence, or JSON that says the same."""
    typer.echo(json.dumps(content) if as_json else printable(sentence, kept="\n"))


def confirm(question: str, *, skipped: bool) -> None:
    """Ask whether to do something, and exit if not.

    Args:
        question: what to ask.
        skipped: whether nothing is asked, for example as `--yes` was given.
    """
    if skipped:
        return
    try:
        agreed = typer.confirm(printable(question), err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo(err=True)
        fail("there is no terminal to ask in; use --yes")
    if not agreed:
        raise typer.Abort
    note_output()


def watch(draw: Callable[[], None], *, again: bool) -> None:
    """Print something once, or again and again until the user interrupts it.

    Args:
        draw: prints it.
        again: whether `--watch` was given.
    """
    try:
        draw()
        while again:
            time.sleep(WATCH_SECONDS)
            if sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            draw()
    except KeyboardInterrupt:
        raise typer.Exit from None


def server_url(base_url: str | None, state_dir: Path | None = None) -> str:
    """Return the URL of the server that a command calls, without a slash at its end.

    Args:
        base_url: the URL; None means the running server of a state folder.
        state_dir: the folder; None means that of the settings.
    """
    if base_url is not None:
        if not base_url.lower().startswith(("http://", "https://")):
            fail(
                f"--base-url or TINKER_BASE_URL: {base_url!r} is no URL; it starts with http:// or"
                f" https://, such as http://{base_url.rpartition('/')[2] or '127.0.0.1:8000'}"
            )
        return base_url.rstrip("/")
    from tinkercloud_api.config import state_folder

    running = state_folder.running_server(read_settings(state_dir=state_dir).state_dir)
    return (running.url if running is not None else DEFAULT_URL).rstrip("/")


def request(
    method: str,
    base_url: str | None,
    api_key: str,
    path: str,
    body: object = None,
) -> Any:  # noqa: ANN401 - any JSON
    """Send a request to the server and return the response, or exit with its error.

    It says on standard error what it waits for, if that takes long.

    Args:
        method: HTTP method.
        base_url: URL of the server; None means the running server of this machine.
        api_key: the caller's key.
        path: path without /api/v1/, or with a slash at its start.
        body: a JSON value; a `Path` means the content of that file; None means no body.
    """
    url = server_url(base_url)
    sending = call(method, url, api_key, path, body)
    try:
        if isinstance(body, Path):
            return asyncio.run(sending)
        with waiting(f"waiting for {method} {path.partition('?')[0]} of {url}"):
            return asyncio.run(sending)
    except CallError as error:
        fail(str(error))


async def call(
    method: str,
    url: str,
    api_key: str,
    path: str,
    body: object = None,
    *,
    patience: float = _READ_SECONDS,
) -> Any:  # noqa: ANN401 - any JSON
    """Send a request as `request` does, and return the response.

    Args:
        method: HTTP method.
        url: URL of the server.
        api_key: the caller's key.
        path: as of `request`.
        body: as of `request`.
        patience: seconds without a byte of the response until the server counts as away.

    Raises:
        NoAnswerError: no server responds, or one with status 429 or 5xx.
        CallError: the response is another error.
    """
    import aiohttp

    headers = {"X-API-Key": api_key}
    target = f"{url}{path}" if path.startswith("/") else f"{url}/api/v1/{path}"
    limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=patience)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=limits) as client:
            if isinstance(body, Path):
                size = await asyncio.to_thread(lambda: body.stat().st_size)
                length = {"Content-Length": str(size)}
                with copying("uploaded", size) as progress:
                    parts = _parts(body, progress)
                    return await _send(client, method, target, data=parts, headers=length)
            return await _send(client, method, target, json=body)
    except aiohttp.ClientError as error:
        raise NoAnswerError(
            f"no server responds at {url} ({error}); start a server or set TINKER_BASE_URL"
        ) from error


async def _parts(file: Path, progress: CopyProgress) -> AsyncIterator[bytes]:
    """Yield the content of a file, and show how much of it was sent."""
    with file.open("rb") as opened:
        while part := await asyncio.to_thread(opened.read, _PART_BYTES):
            yield part
            progress(len(part))


async def _send(
    client: "aiohttp.ClientSession",
    method: str,
    target: str,
    **body: Any,  # noqa: ANN401 - aiohttp's own arguments
) -> Any:  # noqa: ANN401 - any JSON
    import aiohttp

    async with client.request(method, target, **body) as response:
        try:
            content = await response.json()
        except (ValueError, aiohttp.ContentTypeError):
            content = {}
        if response.status >= 400:
            may_answer_later = response.status == 429 or response.status >= 500
            kind = NoAnswerError if may_answer_later else CallError
            raise kind(f"{response.status}: {_refusal(content) or response.reason}")
        return content


def _refusal(content: dict[str, Any]) -> str | None:
    """Return what an error of a server says; None if it is none of this API, or of OpenAI's."""
    error = content.get("error")
    of_openai = error.get("message") if isinstance(error, dict) else None
    said: str | None = content.get("detail", of_openai)
    return said
