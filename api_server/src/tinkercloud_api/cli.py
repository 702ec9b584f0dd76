"""The `tinkercloud` command.

`serve`, `keys`, `users`, `catalog`, `backup` and `doctor` use this machine's state folder; `demo`,
`ask`, `models`, `sessions`, `checkpoints`, `programs`, `projects`, `usage` and `audit` call a
running server, local or remote (TINKER_BASE_URL, TINKER_API_KEY). `drain` and `cluster` use a
Kubernetes cluster (KUBECONFIG). `plan` needs neither.
"""

import asyncio
import json
import logging
import re
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from tinkercloud_api.access.roles import Role
from tinkercloud_api.admin.listening import PortTakenError, bind
from tinkercloud_api.commands import (
    audit_commands,
    backup_commands,
    catalog_commands,
    checkpoint_commands,
    cluster_commands,
    console_commands,
    demo_command,
    drain_command,
    model_commands,
    plan_command,
    program_commands,
    project_commands,
    run_commands,
    usage_commands,
    user_commands,
)
from tinkercloud_api.commands.common.local_catalog import (
    Change,
    StateDir,
    change_catalog,
    check_owner,
    with_catalog,
)
from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Watch,
    Yes,
    confirm,
    fail,
    read_settings,
    request,
    say,
    say_line,
    show,
    watch,
)
from tinkercloud_api.commands.runs import (
    ask_command,
    compare_command,
    export_command,
    logs_command,
    samples_command,
    top_command,
)
from tinkercloud_api.config.model_places import PlaceError, absolute
from tinkercloud_api.config.readable import age_of, binary_size, moment
from tinkercloud_api.lasting_objects import lasting_objects
from tinkercloud_api.version_line import version_line

