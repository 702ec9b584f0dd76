"""`tinkercloud console`: a link that opens the console in a browser."""

from typing import Annotated
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.common.shared import ApiKey, BaseUrl, Json, request, say, server_url


def open_console(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    run: Annotated[str | None, typer.Option(help="Open the page of this run.")] = None,
    browser: Annotated[
        bool, typer.Option("--open", help="Open the link in the browser of this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print a link that opens the console once, within ten minutes, with the rights of the key."""
    link = request("POST", base_url, api_key, "auth/console")["path"]
    page = "" if run is None else f"&{urlencode({'run': run})}"
    url = server_url(base_url) + link + page
    say(url, {"url": url}, as_json=as_json)
    if browser:
        typer.launch(url)
