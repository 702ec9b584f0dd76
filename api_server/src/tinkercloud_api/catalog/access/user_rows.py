"""Owners as an administrator sees them: their limits of rights, keys and last use."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, or_, select, union, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinkercloud_api.catalog.access.project_rows import GROUP, change_rights
from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import ApiKey, ProjectMember, User, UserGroup, now
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest


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
    """Number of keys that servers accept: none of an owner who is disabled."""
    last_used_at: datetime | None
    projects: int


class LoginKey(StrEnum):
    """Names of the keys from logins, by what the login was for."""

    SHOWN = "login"
    """Its user saw the key."""
    CONSOLE = "console login"
    """Nobody saw the key: it opened a browser's session in the console."""


@dataclass(frozen=True, slots=True)
class Login:
    """A login of an account, and the key that it gets."""

    subject: str
    name: str
    """The owner that it names when it logs in for the first time."""
    role: str
    kept_roles: frozenset[str]
    """Keys of earlier logins with another role than these end."""
    groups: frozenset[str]
    """Names of its groups at the provider; those of the login before count no longer."""
    key_name: LoginKey
    key_hash: str
    expires_at: datetime


MAX_LOGIN_KEYS = 10
"""Valid keys of one owner under each name of `LoginKey`. The oldest ends when there is one more."""


# SQLite would ignore case in a LIKE.
_IS_OWNER = func.substr(ProjectMember.owner, 1, len(GROUP)) != GROUP
"""Whether a member is an owner, and no group."""
_NAMES = union(
    select(User.name.label("name")),
    select(ApiKey.owner),
    select(ProjectMember.owner).where(_IS_OWNER),
).subquery()
"""The names of all owners that have a key, an entry of their own or a project."""


