"""`tinkercloud projects`: projects of a running server, and their members."""

from enum import StrEnum
from typing import Annotated
from urllib.parse import quote

import typer

from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Yes,
    confirm,
    request,
    say,
    say_line,
    show,
)
from tinkercloud_api.config.readable import moment

app = typer.Typer(
    help="Manage the projects of a running server, and their members.", no_args_is_help=True
)

Project = Annotated[str, typer.Argument(help="Id of the project, as shown by `projects list`.")]
Owner = Annotated[
    str,
    typer.Argument(
        help="Owner of the keys of the member, or group:NAME for a group of the OpenID login."
    ),
]


class MemberRole(StrEnum):
    """What a member may do."""

    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"


@app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    project_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the project. Default: generated.", show_default=False),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Create a project and print its id, which clients use as TINKER_PROJECT_ID."""
    body = {"name": name} | ({"project_id": project_id} if project_id is not None else {})
    made = request("POST", base_url, api_key, "projects", body)
    say(made["project_id"], made, as_json=as_json)


@app.command("list")
def list_projects(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    everybody: Annotated[
        bool, typer.Option("--all", help="List all projects (admins of the server only).")
    ] = False,
    as_json: Json = False,
) -> None:
    """List your projects, newest first."""
    scope = "accessible" if everybody else "owned"
    answer = request("GET", base_url, api_key, f"projects?limit=1000&access_scope={scope}")
    rows = [
        {**each, "role": each["role"] or "", "created_at": moment(each["created_at"])}
        for each in answer["projects"]
    ]
    show(rows, ["project_id", "role", "created_by", "created_at", "name"], as_json=as_json)


@app.command("show")
def show_project(
    project: Project, api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False
) -> None:
    """List the members of a project."""
    answer = request("GET", base_url, api_key, _path(project))
    if not as_json:
        say_line(f"name: {answer['name']}")
    show(answer["members"], ["owner", "role"], as_json=as_json)


@app.command("rename")
def rename_project(
    project: Project,
    name: Annotated[str, typer.Argument(help="The new name.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
) -> None:
    """Give a project another name. Its id stays."""
    request("PATCH", base_url, api_key, _path(project), {"name": name})
    say(f"name of {project}: {name}", {"project_id": project, "name": name}, as_json=as_json)


@app.command("delete")
def delete_project(
    project: Project,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a project in which all sessions have ended and no checkpoint is left."""
    confirm(f"Delete project {project}?", skipped=yes)
    request("DELETE", base_url, api_key, _path(project))
    say(f"deleted project {project}", {"project_id": project}, as_json=as_json)


@app.command("set-member")
def set_member(
    project: Project,
    owner: Owner,
    role: MemberRole,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
) -> None:
    """Add a member, or change its role."""
    request("PUT", base_url, api_key, _member(project, owner), {"role": str(role)})
    changed = {"project_id": project, "owner": owner, "role": role}
    say(f"role of {owner} in {project}: {role}", changed, as_json=as_json)


@app.command("remove-member")
def remove_member(
    project: Project,
    owner: Owner,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a member, who loses access with its next request."""
    confirm(f"Remove {owner} from project {project}?", skipped=yes)
    request("DELETE", base_url, api_key, _member(project, owner))
    removed = {"project_id": project, "owner": owner}
    say(f"{owner} is not a member of {project}", removed, as_json=as_json)


@app.command("move")
def move_session(
    session: Annotated[str, typer.Argument(help="Id of the session.")],
    project: Project,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
) -> None:
    """Move a session, with its runs and checkpoints, to a project."""
    path = f"sessions/{quote(session, safe='')}/project"
    request("PUT", base_url, api_key, path, {"project_id": project})
    moved = {"session_id": session, "project_id": project}
    say(f"project of {session}: {project}", moved, as_json=as_json)


def _path(project: str) -> str:
    return f"projects/{quote(project, safe='')}"


def _member(project: str, owner: str) -> str:
    return f"{_path(project)}/members/{quote(owner, safe='')}"
