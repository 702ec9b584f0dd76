"""`tinkercloud console` and `tinkercloud problems`: a link for browsers; what needs attention."""

from typing import Annotated
from urllib.parse import urlencode

import typer

from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Watch,
    request,
    say,
    server_url,
    show,
    watch,
)
from tinkercloud_api.config.readable import moment

_COLUMNS = ["since", "what", "owner", "reason", "remedy"]


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


def list_problems(
    api_key: ApiKey, base_url: BaseUrl = None, *, again: Watch = False, as_json: Json = False
) -> None:
    """List what needs attention and what to do, the newest first.

    Failing stores, models, sessions and programs; disks and quotas that are full; runs that are
    lost, stuck or wait.
    """

    def draw() -> None:
        found = request("GET", base_url, api_key, "problems")["problems"]
        if not found and not as_json:
            typer.echo("There is no problem.")
            return
        rows = [
            {
                **each,
                "since": moment(each["since"]),
                "what": f"{each['kind']} {each['subject']}",
                "owner": each["owner"] or "",
            }
            for each in found
        ]
        show(found if as_json else rows, _COLUMNS, as_json=as_json)

    watch(draw, again=again)
