"""What all commands of `tinkercloud` share: options, calls to a running server, and output."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import aiohttp
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tinkercloud_api import state_folder
from tinkercloud_api.settings import InvalidSettingsError, Settings, load_settings

DEFAULT_URL = "http://127.0.0.1:8000"
_FOLDED_WIDTH = 40
"""Minimum width, in characters, of a table's last column, which may wrap."""

Json = Annotated[bool, typer.Option("--json", help="Print the output as JSON.")]
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


def fail(message: str) -> NoReturn:
    """Print an error message and exit with status 1."""
    console = Console(stderr=True, emoji=False, highlight=False)
    console.print(f"[red]error:[/red] {escape(message)}")
    raise typer.Exit(1)


def settings(**overrides: Any) -> Settings:  # noqa: ANN401 - any field of Settings
    try:
        return load_settings(**overrides)
    except InvalidSettingsError as error:
        fail(f"settings: {error}")


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print a table, or JSON."""
    if as_json:
        typer.echo(json.dumps(list(rows), default=str))
        return
    cells = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) + 2 for column in zip(columns, *cells, strict=True)]
    table = Table(box=None)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for texts in cells:
        # Plain text: `:train:`, a part of ids, is also the name of an emoji.
        table.add_row(*map(Text, texts))
    # Ids are meant to be copied, so lines exceed the terminal width rather than truncate one.
    needed = sum(widths[:-1]) + min(widths[-1], _FOLDED_WIDTH)
    Console(width=max(Console().width, needed)).print(table)


def _url_of_running_server() -> str:
    server = state_folder.running_server(settings().state_dir)
    return (server.url if server is not None else None) or DEFAULT_URL


def request(method: str, base_url: str | None, api_key: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - any JSON
    """Call a running server and return its answer; exit with its message on an error."""
    url = (base_url or _url_of_running_server()).rstrip("/")

    async def run() -> Any:  # noqa: ANN401 - any JSON
        headers = {"X-API-Key": api_key}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.request(method, f"{url}/api/v1/{path}", json=body) as response,
        ):
            content = await response.json()
            if response.status >= 400:
                fail(f"{response.status}: {content['detail']}")
            return content

    try:
        return asyncio.run(run())
    except aiohttp.ClientError as error:
        fail(f"no server responds at {url} ({error}); start a server or set TINKER_BASE_URL")
