"""`tinkercloud users`: the owners in this machine's catalog, and what their keys may do."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinkercloud_api.access.roles import Role
from tinkercloud_api.commands.common.local_catalog import (
    Change,
    StateDir,
    change_catalog,
    check_owner,
    with_catalog,
)
from tinkercloud_api.commands.common.shared import Json, Yes, confirm, fail, say, show
from tinkercloud_api.config.readable import moment

if TYPE_CHECKING:
    from tinkercloud_api.catalog.store import Catalog

app = typer.Typer(help="Manage the owners of keys in this machine's catalog.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the owner, as shown by `users list`.")]


@app.command("list")
def list_users(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """List all owners: those with a key, a project, or an entry made by `users create`."""
    rows = [
        {
            "name": user.name,
            "role": user.role or "",
            "state": "enabled" if user.disabled_at is None else "disabled",
            "keys": user.keys,
            "projects": user.projects,
            "login": "OpenID" if user.is_linked else "",
            "last used": moment(user.last_used_at),
            "disabled": moment(user.disabled_at),
        }
        for user in with_catalog(state_dir, lambda catalog: catalog.users())
    ]
    columns = ["name", "role", "state", "keys", "projects", "login", "last used"]
    show(rows, columns, as_json=as_json)


@app.command("create")
def create_user(
    name: Annotated[str, typer.Argument(help="Name of the owner.")],
    role: Annotated[
        Role | None,
        typer.Option(
            help="What keys of the owner may do at most. Default: what each key may.",
            show_default=False,
        ),
    ] = None,
    state_dir: StateDir = None,
    *,
    as_json: Json = False,
) -> None:
    """Create an entry for an owner, without a key. An OpenID login with this name uses it."""
    check_owner("NAME", name)
    arguments = ["users", "create", name, "--role", role or "none"]
    change = Change("user_create", arguments, [f"user {name}"])
    if change_catalog(state_dir, change, lambda catalog: catalog.add_user(name, role)) is None:
        fail(f"{name!r} has an entry already; see `tinkercloud users show {name}`")
    say(f"created {name}", {"name": name, "role": role}, as_json=as_json)


@app.command("show")
def show_user(name: Name, state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Show an owner's keys, their last use, and the owner's projects."""

    async def read(catalog: "Catalog") -> dict[str, Any] | None:
        user = await catalog.user_summary(name)
        if user is None:
            return None
        keys, projects = await catalog.keys_of(name), await catalog.memberships(name)
        return {"user": user, "keys": keys, "projects": projects}

    found = with_catalog(state_dir, read)
    if found is None:
        fail(_unknown(name))
    user = found["user"]
    rows = [
        {
            "kind": "key",
            "id": key.id,
            "name": key.name,
            "role": key.role,
            "created": moment(key.created_at),
            "last used": moment(key.last_used_at),
            "ends": moment(key.revoked_at or key.expires_at),
        }
        for key in found["keys"]
    ]
    rows += [
        {
            "kind": "project",
            "id": project,
            "name": "",
            "role": role,
            "created": "",
            "last used": "",
            "ends": "",
        }
        for project, role in sorted(found["projects"].items())
    ]
    if not as_json:
        typer.echo(f"role: {user.role or 'that of each key'}")
        typer.echo(f"disabled: {moment(user.disabled_at) or 'no'}")
        typer.echo(f"OpenID login: {'yes' if user.is_linked else 'no'}")
    show(rows, ["kind", "id", "name", "role", "created", "last used", "ends"], as_json=as_json)


@app.command("set-role")
def set_role(
    name: Name,
    role: Annotated[
        str,
        typer.Argument(
            help="What keys of the owner may do at most: admin, user, read-only, or `none` for"
            " what each key may."
        ),
    ],
    state_dir: StateDir = None,
    *,
    as_json: Json = False,
) -> None:
    """Limit what all keys of an owner may do, from their next request on."""
    if role not in {*Role, "none"}:
        fail(f"role: expected one of {', '.join(Role)} or none, got {role!r}")
    limit = None if role == "none" else role
    change = Change("user_role_set", ["users", "set-role", name, role], [f"user {name}"])
    if not change_catalog(state_dir, change, lambda catalog: catalog.set_user_role(name, limit)):
        fail(_unknown(name))
    sentence = f"role of {name}: {limit or 'that of each key'}"
    say(sentence, {"name": name, "role": limit}, as_json=as_json)


@app.command("disable")
def disable_user(
    name: Name, state_dir: StateDir = None, *, yes: Yes = False, as_json: Json = False
) -> None:
    """Refuse all keys of an owner from now on, on all servers. Its runs and checkpoints stay."""
    confirm(f"Refuse all keys of {name}?", skipped=yes)
    change = Change("user_disable", ["users", "disable", name], [f"user {name}"])
    if not change_catalog(
        state_dir, change, lambda catalog: catalog.set_disabled(name, datetime.now(UTC))
    ):
        fail(_unknown(name))
    sentence = f"{name} is disabled: no server accepts its keys any more"
    say(sentence, {"name": name, "state": "disabled"}, as_json=as_json)


@app.command("enable")
def enable_user(name: Name, state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Accept the keys of a disabled owner again."""
    change = Change("user_enable", ["users", "enable", name], [f"user {name}"])
    if not change_catalog(state_dir, change, lambda catalog: catalog.set_disabled(name, None)):
        fail(_unknown(name))
    sentence = f"{name} is enabled: servers accept its keys again"
    say(sentence, {"name": name, "state": "enabled"}, as_json=as_json)


def _unknown(name: str) -> str:
    return f"no owner is named {name!r}; see `tinkercloud users list`"
