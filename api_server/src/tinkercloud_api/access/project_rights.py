"""Projects: who may use, manage and fill them."""

from dataclasses import dataclass

from tinkercloud_api.access.auth import Principal, ProjectRole
from tinkercloud_api.catalog.access.project_rows import GROUP
from tinkercloud_api.catalog.schema.tables import Project, Session
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class Projects:
    """Checks what a caller may do with projects, and does it."""

    catalog: Catalog

    async def require(self, project_id: str, caller: Principal) -> Project:
        """Return a project of which the caller is a member.

        Raises:
            NotFound: it does not exist for this caller.
        """
        role = caller.project_role(project_id)
        found = await self.catalog.project(project_id) if role is not None else None
        if found is None:
            raise NotFound(
                f"project_id: project {project_id!r} does not exist, or {caller.owner!r} is not a"
                " member; `tinkercloud projects list` shows your projects"
            )
        caller.seen_projects.add(project_id)
        return found

    async def require_member(self, project_id: str, caller: Principal) -> Project:
        """Return a project in which the caller may create objects.

        Raises:
            NotFound: it does not exist for this caller.
            Forbidden: the caller is only a viewer.
        """
        found = await self.require(project_id, caller)
        if caller.project_role(project_id) is ProjectRole.VIEWER:
            raise Forbidden(
                f"project_id: {caller.owner!r} is a viewer of project {project_id!r} and may create"
                " nothing in it; ask an admin of the project for the role member"
            )
        return found

    async def require_admin(self, project_id: str, caller: Principal) -> Project:
        """Return a project that the caller manages.

        Raises:
            NotFound: it does not exist for this caller.
            Forbidden: the caller is not an admin of it.
        """
        found = await self.require(project_id, caller)
        if caller.project_role(project_id) is not ProjectRole.ADMIN:
            raise Forbidden(
                f"project_id: only an admin of project {project_id!r} may change it or its"
                f" members; {caller.owner!r} is none"
            )
        return found

    async def rename(self, project_id: str, name: str, caller: Principal) -> None:
        """Give a project another name; its id stays. This is idempotent.

        Raises:
            NotFound: the project does not exist for this caller.
            Forbidden: the caller is not an admin of it.
        """
        await self.require_admin(project_id, caller)
        await self.catalog.rename_project(project_id, name)

    async def delete(self, project_id: str, caller: Principal) -> None:
        """Delete a project without open sessions and checkpoints.

        Raises:
            NotFound: the project does not exist for this caller.
            Forbidden: the caller is not an admin of it.
            InvalidRequest: it is not empty.
        """
        await self.require_admin(project_id, caller)
        await self.catalog.delete_project(project_id)

    async def move(self, session: Session, project_id: str, caller: Principal) -> None:
        """Move a session, which the caller may change, to a project. This is idempotent.

        Only its owner, or an admin of the project that it is in, moves a session. Its owner must be
        a member of the new project, or would lose it.

        Raises:
            NotFound: the project does not exist for this caller.
            Forbidden: the caller is only a viewer of the project, or may not move the session.
            InvalidRequest: the owner of the session is not a member of the project.
        """
        await self.require_member(project_id, caller)
        if session.project == project_id:
            return
        current = session.project
        is_admin = current is not None and caller.project_role(current) is ProjectRole.ADMIN
        if session.owner != caller.owner and not is_admin and not caller.may_see(session.owner):
            raise Forbidden(
                f"session {session.id!r} belongs to {session.owner!r}: only its owner or an admin"
                f" of project {current!r} may move it"
            )
        member = (await self.catalog.memberships(session.owner)).get(project_id)
        if member is None or member == ProjectRole.VIEWER:
            raise InvalidRequest(
                f"project_id: {session.owner!r}, who owns session {session.id!r}, is not a member"
                f" of project {project_id!r} and would lose the session; add the member first"
            )
        await self.catalog.set_project(session.id, project_id)

    async def set_member(
        self, project_id: str, owner: str, role: ProjectRole, caller: Principal
    ) -> None:
        """Add an owner or a group as a member, or change its role. This is idempotent.

        Raises:
            NotFound: the project does not exist for this caller.
            Forbidden: the caller is not an admin of it.
            InvalidRequest: there would be no admin, or too many members.
        """
        await self.require_admin(project_id, caller)
        await self.catalog.set_member(project_id, owner, role)

    async def remove_member(self, project_id: str, owner: str, caller: Principal) -> None:
        """Remove a member; every member may leave. This is idempotent.

        Raises:
            NotFound: the project does not exist for this caller.
            Forbidden: the caller is not an admin of it, and the member is another one.
            InvalidRequest: there would be no admin.
        """
        if owner == caller.owner and not owner.startswith(GROUP):
            await self.require(project_id, caller)
        else:
            await self.require_admin(project_id, caller)
        await self.catalog.remove_member(project_id, owner)
