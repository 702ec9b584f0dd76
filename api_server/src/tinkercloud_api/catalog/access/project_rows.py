"""Projects, their members, and the version of access rights.

Every change of rights increases one number, in the same transaction. A server that reads the number
before each request therefore knows whether what it remembers of rights is current.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tinkercloud_api.catalog.access.version_file import VersionFile
from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import (
    AccessVersion,
    Checkpoint,
    Project,
    ProjectMember,
    Session,
    TrainingRun,
    Upload,
    UserGroup,
    now,
)
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound

ADMIN = "admin"
"""The role of members who manage a project, of which every project has at least one owner."""
GROUP = "group:"
"""How members begin that are groups of OpenID accounts, and not owners."""
_BY_RIGHTS = ("viewer", "member", ADMIN)
MAX_PROJECTS = 1000
"""Maximum number of projects of one owner."""
MAX_MEMBERS = 1000
"""Maximum number of members of one project."""
_VERSION = "access"
_CURRENT = select(AccessVersion.number).where(AccessVersion.name == _VERSION)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has a claim on an object: its project, or without one its owner."""

    owner: str
    project: str | None


class ProjectStatements(Statements):
    """A part of the catalog's queries, as `catalog.store` for everything else."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self._version_file = VersionFile(engine.url, _CURRENT)

    async def close(self) -> None:
        """Close all connections."""
        self._version_file.close()
        await super().close()

    def access_version_at_once(self) -> int | None:
        """Return the number that `access_version` returns, without waiting; None if it must."""
        return self._version_file.read()

    async def access_version(self) -> int:
        """Return the number that grows with every change of rights."""
        async with self._connected() as connection:
            return await connection.scalar(_CURRENT) or 0

    async def add_project(self, project_id: str | None, name: str, owner: str) -> Project:
        """Create a project whose only member is its owner, as its administrator.

        Args:
            project_id: id of the project; None generates one.
            name: its name.
            owner: who creates it. The same request again returns the same project.

        Raises:
            InvalidRequest: the id is taken, or used as a label by sessions, or the owner has too
                many projects.
        """
        async with self._writing() as db:
            await change_rights(db)
            if project_id is not None:
                known = await db.get(Project, project_id)
                if known is not None and (known.name, known.created_by) == (name, owner):
                    return known
                is_label = select(Session.id).where(Session.project_id == project_id).limit(1)
                if known is not None or await db.scalar(is_label) is not None:
                    raise InvalidRequest(
                        f"project_id: {project_id!r} is already used; choose another"
                    )
            own = select(func.count()).where(ProjectMember.owner == owner)
            if (await db.scalar(own) or 0) >= MAX_PROJECTS:
                raise InvalidRequest(
                    f"{owner!r} is a member of {MAX_PROJECTS} projects, which is the maximum"
                )
            project = Project(
                id=project_id or f"proj-{secrets.token_hex(8)}", name=name, created_by=owner
            )
            db.add(project)
            await db.flush()
            db.add(ProjectMember(project_id=project.id, owner=owner, role=ADMIN))
        return project

    async def rename_project(self, project_id: str, name: str) -> None:
        """Give a project another name. This is idempotent."""
        await self._change(update(Project).where(Project.id == project_id).values(name=name))

    async def delete_project(self, project_id: str) -> None:
        """Delete a project that holds nothing any more. This is idempotent.

        Its ended sessions belong to their owners alone from now on. They keep its id, which bills
        name, and which no other project gets therefore.

        Raises:
            InvalidRequest: it contains sessions that have not ended, or checkpoints.
        """
        async with self._writing() as db:
            await change_rights(db)
            # What adds a session has locked the row (`keep_project`), or will not find it.
            row = select(Project).where(Project.id == project_id).with_for_update()
            if (project := await db.scalar(row)) is None:
                return
            if held := await _content(db, project_id):
                raise InvalidRequest(
                    f"project_id: project {project_id!r} is not empty: it contains"
                    f" {' and '.join(held)}; end the sessions and delete the checkpoints, or move"
                    " them to another project, and then delete it"
                )
            await db.execute(delete(ProjectMember).where(ProjectMember.project_id == project_id))
            await db.delete(project)

    async def project(self, project_id: str) -> Project | None:
        """Return a project."""
        return await self._one(select(Project).where(Project.id == project_id))

    async def projects(self, owner: str | None, page: Page) -> Sequence[Project]:
        """Return the projects of a member, newest first; None means all projects."""
        query = select(Project).order_by(Project.created_at.desc(), Project.id)
        if owner is not None:
            own = select(ProjectMember.project_id).where(_is_member(owner))
            query = query.where(Project.id.in_(own))
        return await self._all(query.offset(page.offset).limit(page.limit))

    async def members(self, project_id: str) -> Sequence[ProjectMember]:
        """Return the members of a project, by name."""
        query = select(ProjectMember).where(ProjectMember.project_id == project_id)
        return await self._all(query.order_by(ProjectMember.owner))

    async def memberships(self, owner: str) -> Mapping[str, str]:
        """Return the projects of an owner, with its role, or that of a group with more rights."""
        rows = await self._all(select(ProjectMember).where(_is_member(owner)))
        ranked = sorted(rows, key=lambda row: _BY_RIGHTS.index(row.role))
        return {row.project_id: row.role for row in ranked}

    async def set_member(self, project_id: str, owner: str, role: str) -> None:
        """Add a member, or change its role. This is idempotent.

        Raises:
            NotFound: the project does not exist any more.
            InvalidRequest: there would be no administrator, or too many members.
        """
        async with self._writing() as db:
            await change_rights(db)
            await keep_project(db, project_id)
            members = await _locked_members(db, project_id)
            _check_administrated(members, owner, role)
            if (row := members.get(owner)) is not None:
                row.role = role
                return
            if len(members) >= MAX_MEMBERS:
                raise InvalidRequest(
                    f"project {project_id!r} has {MAX_MEMBERS} members, which is the maximum"
                )
            db.add(ProjectMember(project_id=project_id, owner=owner, role=role))

    async def remove_member(self, project_id: str, owner: str) -> None:
        """Remove a member; its next request finds no object of the project. This is idempotent.

        Raises:
            InvalidRequest: there would be no administrator.
        """
        async with self._writing() as db:
            await change_rights(db)
            members = await _locked_members(db, project_id)
            _check_administrated(members, owner, None)
            if (row := members.get(owner)) is not None:
                await db.delete(row)

    async def set_project(self, session_id: str, project_id: str) -> None:
        """Move a session, and with it its runs, samplers and checkpoints, to a project.

        Raises:
            NotFound: the project does not exist any more.
        """
        moved = update(Session).where(
            Session.id == session_id, Session.project_id.is_distinct_from(project_id)
        )
        async with self._writing() as db:
            await change_rights(db)
            await keep_project(db, project_id)
            await db.execute(moved.values(project_id=project_id))

    async def project_of_session(self, session_id: str) -> str | None:
        """Return the project of a session; None if it has none, or does not exist."""
        async with self._reading() as db:
            return await db.scalar(select(Session.project).where(Session.id == session_id))

    async def claim(self, manifest: CheckpointManifest) -> Claim:
        """Return who has a claim on a checkpoint, whose run may have no row."""
        query = select(TrainingRun.project).where(TrainingRun.id == manifest.path.run_id)
        async with self._reading() as db:
            return Claim(manifest.owner, await db.scalar(query))


def _is_member(owner: str) -> ColumnElement[bool]:
    """Return the condition for members that an owner is, alone or with a group."""
    groups = select(UserGroup.member).where(UserGroup.owner == owner, UserGroup.ends_at > now())
    is_group = ProjectMember.owner.in_(groups)
    # A key of an owner with the name of a group has none of its rights.
    return is_group if owner.startswith(GROUP) else or_(ProjectMember.owner == owner, is_group)


async def change_rights(db: AsyncSession) -> None:
    """Increase the version of rights. Until the transaction ends, no other one changes rights."""
    number = update(AccessVersion).where(AccessVersion.name == _VERSION)
    await db.execute(number.values(number=AccessVersion.number + 1))


async def keep_project(db: AsyncSession, project_id: str) -> None:
    """Check that a project exists, and keep it until a transaction that has written ends.

    Raises:
        NotFound: it does not exist any more.
    """
    row = select(Project.id).where(Project.id == project_id)
    if await db.scalar(row.with_for_update(read=True, key_share=True)) is None:
        raise NotFound(f"project_id: project {project_id!r} does not exist any more")


async def _content(db: AsyncSession, project_id: str) -> list[str]:
    """Describe what a project contains, apart from what has ended."""
    checkpoint = Checkpoint.run_id + "/" + Checkpoint.kind + "/" + Checkpoint.name
    lasts = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now())
    is_unfinished = and_(Upload.is_finished.is_(False), Upload.expires_at > now())
    held = {
        "sessions that have not ended": select(func.count(), func.min(Session.id)).where(
            Session.project_id == project_id, Session.finished_at.is_(None)
        ),
        # Those that are still being saved, or whose manifest has not been read yet, count as well.
        "checkpoints": select(func.count(), func.min("tinker://" + checkpoint)).where(
            Checkpoint.project == project_id, lasts
        ),
        "unfinished uploads or copies": select(func.count(), func.min(Upload.id)).where(
            Upload.project_id == project_id, is_unfinished
        ),
    }
    found = []
    for what, query in held.items():
        number, example = (await db.execute(query)).one()
        if number:
            found.append(f"{what} ({number}, such as {example})")
    return found


async def _locked_members(db: AsyncSession, project_id: str) -> dict[str, ProjectMember]:
    query = select(ProjectMember).where(ProjectMember.project_id == project_id)
    return {row.owner: row for row in (await db.scalars(query)).all()}


def _check_administrated(
    members: Mapping[str, ProjectMember], owner: str, role: str | None
) -> None:
    """Check that a project keeps an administrator if a member gets a role, or is removed.

    A group counts as none, because nobody may be in it.

    Raises:
        InvalidRequest: it does not.
    """
    others = [row for name, row in members.items() if name != owner and not name.startswith(GROUP)]
    is_left = any(row.role == ADMIN for row in others)
    is_admin = owner in members and members[owner].role == ADMIN
    if is_admin and role != ADMIN and not is_left:
        raise InvalidRequest(
            f"{owner!r} is the only admin of the project; make another member admin first"
        )