app = typer.Typer(
    name="tinkercloud",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Manage the API keys in this machine's catalog.", no_args_is_help=True)
sessions_app = typer.Typer(help="Manage the sessions of a running server.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(catalog_commands.app, name="catalog")
app.add_typer(backup_commands.app, name="backup")
app.add_typer(model_commands.app, name="models")
app.add_typer(model_commands.pools_app, name="pools")
app.add_typer(sessions_app, name="sessions")
app.add_typer(run_commands.app, name="runs")
run_commands.app.command("export")(export_command.export_run)
run_commands.app.command("compare")(compare_command.compare_runs)
run_commands.app.command("samples")(samples_command.show_samples)
app.command("top")(top_command.show_top)
app.add_typer(program_commands.app, name="programs")
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.add_typer(user_commands.app, name="users")
app.add_typer(project_commands.app, name="projects")
app.command("demo")(demo_command.run_demo)
app.add_typer(cluster_commands.app, name="cluster")
app.command("drain")(drain_command.drain_node)
app.command("plan")(plan_command.plan_model)
app.command("ask")(ask_command.ask_model)
app.command("problems")(console_commands.list_problems)
app.command("console")(console_commands.open_console)
app.command("logs")(logs_command.show_logs)
app.command("usage")(usage_commands.show_usage)
app.add_typer(audit_commands.app, name="audit")

_OVERLAP = timedelta(days=1)
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_LIFETIME = re.compile(r"(?P<number>[1-9][0-9]{0,6})(?P<unit>[dhms])")


def _print_version(is_requested: bool) -> None:  # noqa: FBT001 - required by typer
    if is_requested:
        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def tinkercloud(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """A self-hosted implementation of the Tinker API."""


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model to serve, as NAME=SOURCE. SOURCE is a folder in Hugging Face format or a"
            " model ID, which is downloaded unless the local Hugging Face cache has it, and"
            " defaults to NAME. Can be repeated."
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name of a served model, as ALIAS=NAME. Can be repeated."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Serve the Tinker API. Session heads run as child processes or as Kubernetes pods."""
    models, aliases = {}, {}
    for entry in model or []:
        name, _, where = entry.partition("=")
        if not name:
            fail(f"--model {entry!r}: expected NAME=FOLDER or NAME")
        models[name] = where or name
        # `doctor`, and a server that is started with these settings again, may run elsewhere.
        with suppress(PlaceError):
            models[name] = absolute(models[name])
    for entry in alias or []:
        other, _, name = entry.partition("=")
        if not other or not name:
            fail(f"--alias {entry!r}: expected ALIAS=NAME, where NAME is a model to serve")
        aliases[other] = name
    settings = read_settings(
        host=host,
        port=port,
        state_dir=state_dir,
        models=models or None,
        aliases=aliases or None,
    )
    # Loading takes seconds.
    _check_address(settings.host, settings.port)
    with waiting("loading the server's program"), lasting_objects():
        from tinkercloud_api.admin.preflight import CannotServeError
        from tinkercloud_api.catalog.schema.connection import CatalogUnreachableError
        from tinkercloud_api.config import added_models, api_logs, state_folder
        from tinkercloud_api.providers.model_arguments import ModelNotFoundError
        from tinkercloud_api.serve import run_server

    api_logs.configure(settings)
    try:
        run_server.run(settings, waiting)
    except (
        PortTakenError,
        state_folder.StateFolderError,
        added_models.AddedModelsError,
        CatalogUnreachableError,
        ModelNotFoundError,
        CannotServeError,
    ) as error:
        fail(str(error))


def _check_address(host: str, port: int) -> None:
    """Exit with an error if the server could not listen on an address."""
    try:
        bind(host, port).close()
    except PortTakenError as error:
        fail(str(error))


def _lifetime(text: str | timedelta) -> timedelta:
    """Parse a lifetime in days, hours, minutes or seconds, such as `30d`."""
    if isinstance(text, timedelta):
        # typer parses defaults too.
        return text
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is not a valid lifetime; expected a number of days, hours, minutes or"
            " seconds, such as 30d, 12h, 90m or 600s"
        )
    return timedelta(**{_UNITS[found["unit"]]: int(found["number"])})


def _shown_lifetime(lifetime: timedelta) -> str:
    """Return a time as an option takes it, in the largest unit."""
    of_units = ((unit, timedelta(**{name: 1})) for unit, name in _UNITS.items())
    return next(f"{lifetime // each}{unit}" for unit, each in of_units if not lifetime % each)


@keys_app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name of the key, such as its purpose.")],
    owner: Annotated[
        str | None, typer.Option(help="Owner of everything created with the key. Default: NAME.")
    ] = None,
    role: Annotated[
        Role,
        typer.Option(
            help="Admins can also read and delete the objects of all owners; read-only keys can"
            " only list and describe their owner's."
        ),
    ] = Role.USER,
    expires: Annotated[
        timedelta | None,
        typer.Option(
            parser=_lifetime,
            metavar="LIFETIME",
            help="Time until the key expires, such as 30d or 12h. Default: never.",
            show_default=False,
        ),
    ] = None,
    state_dir: StateDir = None,
    *,
    as_json: Json = False,
) -> None:
    """Create an API key and print it. It is not shown again."""
    from tinkercloud_api.access.auth import hash_key, new_key
    from tinkercloud_api.catalog.schema.tables import now

    check_owner("NAME" if owner is None else "--owner", owner or name)
    key = new_key()
    lifetime = _shown_lifetime(expires) if expires is not None else "never"
    limits = ["--role", role, "--expires", lifetime]
    row = change_catalog(
        state_dir,
        Change("key_create", ["keys", "create", name, "--owner", owner or name, *limits]),
        lambda catalog: catalog.add_key(
            key_hash=hash_key(key),
            name=name,
            owner=owner or name,
            role=role,
            expires_at=now() + expires if expires is not None else None,
        ),
    )
    made = {"id": row.id, "key": key, "owner": row.owner, "role": row.role}
    say(key, {**made, "expires": moment(row.expires_at)}, as_json=as_json)


@keys_app.command("list")
def list_keys(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """List all API keys, without their secret values."""
    rows = [
        {
            "id": row.id,
            "name": row.name,
            "owner": row.owner,
            "role": row.role,
            "created": moment(row.created_at),
            "last used": moment(row.last_used_at),
            "expires": moment(row.expires_at),
            "revoked": moment(row.revoked_at),
        }
        for row in with_catalog(state_dir, lambda catalog: catalog.keys())
    ]
    columns = ["id", "name", "owner", "role", "created", "last used", "expires", "revoked"]
    show(rows, columns, as_json=as_json)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[int, typer.Argument(help="ID of the key, as shown by `keys list`.")],
    state_dir: StateDir = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Revoke an API key. Running servers reject it from the next request on."""
    if not yes:
        rows = with_catalog(state_dir, lambda catalog: catalog.keys())
        named = next((f" ({row.name} of {row.owner})" for row in rows if row.id == key_id), "")
        confirm(f"Revoke key {key_id}{named}?", skipped=False)
    change = Change("key_revoke", ["keys", "revoke", key_id], [f"key {key_id}"])
    if not change_catalog(state_dir, change, lambda catalog: catalog.revoke_key(key_id)):
        fail(f"key {key_id} does not exist or is already revoked; see `tinkercloud keys list`")
    say(f"revoked key {key_id}", {"id": key_id}, as_json=as_json)


@keys_app.command("rotate")
def rotate_key(
    key_id: Annotated[int, typer.Argument(help="ID of the key, as shown by `keys list`.")],
    overlap: Annotated[
        timedelta,
        typer.Option(
            parser=_lifetime,
            metavar="TIME",
            help="Time until the old key expires, such as 24h: when its clients must have the new"
            " one.",
        ),
    ] = _OVERLAP,
    state_dir: StateDir = None,
    *,
    as_json: Json = False,
) -> None:
    """Replace an API key: print a new one with its name, owner and role. It is not shown again."""
    from tinkercloud_api.access.auth import hash_key, new_key
    from tinkercloud_api.catalog.schema.tables import now

    key, ends_at = new_key(), now() + overlap
    arguments = ["keys", "rotate", key_id, "--overlap", _shown_lifetime(overlap)]
    change = Change("key_rotate", arguments, [f"key {key_id}"])
    row = change_catalog(
        state_dir,
        change,
        lambda catalog: catalog.rotate_key(key_id, hash_key(key), ends_at),
    )
    if row is None:
        fail(f"key {key_id} does not exist, has expired or is revoked; see `tinkercloud keys list`")
    # The new key has the lifetime that the old one had.
    ends = min(ends_at, row.expires_at or ends_at)
    typer.echo(f"key {key_id} ends at {moment(ends)}", err=True)
    made = {"id": row.id, "key": key, "owner": row.owner, "role": row.role}
    say(key, made, as_json=as_json)


@sessions_app.command("list")
def list_sessions(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[int, typer.Option(help="Maximum number of sessions to list.")] = 20,
    *,
    everybody: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List what you may see: also that of your projects, and for admins of all owners.",
        ),
    ] = False,
    search: Annotated[
        str, typer.Option(help="List those whose id, owner, name, project or metadata has it.")
    ] = "",
    owner: Annotated[str, typer.Option(help="List those of this owner.")] = "",
    project: Annotated[str, typer.Option(help="List those of this project.")] = "",
    status: Annotated[
        str, typer.Option(help="List those that are live, silent, ended, failed or waiting.")
    ] = "",
    as_json: Json = False,
    again: Watch = False,
) -> None:
    """List sessions, newest first, with their owners, client states and resources."""
    query = {"limit": str(limit), "access_scope": "accessible" if everybody else "owned"}
    chosen = {"search": search, "owner": owner, "project_id": project, "status": status}
    query |= {name: value for name, value in chosen.items() if value}
    path = f"session_usage?{urlencode(query)}"
    columns = [
        *("session", "owner", "project", "name", "model", "step", "tokens/min", "state", "queue"),
        *("age", "last heartbeat", "models", "memory", "why"),
    ]

    def draw() -> None:
        found = request("GET", base_url, api_key, path)["sessions"]
        rows = [{"session": s["session_id"], **s} if as_json else _session_row(s) for s in found]
        show(rows, columns, as_json=as_json)

    watch(draw, again=again)


def _session_row(session: dict[str, Any]) -> dict[str, str]:
    kept = [each["run_state"] for each in session["models"] if each["run_state"] != "ended"]
    counts = [f"{kept.count(state)} {state}" for state in dict.fromkeys(kept)]
    models = session["models"]
    more = [f"{left} more"] if (left := session.get("num_models", 0) - len(models)) > 0 else []
    steps = [str(model["step"]) for model in models if model["step"] is not None]
    waits = dict.fromkeys(model["queue_state"] for model in models)
    return {
        "session": session["session_id"],
        "owner": session["owner"],
        "project": session["project_id"] or "",
        "name": session["name"] or "",
        "model": ", ".join(dict.fromkeys(model["base_model"] for model in models)),
        "step": ", ".join(steps),
        "tokens/min": f"{sum(model['tokens_per_minute'] for model in models):.0f}",
        "queue": ", ".join(waits),
        "age": age_of(session["created_at"]),
        "state": session["state"],
        "why": "; ".join(dict.fromkeys(filter(None, map(_why, [session, *models])))),
        "last heartbeat": moment(session["last_heartbeat_at"]),
        "models": ", ".join(counts + more) or "none",
        "memory": _memory(session),
    }


def _why(of: dict[str, Any]) -> str:
    """Return why a session has ended, or why a model is lost or waits."""
    if "finish_reason" in of:
        return ": ".join(filter(None, (of["finish_reason"], of["finish_detail"])))
    return str(of["queue_reason"] or of["reason"] or "")


def _memory(of: dict[str, Any]) -> str:
    return "unknown" if of["memory_bytes"] is None else binary_size(of["memory_bytes"])


@sessions_app.command("show")
def show_session(
    session: str, api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False
) -> None:
    """Show a session: its owner, client state, training runs and samplers."""
    answer = request("GET", base_url, api_key, f"sessions/{session}")
    usage = request("GET", base_url, api_key, f"session_usage/{session}")
    if as_json:
        typer.echo(json.dumps({**answer, **usage}))
        return
    summary = _session_row(usage)
    for name in ("owner", "state", "last heartbeat", "memory"):
        say_line(f"{name}: {summary[name]}")
    rows = [
        {
            "kind": "training run",
            "id": model["model_id"],
            "state": model["run_state"],
            "memory": _memory(model),
        }
        for model in usage["models"]
    ]
    rows += [
        {"kind": "sampler", "id": sampler, "state": "", "memory": ""}
        for sampler in answer["sampler_ids"]
    ]
    show(rows, ["kind", "id", "state", "memory"], as_json=False)


@sessions_app.command("delete")
def delete_session(
    session: str,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """End a session and free its resources. Its checkpoints are kept."""
    if not yes:
        found = request("GET", base_url, api_key, f"session_usage/{session}")
        runs = sum(model["state"] != "deleted" for model in found["models"])
        named = f" ({found['name']})" if found["name"] else ""
        question = f"End session {session}{named} of {found['owner']} with its runs ({runs})?"
        confirm(question, skipped=False)
    request("DELETE", base_url, api_key, f"sessions/{session}")
    say(f"ended session {session}", {"session_id": session}, as_json=as_json)


@app.command()
def doctor(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Check whether this machine is ready to serve, and suggest fixes for problems."""
    rows: list[dict[str, str]] = []

    def progress() -> str:
        last = f", the last: {rows[-1]['check']}" if rows else ""
        return f"checking this machine (checks done: {len(rows)}{last})"

    with waiting(progress):
        import structlog

        from tinkercloud_api.admin.doctor import examine
        from tinkercloud_api.admin.machine_checks import CheckResult
        from tinkercloud_api.config.settings import InvalidSettingsError, load_settings

        # What it would log is a result of the check.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

        async def check() -> None:
            async for result in examine(load_settings(state_dir=state_dir)):
                row = result.as_row()
                rows.append(row)

        try:
            asyncio.run(check())
        except InvalidSettingsError as error:
            rows.append(CheckResult("settings", is_good=False, detail=str(error)).as_row())
    show(rows, ["check", "result", "detail"], as_json=as_json)
    if any(row["result"] == "FAILED" for row in rows):
        raise typer.Exit(1)
