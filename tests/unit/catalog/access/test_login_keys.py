"""Keys from logins in the catalog: how many an owner has, and what ends them."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest

from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.user_rows import MAX_LOGIN_KEYS, Login, LoginKey
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import Forbidden

KEPT = {Role.READ_ONLY: {Role.READ_ONLY}, Role.USER: {Role.READ_ONLY, Role.USER}}
"""The roles of earlier keys that a login with a role keeps."""


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    engine = open_database(database_url)
    await migrate(engine)
    yield Catalog(engine)
    await engine.dispose()


async def log_in(
    catalog: Catalog,
    number: int,
    *,
    subject: str = "issuer|1",
    name: str = "ann",
    role: Role = Role.USER,
    key_name: LoginKey = LoginKey.SHOWN,
    ended: Sequence[str] = (),
) -> ApiKey:
    """Log in, and check which earlier keys that has ended."""
    key, earlier = await catalog.log_in(
        Login(
            subject=subject,
            name=name,
            role=role,
            kept_roles=frozenset(KEPT[role]),
            groups=frozenset(),
            key_name=key_name,
            key_hash=f"{subject}-{number}",
            expires_at=now() + timedelta(days=30),
        )
    )
    assert [each.key_hash for each in earlier] == list(ended)
    return key


async def valid(catalog: Catalog, owner: str = "ann") -> list[str]:
    return [row.key_hash for row in await catalog.keys_of(owner) if row.is_valid(now())]


async def test_the_oldest_key_ends_when_there_is_one_more_than_ten(catalog: Catalog) -> None:
    await catalog.add_key(key_hash="made", name="ci", owner="ann", role="user")
    await catalog.add_user("ann", None)
    for number in range(MAX_LOGIN_KEYS + 1):
        await log_in(catalog, number, ended=["issuer|1-0"] if number == MAX_LOGIN_KEYS else [])

    kept = [f"issuer|1-{number}" for number in range(1, MAX_LOGIN_KEYS + 1)]
    assert await valid(catalog) == ["made", *kept]


async def test_logins_of_the_console_end_no_key_that_was_shown(catalog: Catalog) -> None:
    shown = await log_in(catalog, 0)
    for number in range(1, MAX_LOGIN_KEYS + 2):
        ended = ["issuer|1-1"] if number > MAX_LOGIN_KEYS else []
        await log_in(catalog, number, key_name=LoginKey.CONSOLE, ended=ended)

    kept = [f"issuer|1-{number}" for number in range(2, MAX_LOGIN_KEYS + 2)]
    assert await valid(catalog) == [shown.key_hash, *kept]


async def test_keys_with_more_rights_than_the_account_has_now_end(catalog: Catalog) -> None:
    first = await log_in(catalog, 1)
    second = await log_in(
        catalog, 2, role=Role.READ_ONLY, key_name=LoginKey.CONSOLE, ended=[first.key_hash]
    )
    third = await log_in(catalog, 3)

    assert [row.role for row in (first, second, third)] == ["user", "read-only", "user"]
    assert await valid(catalog) == [second.key_hash, third.key_hash]


async def test_an_account_stays_linked_if_its_address_changes(catalog: Catalog) -> None:
    await log_in(catalog, 1)

    assert (await log_in(catalog, 2, name="ann@new")).owner == "ann"
    assert await catalog.owner_of("issuer|1") == "ann"
    with pytest.raises(Forbidden, match="belongs to another account"):
        await log_in(catalog, 1, subject="issuer|2")
    assert await catalog.owner_of("issuer|2") is None


async def test_a_logout_ends_all_keys_from_logins_of_its_owner(catalog: Catalog) -> None:
    for number, name in enumerate(LoginKey):
        await log_in(catalog, number, key_name=name)
    other = await log_in(catalog, 1, subject="issuer|2", name="bob")
    await catalog.add_key(key_hash="made", name="ci", owner="ann", role="user")
    version = await catalog.access_version()

    await catalog.revoke_login_keys("ann")

    assert await valid(catalog) == ["made"]
    assert await valid(catalog, "bob") == [other.key_hash]
    assert await catalog.access_version() > version
