"""Owners as an administrator sees them: their limits of rights, keys and last use."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinkercloud_api.catalog.projects import change_rights
from tinkercloud_api.catalog.statements import Statements
from tinkercloud_api.catalog.tables import ApiKey, ProjectMember, User, now


@dataclass(frozen=True, slots=True)
class UserSummary:
    """An owner, who has keys, an entry of its own, or a membership."""

    name: str
    role: str | None
    """What its keys may do at most; None means what each key may."""
    created_at: datetime | None
    disabled_at: datetime | None
    is_linked: bool
    """Whether an OpenID account logs in as this owner."""
    keys: int
    """Number of keys that are neither revoked nor expired."""
    last_used_at: datetime | None
    projects: int


class UserStatements(Statements):
    """A part of the catalog's queries, as `catalog.store` for everything else."""

    async def user(self, name: str) -> User | None:
        """Return the entry of an owner; None if it has none of its own."""
        return await self._one(select(User).where(User.name == name))

    async def add_user(self, name: str, role: str | None) -> User | None:
        """Add an entry for an owner; None if it has one."""
        async with self._writing() as db:
            await change_rights(db)
            if await db.get(User, name) is not None:
                return None
            row = User(name=name, role=role)
            db.add(row)
        return row

    async def set_user_role(self, name: str, role: str | None) -> bool:
        """Set what keys of an owner may do at most; return whether the owner is known."""
        return await self._change_user(name, role=role)

    async def set_disabled(self, name: str, disabled_at: datetime | None) -> bool:
        """Refuse all keys of an owner, or (None) no longer; return whether the owner is known."""
        return await self._change_user(name, disabled_at=disabled_at)

    async def users(self) -> Sequence[UserSummary]:
        """Return all owners that have a key, an entry of their own or a project, by name."""
        moment = now()
        is_valid = ApiKey.revoked_at.is_(None) & or_(
            ApiKey.expires_at.is_(None), ApiKey.expires_at > moment
        )
        keys = select(
            ApiKey.owner, func.sum(case((is_valid, 1), else_=0)), func.max(ApiKey.last_used_at)
        ).group_by(ApiKey.owner)
        counts = select(ProjectMember.owner, func.count()).group_by(ProjectMember.owner)
        async with self._reading() as db:
            entries = {row.name: row for row in (await db.scalars(select(User))).all()}
            of_keys = {owner: (int(n), used) for owner, n, used in await db.execute(keys)}
            of_projects = {row[0]: int(row[1]) for row in await db.execute(counts)}
        found = []
        for name in sorted({*entries, *of_keys, *of_projects}):
            row, (valid, used) = entries.get(name), of_keys.get(name, (0, None))
            found.append(
                UserSummary(
                    name=name,
                    role=row.role if row is not None else None,
                    created_at=row.created_at if row is not None else None,
                    disabled_at=row.disabled_at if row is not None else None,
                    is_linked=row is not None and row.subject is not None,
                    keys=valid,
                    last_used_at=used,
                    projects=of_projects.get(name, 0),
                )
            )
        return found

    async def keys_of(self, owner: str) -> Sequence[ApiKey]:
        """Return all keys of an owner, oldest first."""
        return await self._all(select(ApiKey).where(ApiKey.owner == owner).order_by(ApiKey.id))

    async def _change_user(self, name: str, **values: object) -> bool:
        async with self._writing() as db:
            await change_rights(db)
            if not await _is_known(db, name):
                return False
            row = await db.get(User, name)
            if row is None:
                db.add(User(name=name, **values))
            else:
                await db.execute(update(User).where(User.name == name).values(**values))
        return True


async def _is_known(db: AsyncSession, name: str) -> bool:
    queries = (
        select(User.name).where(User.name == name),
        select(ApiKey.owner).where(ApiKey.owner == name),
        select(ProjectMember.owner).where(ProjectMember.owner == name),
    )
    return any([await db.scalar(query.limit(1)) is not None for query in queries])
