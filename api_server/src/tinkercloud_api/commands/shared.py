"""What the groups of `tinkercloud` commands share: options, requests to a server, and output."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import aiohttp
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tinkercloud_api.config import state_folder
from tinkercloud_api.config.settings import InvalidSettingsError, Settings, load_settings

DEFAULT_URL = "http://127.0.0.1:8000"
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
_FOLDED_WIDTH = 40
"""Minimum width, in characters, of a table's last column, which may wrap."""


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    console = Console(stderr=True, emoji=False, highlight=False)
    console.print(f"[red]error:[/red] {escape(message)}")
    raise typer.Exit(1)


def read_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - any field of Settings
    """Return the settings, or exit with an error that names the invalid one."""
    try:
        return load_settings(**overrides)
    except InvalidSettingsError as error:
        fail(f"settings: {error}")


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows as a table of some columns, or as JSON with all fields."""
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
    running = state_folder.running_server(read_settings(state_dir=state_dir).state_dir)
    return (running.url if running is not None else DEFAULT_URL).rstrip("/")


def request(
    method: str,
    base_url: str | None,
    api_key: str,
    path: str,
    body: object = None,
) -> Any:  # noqa: ANN401 - any JSON
    """Send a request to a path under /api/v1 and return the response, or exit with its error.

    Args:
        method: HTTP method.
        base_url: URL of the server; None means the running server of this machine.
        api_key: the caller's key.
        path: path without /api/v1/.
        body: a JSON value; a `Path` means the content of that file; None means no body.
    """
    url = server_url(base_url)
    return asyncio.run(_request(method, url, f"{url}/api/v1/{path}", api_key, body))


async def _request(method: str, url: str, target: str, api_key: str, body: object) -> Any:  # noqa: ANN401 - any JSON
    headers = {"X-API-Key": api_key}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=limits) as client:
            if isinstance(body, Path):
                with body.open("rb") as file:
                    return await _send(client, method, target, data=file)
            return await _send(client, method, target, json=body)
    except aiohttp.ClientError as error:
        fail(f"no server responds at {url} ({error}); start a server or set TINKER_BASE_URL")


async def _send(
    client: aiohttp.ClientSession,
    method: str,
    target: str,
    **body: Any,  # noqa: ANN401 - aiohttp's own arguments
) -> Any:  # noqa: ANN401 - any JSON
    async with client.request(method, target, **body) as response:
        try:
            content = await response.json()
        except (ValueError, aiohttp.ContentTypeError):
            content = {}
        if response.status >= 400:
            fail(f"{response.status}: {content.get('detail', response.reason)}")
        return content
