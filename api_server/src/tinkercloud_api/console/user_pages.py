"""The pages about users and their keys, for admins."""

from datetime import timedelta
from shlex import quote
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Query
from fastapi.responses import Response
from pydantic import BaseModel, Field

from tinkercloud_api.access.effects import READS_OF_ADMINS, administers, declares, names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.console.pages import (
    OWN_FORM,
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
from tinkercloud_api.routes.account import user_routes
from tinkercloud_api.routes.account.user_routes import KeyId, MadeKey
from tinkercloud_protocol.wire.json_model import Name, Storable

_PAGE = 50
"""Users or keys of a page."""
_DAY = timedelta(days=1)
_HOUR = timedelta(hours=1)
_PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]

router = page_router()


class _NewKey(BaseModel):
    """The fields of the form for a key."""

    owner: Name
    name: Name
    role: Literal["user", "admin", "read-only"]
    days: Annotated[int, Field(ge=1, le=3650)] | None = None


class _Overlap(BaseModel):
    """The fields of the form that replaces a key."""

    hours: Annotated[int, Field(ge=0, le=8760)]


@router.get("/users")
@declares(READS_OF_ADMINS)
@names_no_object
async def list_users(
    server: Server,
    session: Session,
    page: _PageNumber = 1,
    search: Annotated[str, Query(max_length=256), Storable] = "",
) -> Response:
    """Show the users whose names contain a text."""
    offset = (page - 1) * _PAGE
    found = await user_routes.list_users(server, search, _PAGE, offset)
    return await show(
        "users.html",
        session=session,
        users=found.users,
        total=found.total_count,
        page=page,
        pages=_pages(found.total_count),
        search=search,
        roles=list(Role),
        twin="users?" + urlencode({"limit": _PAGE, "offset": offset, "search": search}),
        command="tinkercloud users list",
    )


@router.post("/users")
@declares(administers("key_create"))
@names_no_object
async def create_key(sent: Sent, server: Server, session: Session) -> Response:
    """Create a key of an owner, who may be new, and show it."""
    form = read(_NewKey, sent)
    ttl = form.days * int(_DAY.total_seconds()) if form.days is not None else None
    wanted = user_routes.CreateKey(name=form.name, role=form.role, ttl_seconds=ttl)
    made = await user_routes.create_key(form.owner, wanted, server, session.caller)
    return await _show_key(made, session)


@router.get("/users/{owner:path}")
@declares(READS_OF_ADMINS)
@names_no_object
async def show_user(
    owner: Name, server: Server, session: Session, page: _PageNumber = 1
) -> Response:
    """Show a user, its projects and its keys."""
    found = await user_routes.list_keys(owner, server, _PAGE, (page - 1) * _PAGE)
    return await show(
        "user.html",
        session=session,
        user=found.user,
        memberships=found.memberships,
        keys=found.keys,
        total=found.total_count,
        page=page,
        pages=_pages(found.total_count),
        roles=list(Role),
        twin=f"users/{segment(owner)}/keys",
        command=f"tinkercloud users show {quote(owner)}",
    )


@router.post("/users/{owner:path}/keys/{key_id}/rotate")
@declares(administers("key_rotate"))
@names_no_object
async def rotate_key(
    owner: Name, key_id: KeyId, sent: Sent, server: Server, session: Session
) -> Response:
    """Replace a key, and show the new one."""
    overlap = read(_Overlap, sent).hours * int(_HOUR.total_seconds())
    wanted = user_routes.RotateKey(overlap_seconds=overlap)
    made = await user_routes.rotate_key(owner, key_id, wanted, server, session.caller)
    return await _show_key(made, session)


@router.post("/users/{owner:path}/keys/{key_id}/revoke")
@declares(administers("key_revoke"))
@names_no_object
async def revoke_key(
    owner: Name, key_id: KeyId, sent: Sent, server: Server, session: Session
) -> Response:
    """Revoke a key, and show its owner again."""
    check_confirmed(sent)
    await user_routes.revoke_key(owner, key_id, server, session.caller)
    return _to_user(owner)


@router.post("/users/{owner:path}/disable", dependencies=[OWN_FORM])
@declares(administers("user_disable"))
@names_no_object
async def disable_user(owner: Name, server: Server, session: Session) -> Response:
    """Refuse all keys of a user, and show it again."""
    await user_routes.disable_user(owner, server, session.caller)
    return _to_user(owner)


@router.post("/users/{owner:path}/enable", dependencies=[OWN_FORM])
@declares(administers("user_enable"))
@names_no_object
async def enable_user(owner: Name, server: Server, session: Session) -> Response:
    """Accept the keys of a disabled user again, and show it again."""
    await user_routes.enable_user(owner, server, session.caller)
    return _to_user(owner)


async def _show_key(made: MadeKey, session: Session) -> Response:
    """Return the page with a new key: no redirect could show it, as nothing keeps it."""
    return await show("new_key.html", session=session, made=made)


def _pages(total: int) -> int:
    return max(1, -(-total // _PAGE))


def _to_user(owner: str) -> Response:
    return lead_to(f"users/{segment(owner)}")
