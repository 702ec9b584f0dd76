"""Projects and their members. The SDK names projects, but has no calls to manage them."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from tinkercloud_api.access.auth import ProjectRole
from tinkercloud_api.access.effects import changes, declares, names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Project
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.wire.json_model import Name, Storable, WireModel

router = APIRouter(prefix="/api/v1/projects", tags=["projects"])

_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_Title = Annotated[str, Field(min_length=1, max_length=256), Storable]


class CreateProject(WireModel):
    """POST projects."""

    name: _Title
    project_id: Annotated[str, Field(pattern=f"^{_ID}$")] | None = None
    """Id of the project, such as `vision-team`. Default: a generated one."""


class RenameProject(WireModel):
    """PATCH projects/{id}."""

    name: _Title


class SetMember(WireModel):
    """PUT projects/{id}/members/{owner}."""

    role: Literal["admin", "member", "viewer"]


class ProjectInfo(BaseModel):
    """A project, and what the caller may do with it."""

    project_id: str
    name: str
    created_at: datetime
    created_by: str
    role: ProjectRole | None
    """Role of the caller; None for an admin of the server who is not a member."""


class ProjectList(BaseModel):
    """Projects."""

    projects: list[ProjectInfo]


class MemberInfo(BaseModel):
    """A member of a project."""

    owner: str
    role: ProjectRole


class ProjectDetails(ProjectInfo):
    """A project with its members."""

    members: list[MemberInfo]


@router.post("")
@declares(changes("project_create"))
@names_no_object
async def create_project(request: CreateProject, server: Server, caller: Caller) -> ProjectInfo:
    """Create a project, which the caller manages. Idempotent if the request sets `project_id`."""
    row = await server.catalog.add_project(request.project_id, request.name, caller.owner)
    caller.seen_projects.add(row.id)
    return ProjectInfo(**_fields(row), role=ProjectRole.ADMIN)


@router.get("")
@names_no_object
async def list_projects(
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> ProjectList:
    """List the projects of the caller, newest first."""
    owner = caller.owner_filter(access_scope)
    rows = await server.catalog.projects(owner, Page(offset, limit))
    return ProjectList(
        projects=[ProjectInfo(**_fields(row), role=caller.projects.get(row.id)) for row in rows]
    )


@router.get("/{project_id}")
async def show_project(project_id: str, server: Server, caller: Caller) -> ProjectDetails:
    """Show a project and its members."""
    row = await server.projects.require(project_id, caller)
    members = await server.catalog.members(project_id)
    return ProjectDetails(
        **_fields(row),
        role=caller.projects.get(row.id),
        members=[MemberInfo(owner=each.owner, role=ProjectRole(each.role)) for each in members],
    )


@router.patch("/{project_id}")
@declares(changes("project_rename"))
async def rename_project(
    project_id: str, request: RenameProject, server: Server, caller: Caller
) -> dict[str, str]:
    """Give a project another name (admins of the project). Its id stays."""
    await server.projects.rename(project_id, request.name, caller)
    return {}


@router.delete("/{project_id}")
@declares(changes("project_delete"))
async def delete_project(project_id: str, server: Server, caller: Caller) -> dict[str, str]:
    """Delete a project without open sessions and checkpoints (admins of the project)."""
    await server.projects.delete(project_id, caller)
    return {}


@router.put("/{project_id}/members/{owner:path}")
@declares(changes("project_grant_set"))
async def set_member(
    project_id: str, owner: Name, request: SetMember, server: Server, caller: Caller
) -> dict[str, str]:
    """Add a member to a project, or change its role (admins of the project).

    A member is an owner, or `group:` and the name of a group of the OpenID login.
    """
    role = ProjectRole(request.role)
    await server.projects.set_member(project_id, owner, role, caller)
    caller.named_objects.add(f"{role} {owner}")
    return {}


@router.delete("/{project_id}/members/{owner:path}")
@declares(changes("project_grant_remove"))
async def remove_member(
    project_id: str, owner: Name, server: Server, caller: Caller
) -> dict[str, str]:
    """Remove a member from a project (admins of the project); every member may leave."""
    await server.projects.remove_member(project_id, owner, caller)
    caller.named_objects.add(owner)
    return {}


def _fields(row: Project) -> dict[str, object]:
    return {
        "project_id": row.id,
        "name": row.name,
        "created_at": row.created_at,
        "created_by": row.created_by,
    }
