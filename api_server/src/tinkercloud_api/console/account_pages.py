"""The pages about the caller's own key and limits, and about projects and their members."""

from fastapi.responses import Response

from tinkercloud_api.access.auth import ProjectRole
from tinkercloud_api.access.effects import changes, declares, names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.console.pages import (
    Sent,
    Session,
    check_confirmed,
    lead_to,
    page_router,
    read,
    segment,
    show,
)
from tinkercloud_api.context import Server
from tinkercloud_api.routes.account import key_routes, project_routes
from tinkercloud_api.web.session_cookie import forget_session
from tinkercloud_protocol.wire.json_model import Name, WireModel

_PROJECTS = 1000
"""Projects of a page."""

router = page_router()


class _Member(project_routes.SetMember):
    """The fields of the form for a member."""

    owner: Name


class _FormerMember(WireModel):
    """The fields of the form that removes a member."""

    owner: Name


@router.get("/account")
@names_no_object
async def show_account(server: Server, session: Session) -> Response:
    """Show the key of the session, and the limits of its owner."""
    caller = session.caller
    return await show(
        "account.html",
        session=session,
        key=await key_routes.show_key(server, caller),
        may_revoke=caller.role is not Role.READ_ONLY,
        is_admin=caller.role is Role.ADMIN,
        quota=await server.quotas.of(caller.owner),
        twin="auth/apikey/me",
        command="tinkercloud usage",
    )


@router.post("/account/revoke")
@declares(changes("key_revoke"))
async def revoke_key(sent: Sent, server: Server, session: Session) -> Response:
    """Revoke the key of the session, which ends with it."""
    check_confirmed(sent)
    await key_routes.revoke_key(server, session.caller)
    answer = lead_to("login")
    forget_session(answer)
    return answer


@router.get("/projects")
@names_no_object
async def list_projects(server: Server, session: Session) -> Response:
    """Show the projects that the caller may see, newest first."""
    found = await project_routes.list_projects(server, session.caller, _PROJECTS, 0, "accessible")
    return await show(
        "projects.html",
        session=session,
        projects=found.projects,
        most=_PROJECTS,
        may_create=session.caller.role is not Role.READ_ONLY,
        twin=f"projects?access_scope=accessible&limit={_PROJECTS}",
        command="tinkercloud projects list --all",
    )


@router.post("/projects")
@declares(changes("project_create"))
async def create_project(sent: Sent, server: Server, session: Session) -> Response:
    """Create a project, and show it."""
    wanted = read(project_routes.CreateProject, sent)
    made = await project_routes.create_project(wanted, server, session.caller)
    return _to_project(made.project_id)


@router.get("/projects/{project_id}")
async def show_project(project_id: str, server: Server, session: Session) -> Response:
    """Show a project and its members."""
    caller = session.caller
    project = await project_routes.show_project(project_id, server, caller)
    is_admin = caller.project_role(project_id) is ProjectRole.ADMIN
    return await show(
        "project.html",
        session=session,
        project=project,
        may_manage=is_admin and caller.role is not Role.READ_ONLY,
        may_leave=project.role is not None and caller.role is not Role.READ_ONLY,
        roles=list(ProjectRole),
        twin=f"projects/{segment(project_id)}",
        command=f"tinkercloud projects show {project_id}",
    )


@router.post("/projects/{project_id}/rename")
@declares(changes("project_rename"))
async def rename_project(project_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Give a project another name, and show it again."""
    wanted = read(project_routes.RenameProject, sent)
    await project_routes.rename_project(project_id, wanted, server, session.caller)
    return _to_project(project_id)


@router.post("/projects/{project_id}/delete")
@declares(changes("project_delete"))
async def delete_project(project_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Delete a project that is empty, and show the others."""
    check_confirmed(sent)
    await project_routes.delete_project(project_id, server, session.caller)
    return lead_to("projects")


@router.post("/projects/{project_id}/members")
@declares(changes("project_grant_set"))
async def set_member(project_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Add a member to a project, or change its role, and show the project again."""
    wanted = read(_Member, sent)
    await project_routes.set_member(project_id, wanted.owner, wanted, server, session.caller)
    return _to_project(project_id)


@router.post("/projects/{project_id}/members/remove")
@declares(changes("project_grant_remove"))
async def remove_member(project_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Remove a member from a project, and show the project again unless the caller has left it."""
    owner = read(_FormerMember, sent).owner
    await project_routes.remove_member(project_id, owner, server, session.caller)
    return lead_to("projects") if owner == session.caller.owner else _to_project(project_id)


def _to_project(project_id: str) -> Response:
    return lead_to(f"projects/{segment(project_id)}")
