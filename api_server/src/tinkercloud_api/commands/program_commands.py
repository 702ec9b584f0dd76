"""`tinkercloud programs`: running, listing, observing and stopping programs of a running server."""

import json
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tinkercloud_api.commands.common.progress import note_output
from tinkercloud_api.commands.common.shared import (
    WATCH_SECONDS,
    ApiKey,
    BaseUrl,
    Json,
    Watch,
    Yes,
    confirm,
    fail,
    request,
    say,
    show,
    watch,
)
from tinkercloud_api.config.readable import moment

_OVERLAP = 80
"""Characters by which two readings of the output of a program are joined."""

app = typer.Typer(help="Manage the programs of a running server.", no_args_is_help=True)


@app.command("run", context_settings={"ignore_unknown_options": True})
def run_program(
    file: Annotated[Path, typer.Argument(help="Python file to run on the server.")],
    api_key: ApiKey,
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the file, after `--`.")
    ] = None,
    *,
    base_url: BaseUrl = None,
    model: Annotated[
        str | None,
        typer.Option(help="Base model that the file is to use ($TINKERCLOUD_BASE_MODEL)."),
    ] = None,
    model_id: Annotated[
        str | None,
        typer.Option(help="Existing model that it is to train ($TINKERCLOUD_MODEL_ID)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a Python file on the server (admins only, if the server allows it)."""
    try:
        source = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: cannot be read ({error})")
    body = {
        "source": source,
        "name": file.name,
        "args": args or [],
        "base_model": model,
        "model_id": model_id,
    }
    sent = {name: value for name, value in body.items() if value is not None}
    answer = request("POST", base_url, api_key, "programs", sent)
    say(answer["program_id"], answer, as_json=as_json)


@app.command("rlve")
def run_rlve(
    model_id: Annotated[str, typer.Argument(help="Model to train.")],
    api_key: ApiKey,
    environment: Annotated[
        list[str], typer.Option("--environment", help="Environment of rlve-gym. Can be repeated.")
    ],
    *,
    config: Annotated[str, typer.Option(help="Other fields of rlve_config, as JSON.")] = "{}",
    base_url: BaseUrl = None,
    as_json: Json = False,
) -> None:
    """Train an existing model with RLVE."""
    try:
        fields = dict(json.loads(config))
    except (TypeError, ValueError) as error:
        fail(f"--config: not a JSON object ({error})")
    rlve = {"enabled": True, "environment_list": environment} | fields
    body = {"model_id": model_id, "rlve_config": rlve}
    answer = request("POST", base_url, api_key, "programs", body)
    say(answer["program_id"], answer, as_json=as_json)


@app.command("list")
def list_programs(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[int, typer.Option(help="Maximum number of programs to list.")] = 20,
    *,
    everybody: Annotated[
        bool, typer.Option("--all", help="List the programs of all owners (admins only).")
    ] = False,
    as_json: Json = False,
    again: Watch = False,
) -> None:
    """List programs, newest first, with their phase and progress."""
    scope = "accessible" if everybody else "owned"
    path = f"programs?limit={limit}&access_scope={scope}"
    columns = ["program", "name", "owner", "phase", "restarts", "step", "reward", "difficulty"]

    def draw() -> None:
        found = request("GET", base_url, api_key, path)["programs"]
        show(found if as_json else list(map(_row, found)), columns, as_json=as_json)

    watch(draw, again=again)


def _row(program: dict[str, Any]) -> dict[str, str]:
    progress = program["progress"]
    step, total = progress.get("step"), progress.get("total_steps")
    reward = progress.get("reward")
    environments = progress.get("environments") or {}
    return {
        "program": program["program_id"],
        "name": program["name"],
        "owner": program["owner"],
        "phase": program["phase"],
        "restarts": str(program["restarts"]),
        "step": "" if step is None else str(step) if total is None else f"{step}/{total}",
        "reward": "" if reward is None else f"{reward:.3f}",
        "difficulty": ", ".join(f"{name} {e['difficulty']}" for name, e in environments.items()),
    }


@app.command("show")
def show_program(
    program: str,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
    again: Watch = False,
) -> None:
    """Show everything about a program, as JSON; --json prints it on one line."""

    def draw() -> None:
        answer = request("GET", base_url, api_key, f"programs/{program}")
        say(json.dumps(answer, indent=2), answer, as_json=as_json)

    watch(draw, again=again)


@app.command("rewards")
def show_rewards(
    program: str,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
    again: Watch = False,
) -> None:
    """Show the reward of each step of a program, which are logged for the run that it trains."""

    def draw() -> None:
        found = request("GET", base_url, api_key, f"programs/{program}")
        run = found["progress"].get("model_id") or found["model_id"]
        if run is None:
            fail(f"program {program} has not named the run that it trains, so no reward is kept")
        curve = request("GET", base_url, api_key, f"runs/{quote(run, safe=':')}/curve")
        rewards = curve["logged"].get("reward", [])
        rows = [
            {**each, "reward": f"{each['value']:.5g}", "time": moment(each["time"])}
            for each in rewards
        ]
        show(rewards if as_json else rows, ["step", "reward", "time"], as_json=as_json)

    watch(draw, again=again)


@app.command("logs")
def show_logs(
    program: str,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print more until the program ends, or Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the newest output of a program."""
    path = f"programs/{program}/logs"
    if not follow:
        answer = request("GET", base_url, api_key, path)
        typer.echo(json.dumps(answer) if as_json else answer["text"], nl=as_json)
        return
    if as_json:
        raise typer.BadParameter("not together with --json", param_hint="--follow")
    seen, is_over = "", False
    try:
        while not is_over:
            # Asked before its output is read, which then is all of a program that has ended.
            phase = request("GET", base_url, api_key, f"programs/{program}")["phase"]
            is_over = phase not in {"Pending", "Running"}
            newest = request("GET", base_url, api_key, path)["text"]
            typer.echo(added_output(seen, newest), nl=False)
            note_output()
            seen = newest
            time.sleep(0.0 if is_over else WATCH_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit from None


def added_output(seen: str, newest: str) -> str:
    """Return what the output of a program has after what was seen of it.

    Args:
        seen: the end of the output at an earlier time.
        newest: its end now, which is returned as a whole if it begins later than `seen` ends.
    """
    # A character that the limit of the server has cut is replaced.
    newest = newest.removeprefix("\ufffd")
    sought = newest[: min(_OVERLAP, len(seen))]
    start = seen.find(sought)
    while start >= 0:
        if newest.startswith(rest := seen[start:]):
            return newest.removeprefix(rest)
        start = seen.find(sought, start + 1)
    return newest


@app.command("stop")
def stop_program(
    program: str,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Stop a program. Its checkpoints are kept."""
    if not yes:
        found = request("GET", base_url, api_key, f"programs/{program}")
        confirm(f"Stop program {program} ({found['name']} of {found['owner']})?", skipped=False)
    answer = request("POST", base_url, api_key, f"programs/{program}/stop")
    say(f"{answer['program_id']}: {answer['phase']}", answer, as_json=as_json)
