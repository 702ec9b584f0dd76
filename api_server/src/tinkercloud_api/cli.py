"""The `tinkercloud` command.

`serve`, `keys`, `users`, `catalog`, `backup` and `doctor` use this machine's state folder; `demo`,
`models`, `sessions`, `checkpoints`, `programs`, `projects`, `usage` and `audit` call a running
server, local or remote (TINKER_BASE_URL, TINKER_API_KEY). `drain` and `cluster` use a Kubernetes
cluster (KUBECONFIG). `plan` needs neither.
"""

import asyncio
import json
import re
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Console

from tinkercloud_api.access.auth import Role, hash_key, new_key
from tinkercloud_api.catalog.schema.connection import CatalogUnreachableError
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.commands import (
    audit_commands,
    backup_commands,
    catalog_commands,
    checkpoint_commands,
    cluster_commands,
    demo_command,
    drain_command,
    program_commands,
    project_commands,
    usage_commands,
    user_commands,
)
from tinkercloud_api.commands.local_catalog import (
    Change,
    StateDir,
    change_catalog,
    moment_of,
    with_catalog,
)
from tinkercloud_api.commands.shared import (
    ApiKey,
    BaseUrl,
    Json,
    fail,
    read_settings,
    request,
    show,
)
from tinkercloud_api.config import api_logs, state_folder
from tinkercloud_api.config.settings import InvalidSettingsError, load_settings
from tinkercloud_api.version_line import version_line

