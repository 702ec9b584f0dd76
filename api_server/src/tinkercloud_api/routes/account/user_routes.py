"""Users and their keys, for admins. The SDK has no calls for them."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from tinkercloud_api.access.auth import Principal, ProjectRole, hash_key, new_key
from tinkercloud_api.access.effects import READS_OF_ADMINS, administers, declares, names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.user_rows import UserSummary, check_owner_name
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.json_model import Name, Storable, WireModel

router = APIRouter(prefix="/api/v1/users", tags=["users"])

_YEAR = 366 * 24 * 3600
_Offset = Annotated[int, Query(ge=0, lt=1 << 63)]
_Limit = Annotated[int, Query(ge=1, le=1000)]
KeyId = Annotated[int, Path(ge=1, lt=1 << 31)]
"""Number of a key, in a path; the catalog's numbers have 32 bits."""


class CreateKey(WireModel):
    """POST users/{owner}/keys."""

    name: Name
    """What the key is for."""
    role: Literal["user", "admin", "read-only"] = "user"
    ttl_seconds: Annotated[int, Field(ge=1, le=10 * _YEAR)] | None = None
    """Seconds until the key expires. Default: it never does."""


class RotateKey(WireModel):
    """POST users/{owner}/keys/{key_id}/rotate."""

    overlap_seconds: Annotated[int, Field(ge=0, le=_YEAR)] = 24 * 3600
    """Seconds until the old key expires: when its clients must have the new one."""


class UserInfo(BaseModel):
    """An owner, who has a key, an entry of its own, or a project."""

    owner: str
    role: Role | None
    """What its keys may do at most; None means what each key may."""
    state: Literal["enabled", "disabled"]
    disabled_at: datetime | None
    has_login: bool
    """Whether an OpenID account logs in as this owner."""
    keys: int
    """Number of keys that servers accept: none of an owner who is disabled."""
    projects: int
    """Number of projects in which it is a member itself."""
    runs: int
    """Number of runs that have not ended."""
    tenant: str | None
    """The tenant whose limits count for it."""
    last_used_at: datetime | None
    """Last use of any of its keys, to within a minute."""


class UserList(BaseModel):
    """Owners, by name."""

    users: list[UserInfo]
    total_count: int


class KeyInfo(BaseModel):
    """A key, without the key itself, which nobody knows but its holder."""

    key_id: int
    name: str
    role: Role
    state: Literal["valid", "expired", "revoked"]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None


class UserKeys(BaseModel):
    """An owner with its projects and keys."""

    user: UserInfo
    memberships: dict[str, ProjectRole]
    """Its role in each project, by itself or by a group of its login."""
    keys: list[KeyInfo]
    """Valid ones first, and then the newest."""
    total_count: int
    """Number of all its keys."""


class MadeKey(BaseModel):
    """A new key, which is shown only here."""

    key_id: int
    key: str
    owner: str
    name: str
    role: Role
    expires_at: datetime | None


@router.get("")
@declares(READS_OF_ADMINS)
@names_no_object
async def list_users(
    server: Server,
    search: Annotated[str, Query(max_length=256), Storable] = "",
    limit: _Limit = 100,
    offset: _Offset = 0,
) -> UserList:
    """List the owners whose names contain a text, by name (admins)."""
    rows, total = await server.catalog.find_users(search, Page(offset, limit))
    return UserList(users=await _described(rows, server), total_count=total)


@router.get("/{owner:path}/keys", responses=statuses("404"))
@declares(READS_OF_ADMINS)
@names_no_object
async def list_keys(
    owner: Name, server: Server, limit: _Limit = 100, offset: _Offset = 0
) -> UserKeys:
    """Show an owner, its projects and its keys (admins)."""
    found = await server.catalog.user_summary(owner)
    if found is None:
        raise _unknown(owner)
    rows, total = await server.catalog.page_of_keys(owner, Page(offset, limit))
    memberships = await server.catalog.memberships(owner)
    return UserKeys(
        user=(await _described([found], server))[0],
        memberships={project: ProjectRole(role) for project, role in sorted(memberships.items())},
        keys=[_key(row) for row in rows],
        total_count=total,
    )


@router.post("/{owner:path}/keys")
@declares(administers("key_create"))
@names_no_object
async def create_key(owner: Name, request: CreateKey, server: Server, caller: Caller) -> MadeKey:
    """Create a key of an owner, who may be new, and return it (admins). It is not shown again."""
    check_owner_name("owner", owner)
    key, ttl = new_key(), request.ttl_seconds
    row = await server.catalog.add_key(
        key_hash=hash_key(key),
        name=request.name,
        owner=owner,
        role=request.role,
        expires_at=now() + timedelta(seconds=ttl) if ttl is not None else None,
    )
    return _made(row, key, caller)