def check_owner_name(field: str, name: str) -> None:
    """Check that a new owner would not have the name of a group.

    Args:
        field: what names the owner, for the error message.
        name: the owner.

    Raises:
        InvalidRequest: it would.
    """
    if name.startswith(GROUP):
        raise InvalidRequest(
            f"{field} {name!r}: a name with {GROUP} is that of a group of OpenID accounts, which is"
            " no owner; choose another name"
        )


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

    async def set_disabled(
        self, name: str, disabled_at: datetime | None, by: str | None = None
    ) -> bool:
        """Refuse all keys of an owner, or no longer.

        Args:
            name: the owner.
            disabled_at: since when; None means no longer.
            by: the owner who asks for it; None for a command on the server's machine.

        Returns:
            Whether the owner is known.

        Raises:
            Forbidden: the owner who asks was disabled meanwhile. Of admins who disable each other
                at once, one stays enabled.
        """
        return await self._change_user(name, by, disabled_at=disabled_at)

    async def log_in(self, login: Login) -> tuple[ApiKey, Sequence[ApiKey]]:
        """Add a key for an account, and link the account to an owner the first time.

        Returns:
            The new key, and earlier ones that it has ended.

        Raises:
            Forbidden: the owner is disabled, or belongs to another account or to nobody's.
        """
        async with self._writing() as db:
            await change_rights(db)
            owner = await _owner_of(db, login)
            row = ApiKey(
                key_hash=login.key_hash,
                name=login.key_name,
                owner=owner,
                role=login.role,
                expires_at=login.expires_at,
            )
            db.add(row)
            await db.execute(delete(UserGroup).where(UserGroup.owner == owner))
            db.add_all(
                UserGroup(owner=owner, member=GROUP + name, ends_at=login.expires_at)
                for name in login.groups
            )
            await db.flush()
            earlier = select(ApiKey).where(
                ApiKey.owner == owner,
                ApiKey.name.in_(LoginKey),
                ApiKey.revoked_at.is_(None),
                ApiKey.id != row.id,
            )
            keys = (await db.scalars(earlier.order_by(ApiKey.id.desc()))).all()
            surplus = [key for key in keys if key.name == login.key_name][MAX_LOGIN_KEYS - 1 :]
            ended = [key for key in keys if key in surplus or key.role not in login.kept_roles]
            for key in ended:
                key.revoked_at = now()
        return row, ended

    async def owner_of(self, subject: str) -> str | None:
        """Return the owner as whom an account logs in; None if it has never logged in."""
        async with self._reading() as db:
            return await db.scalar(select(User.name).where(User.subject == subject))

    async def revoke_login_keys(self, owner: str) -> None:
        """Revoke all keys from logins of an owner, for the next request of all servers."""
        is_login = and_(ApiKey.name.in_(LoginKey), ApiKey.revoked_at.is_(None))
        async with self._writing() as db:
            await change_rights(db)
            query = update(ApiKey).where(ApiKey.owner == owner, is_login)
            await db.execute(query.values(revoked_at=now()))

    async def users(self) -> Sequence[UserSummary]:
        """Return all owners that have a key, an entry of their own or a project, by name."""
        return await self._summaries(select(_NAMES.c.name))

    async def find_users(self, search: str, page: Page) -> tuple[Sequence[UserSummary], int]:
        """Return a page of the owners whose names contain a text in any case, and their number."""
        query = select(_NAMES.c.name)
        if search:
            query = query.where(_NAMES.c.name.icontains(search, autoescape=True))
        async with self._reading() as db:
            total = await db.scalar(select(func.count()).select_from(query.subquery())) or 0
        ordered = query.order_by(_NAMES.c.name).offset(page.offset).limit(page.limit)
        return await self._summaries(ordered), total

    async def user_summary(self, name: str) -> UserSummary | None:
        """Return an owner that has a key, an entry of its own or a project; None if it has none."""
        found = await self._summaries(select(_NAMES.c.name).where(_NAMES.c.name == name))
        return found[0] if found else None

    async def _summaries(self, names: Select[str]) -> Sequence[UserSummary]:
        """Return the owners that a query names, by name."""
        keys = select(
            ApiKey.owner, func.sum(case((_is_valid(), 1), else_=0)), func.max(ApiKey.last_used_at)
        )
        keys = keys.where(ApiKey.owner.in_(names)).group_by(ApiKey.owner)
        counts = select(ProjectMember.owner, func.count()).group_by(ProjectMember.owner)
        counts = counts.where(_IS_OWNER, ProjectMember.owner.in_(names))
        users = select(User).where(User.name.in_(names))
        async with self._reading() as db:
            listed = (await db.scalars(names)).all()
            entries = {row.name: row for row in (await db.scalars(users)).all()}
            of_keys = {owner: (int(n), used) for owner, n, used in await db.execute(keys)}
            of_projects = {row[0]: int(row[1]) for row in await db.execute(counts)}
        found = []
        for name in sorted(listed):
            row, (valid, used) = entries.get(name), of_keys.get(name, (0, None))
            disabled_at = row.disabled_at if row is not None else None
            found.append(
                UserSummary(
                    name=name,
                    role=row.role if row is not None else None,
                    created_at=row.created_at if row is not None else None,
                    disabled_at=disabled_at,
                    is_linked=row is not None and row.subject is not None,
                    keys=valid if disabled_at is None else 0,
                    last_used_at=used,
                    projects=of_projects.get(name, 0),
                )
            )
        return found

    async def keys_of(self, owner: str) -> Sequence[ApiKey]:
        """Return all keys of an owner, oldest first."""
        return await self._all(select(ApiKey).where(ApiKey.owner == owner).order_by(ApiKey.id))

    async def page_of_keys(self, owner: str, page: Page) -> tuple[Sequence[ApiKey], int]:
        """Return some keys of an owner, valid ones first and then the newest, and their number."""
        query = select(ApiKey).where(ApiKey.owner == owner)
        order = case((_is_valid(), 0), else_=1), ApiKey.id.desc()
        return await self._page(query.order_by(*order), page)

    async def _change_user(self, name: str, by: str | None = None, **values: object) -> bool:
        async with self._writing() as db:
            await change_rights(db)
            if by is not None and (user := await db.get(User, by)) is not None:
                _require_enabled(user)
            if not await _is_known(db, name):
                return False
            row = await db.get(User, name)
            if row is None:
                db.add(User(name=name, **values))
            else:
                await db.execute(update(User).where(User.name == name).values(**values))
        return True


def _is_valid() -> ColumnElement[bool]:
    """Return the condition for keys that are neither revoked nor expired."""
    lasts = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())
    return and_(ApiKey.revoked_at.is_(None), lasts)


async def _is_known(db: AsyncSession, name: str) -> bool:
    queries = (
        select(User.name).where(User.name == name),
        select(ApiKey.owner).where(ApiKey.owner == name),
        select(ProjectMember.owner).where(ProjectMember.owner == name, _IS_OWNER),
    )
    return any([await db.scalar(query.limit(1)) is not None for query in queries])


async def _owner_of(db: AsyncSession, login: Login) -> str:
    """Return the owner of an account, after linking them if the account is new.

    An owner that has keys, but no entry, was made by an administrator for somebody else.

    Raises:
        Forbidden: the owner is disabled, or is not this account's.
    """
    user = await db.scalar(select(User).where(User.subject == login.subject))
    if user is None:
        user = await db.get(User, login.name)
        has_keys = select(ApiKey.id).where(ApiKey.owner == login.name).limit(1)
        if user is not None and user.subject is not None:
            raise Forbidden(f"the owner {login.name!r} belongs to another account")
        if user is None and await db.scalar(has_keys) is not None:
            raise Forbidden(
                f"the owner {login.name!r} has keys already; to link it to this account, an"
                f" administrator runs `tinkercloud users create {login.name}`"
            )
        if user is None:
            user = User(name=login.name)
            db.add(user)
        user.subject = login.subject
    _require_enabled(user)
    return user.name


def _require_enabled(user: User) -> None:
    if user.disabled_at is not None:
        raise Forbidden(f"the owner {user.name!r} is disabled; ask an administrator to enable it")