app = typer.Typer(
    name="tinkercloud",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Manage the API keys in this machine's catalog.", no_args_is_help=True)
models_app = typer.Typer(help="Inspect the base models of a running server.", no_args_is_help=True)
sessions_app = typer.Typer(help="Manage the sessions of a running server.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(catalog_commands.app, name="catalog")
app.add_typer(backup_commands.app, name="backup")
app.add_typer(models_app, name="models")
app.add_typer(sessions_app, name="sessions")
app.add_typer(program_commands.app, name="programs")
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.add_typer(user_commands.app, name="users")
app.add_typer(project_commands.app, name="projects")
app.command("demo")(demo_command.run_demo)
app.add_typer(cluster_commands.app, name="cluster")
app.command("drain")(drain_command.drain_node)
app.command("usage")(usage_commands.show_usage)
app.command("audit")(audit_commands.show_audit)

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
    # The server takes a second to load, which other commands need not.
    from tinkercloud_api.admin.preflight import CannotServeError  # noqa: PLC0415
    from tinkercloud_api.providers.model_arguments import ModelNotFoundError  # noqa: PLC0415
    from tinkercloud_api.serve import run_server  # noqa: PLC0415

    api_logs.configure(settings)
    try:
        run_server.run(settings)
    except (
        run_server.PortTakenError,
        state_folder.StateFolderError,
        CatalogUnreachableError,
        ModelNotFoundError,
        CannotServeError,
    ) as error:
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
    key = new_key()
    limits = ["--role", role, "--expires", expires or "never"]
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
    if as_json:
        made = {"id": row.id, "key": key, "owner": row.owner, "role": row.role}
        typer.echo(json.dumps({**made, "expires": moment_of(row.expires_at)}))
    else:
        typer.echo(key)


@keys_app.command("list")
def list_keys(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """List all API keys, without their secret values."""
    rows = [
        {
            "id": row.id,
            "name": row.name,
            "owner": row.owner,
            "role": row.role,
            "created": moment_of(row.created_at),
            "last used": moment_of(row.last_used_at),
            "expires": moment_of(row.expires_at),
            "revoked": moment_of(row.revoked_at),
        }
        for row in with_catalog(state_dir, lambda catalog: catalog.keys())
    ]
    columns = ["id", "name", "owner", "role", "created", "last used", "expires", "revoked"]
    show(rows, columns, as_json=as_json)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[int, typer.Argument(help="ID of the key, as shown by `keys list`.")],
    state_dir: StateDir = None,
) -> None:
    """Revoke an API key. Running servers reject it from the next request on."""
    change = Change("key_revoke", ["keys", "revoke", key_id])
    if not change_catalog(state_dir, change, lambda catalog: catalog.revoke_key(key_id)):
        fail(f"key {key_id} does not exist or is already revoked; see `tinkercloud keys list`")


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
    key, ends_at = new_key(), now() + overlap
    change = Change("key_rotate", ["keys", "rotate", key_id, "--overlap", overlap])
    row = change_catalog(
        state_dir,
        change,
        lambda catalog: catalog.rotate_key(key_id, hash_key(key), ends_at),
    )
    if row is None:
        fail(f"key {key_id} does not exist, has expired or is revoked; see `tinkercloud keys list`")
    if as_json:
        typer.echo(json.dumps({"id": row.id, "key": key, "owner": row.owner, "role": row.role}))
    else:
        typer.echo(key)


@models_app.command("list")
def list_models(api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False) -> None:
    """List the served base models."""
    answer = request("GET", base_url, api_key, "get_server_capabilities")
    columns = ["model_name", "max_context_length", "trainable", "sampleable"]
    show(answer["supported_models"], columns, as_json=as_json)


@sessions_app.command("list")
def list_sessions(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[int, typer.Option(help="Maximum number of sessions to list.")] = 20,
    *,
    everybody: Annotated[
        bool, typer.Option("--all", help="List the sessions of all owners (admins only).")
    ] = False,
    as_json: Json = False,
) -> None:
    """List sessions, newest first, with their owners, client states and resources."""
    scope = "accessible" if everybody else "owned"
    answer = request("GET", base_url, api_key, f"session_usage?limit={limit}&access_scope={scope}")
    if as_json:
        typer.echo(json.dumps([{"session": s["session_id"], **s} for s in answer["sessions"]]))
        return
    columns = ["session", "owner", "state", "last heartbeat", "models", "memory"]
    show([_session_row(session) for session in answer["sessions"]], columns, as_json=False)


def _session_row(session: dict[str, Any]) -> dict[str, str]:
    kept = [model["state"] for model in session["models"] if model["state"] != "deleted"]
    counts = [f"{kept.count(state)} {state}" for state in dict.fromkeys(kept)]
    return {
        "session": session["session_id"],
        "owner": session["owner"],
        "state": session["state"],
        "last heartbeat": _readable(session["last_heartbeat_at"]),
        "models": ", ".join(counts) or "none",
        "memory": _megabytes(session["memory_bytes"]),
    }


def _readable(text: str) -> str:
    return datetime.fromisoformat(text).isoformat(sep=" ", timespec="seconds")


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


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
        typer.echo(f"{name}: {summary[name]}")
    rows = [
        {
            "kind": "training run",
            "id": model["model_id"],
            "state": model["state"],
            "memory": _megabytes(model["memory_bytes"]),
        }
        for model in usage["models"]
    ]
    rows += [
        {"kind": "sampler", "id": sampler, "state": "", "memory": ""}
        for sampler in answer["sampler_ids"]
    ]
    show(rows, ["kind", "id", "state", "memory"], as_json=False)


@sessions_app.command("delete")
def delete_session(session: str, api_key: ApiKey, base_url: BaseUrl = None) -> None:
    """End a session and free its resources. Its checkpoints are kept."""
    request("DELETE", base_url, api_key, f"sessions/{session}")


@app.command("plan")
def plan_model(
    model: Annotated[
        str, typer.Argument(help="Folder in Hugging Face format, or model ID on the Hub.")
    ],
    gpus: Annotated[
        str, typer.Option(help="Number and type of GPUs, such as 8xH100, 4xA100-40 or 2x48GiB.")
    ],
    gpus_per_node: Annotated[int, typer.Option(help="Number of GPUs per node.")] = 8,
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Maximum sequence length, in tokens. Default: the model's, up to 32768."),
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=1, max=1024, help="Maximum LoRA rank.")] = 32,
    *,
    pool_slots: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Runs that share a cluster of a pool. 1: no pool."),
    ] = 1,
    full: Annotated[
        bool, typer.Option("--full", help="Plan full fine-tuning instead of LoRA.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Plan how to train and sample a model on GPUs. --json prints a BaseModel manifest."""
    from tinkercloud_api.admin import plan_files  # noqa: PLC0415

    try:
        plan = plan_files.plan(
            model,
            gpus,
            gpus_per_node=gpus_per_node,
            sequence_length=sequence_length,
            lora_rank=None if full else lora_rank,
            pool_slots=pool_slots,
        )
        manifest = plan_files.base_model(plan, model) if as_json else None
    except plan_files.CannotPlan as error:
        fail(str(error))
    if manifest is not None:
        typer.echo(json.dumps(manifest, indent=2))
        return
    for part in plan_files.report(plan):
        Console(emoji=False).print(part, highlight=False)


@app.command()
def doctor(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Check whether this machine is ready to serve, and suggest fixes for problems."""
    from tinkercloud_api.admin.doctor import CheckResult, examine  # noqa: PLC0415 - as above

    try:
        results = asyncio.run(examine(load_settings(state_dir=state_dir)))
    except InvalidSettingsError as error:
        results = [CheckResult("settings", is_good=False, detail=str(error))]
    rows = [result.as_row() for result in results]
    show(rows, ["check", "result", "detail"], as_json=as_json)
    if any(not result.is_good for result in results):
        raise typer.Exit(1)