@router.post("/{owner:path}/keys/{key_id}/rotate", responses=statuses("404"))
@declares(administers("key_rotate"))
@names_no_object
async def rotate_key(
    owner: Name, key_id: KeyId, request: RotateKey, server: Server, caller: Caller
) -> MadeKey:
    """Replace a key: return a new one with its name, role and expiry (admins)."""
    await _require_key(owner, key_id, server, caller)
    key, ends_at = new_key(), now() + timedelta(seconds=request.overlap_seconds)
    row = await server.catalog.rotate_key(key_id, hash_key(key), ends_at)
    if row is None:
        raise _unknown_key(owner, key_id)
    return _made(row, key, caller)


@router.delete("/{owner:path}/keys/{key_id}", responses=statuses("404"))
@declares(administers("key_revoke"))
@names_no_object
async def revoke_key(owner: Name, key_id: KeyId, server: Server, caller: Caller) -> dict[str, str]:
    """Revoke a key, which all replicas reject from the next request on (admins)."""
    await _require_key(owner, key_id, server, caller)
    await server.authenticator.revoke_key(key_id)
    return {}


@router.post("/{owner:path}/disable", responses=statuses("404"))
@declares(administers("user_disable"))
@names_no_object
async def disable_user(owner: Name, server: Server, caller: Caller) -> dict[str, str]:
    """Refuse all keys of an owner from now on (admins). Its runs and checkpoints stay. Idempotent.

    Admins can't disable themselves, and of two who disable each other at once one is refused, so
    that one of them is left who can enable others.
    """
    if owner == caller.owner:
        raise InvalidRequest(
            f"owner: {owner!r} is the owner of the key of this request, and nobody disables"
            " themselves; use a key of another admin"
        )
    await _set_disabled(owner, now(), server, caller)
    return {}


@router.post("/{owner:path}/enable", responses=statuses("404"))
@declares(administers("user_enable"))
@names_no_object
async def enable_user(owner: Name, server: Server, caller: Caller) -> dict[str, str]:
    """Accept the keys of a disabled owner again (admins). Idempotent."""
    await _set_disabled(owner, None, server, caller)
    return {}


async def _set_disabled(
    owner: str, moment: datetime | None, server: Context, caller: Principal
) -> None:
    caller.named_objects.add(f"user {owner}")
    if not await server.catalog.set_disabled(owner, moment, by=caller.owner):
        raise _unknown(owner)


async def _require_key(owner: str, key_id: int, server: Context, caller: Principal) -> None:
    """Check that an owner has a key that was not revoked.

    Raises:
        NotFound: it has not.
    """
    row = await server.catalog.key_numbered(key_id)
    if row is None or row.owner != owner:
        raise _unknown_key(owner, key_id)
    caller.named_objects.add(f"key {key_id}")


def _made(row: ApiKey, key: str, caller: Principal) -> MadeKey:
    caller.named_objects.update((f"key {row.id}", f"role {row.role}", f"user {row.owner}"))
    return MadeKey(
        key_id=row.id,
        key=key,
        owner=row.owner,
        name=row.name,
        role=Role(row.role),
        expires_at=row.expires_at,
    )


def _key(row: ApiKey) -> KeyInfo:
    state: Literal["valid", "expired", "revoked"] = "valid"
    if row.revoked_at is not None:
        state = "revoked"
    elif not row.is_valid(now()):
        state = "expired"
    return KeyInfo(
        key_id=row.id,
        name=row.name,
        role=Role(row.role),
        state=state,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


async def _described(rows: Sequence[UserSummary], server: Context) -> list[UserInfo]:
    runs = await server.catalog.count_open_runs_of([row.name for row in rows])
    tenants = {row.name: server.tenants.of(row.name) for row in rows}
    return [
        UserInfo(
            owner=row.name,
            role=Role(row.role) if row.role is not None else None,
            state="enabled" if row.disabled_at is None else "disabled",
            disabled_at=row.disabled_at,
            has_login=row.is_linked,
            keys=row.keys,
            projects=row.projects,
            runs=runs.get(row.name, 0),
            tenant=tenant.name if (tenant := tenants[row.name]) is not None else None,
            last_used_at=row.last_used_at,
        )
        for row in rows
    ]


def _unknown(owner: str) -> NotFound:
    return NotFound(f"owner: no owner is named {owner!r}; GET /api/v1/users lists them")


def _unknown_key(owner: str, key_id: int) -> NotFound:
    return NotFound(
        f"key_id: {owner!r} has no key {key_id}, or it was revoked or has expired; GET"
        f" /api/v1/users/{owner}/keys lists its keys"
    )
