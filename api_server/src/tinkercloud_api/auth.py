"""Who is asking, and what they may see: the only place that decides either.

Keys are 256 random bits behind the prefix the SDK insists on; the catalog holds their SHA-256.
Whatever has an owner can be seen by that owner and by admins; to everybody else it does not exist.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import now
from tinkercloud_api.settings import KEY_PREFIX
from tinkercloud_protocol.errors import NotFound, Unauthenticated

REMEMBERED_SECONDS = 10.0
"""A key that another process revokes is refused after this time at the latest."""
_MAX_REMEMBERED = 10_000


class Role(StrEnum):
    """What a key may do beyond what belongs to its owner."""

    USER = "user"
    """Nothing."""
    ADMIN = "admin"
    """See and delete what belongs to others."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key."""

    key_id: int
    key_name: str
    owner: str
    role: Role
    expires_at: datetime | None = None
    """When the key stops being accepted; None means never."""

    def may_see(self, owner: str) -> bool:
        """Whether what belongs to `owner` exists for this principal."""
        return self.owner == owner or self.role is Role.ADMIN

    def require(self, owner: str | None, what: str) -> None:
        """Check that something exists for this principal.

        Args:
            owner: whose it is; None if there is no such thing at all.
            what: what was asked for, such as `training run '...'`.

        Raises:
            NotFound: it does not exist, or belongs to somebody else.
        """
        if owner is None or not self.may_see(owner):
            raise NotFound(f"{what} does not exist, or belongs to another owner")

    def owner_filter(self, access_scope: str) -> str | None:
        """Return whose things a list shows: None for everybody's."""
        return None if access_scope == "accessible" and self.role is Role.ADMIN else self.owner


def new_key() -> str:
    """Return a fresh API key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return what the catalog stores of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Authenticator:
    """Looks keys up, and remembers them for a moment."""

    def __init__(self, catalog: Catalog, note_use: Callable[[int], None]) -> None:
        """Look keys up in a catalog.

        Args:
            catalog: which.
            note_use: called with the id of each key that is accepted.
        """
        self._catalog = catalog
        self._note_use = note_use
        self._remembered: dict[str, tuple[float, Principal]] = {}
        self._revoked: set[int] = set()
        """Keys revoked here: a look-up that was under way meanwhile must not bring one back."""

    def has_known(self, key: str) -> bool:
        """Whether a key was good when it was last looked up."""
        return hash_key(key) in self._remembered

    async def principal(self, key: str | None) -> Principal:
        """Return the holder of a key.

        Raises:
            Unauthenticated: there is no key, or it is unknown, revoked or expired.
        """
        if not key:
            raise Unauthenticated("X-API-Key is missing: set TINKER_API_KEY")
        principal = await self._holder(hash_key(key))
        if principal.expires_at is not None and principal.expires_at <= now():
            raise Unauthenticated(
                f"X-API-Key expired at {principal.expires_at.isoformat(timespec='seconds')}: ask"
                " for another one"
            )
        self._note_use(principal.key_id)
        return principal

    async def revoke(self, principal: Principal) -> None:
        """Revoke a principal's key; this process refuses it from now on."""
        await self._catalog.revoke_key(principal.key_id)
        self._revoked.add(principal.key_id)

    async def _holder(self, key_hash: str) -> Principal:
        moment = time.monotonic()
        remembered = self._remembered.get(key_hash)
        if remembered is not None and remembered[0] > moment:
            principal = remembered[1]
        else:
            row = await self._catalog.key(key_hash)
            if row is None:
                self._remembered.pop(key_hash, None)
                raise Unauthenticated("X-API-Key is not known here, or has been revoked")
            principal = Principal(row.id, row.name, row.owner, Role(row.role), row.expires_at)
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key_hash] = (moment + REMEMBERED_SECONDS, principal)
        if principal.key_id in self._revoked:
            raise Unauthenticated("X-API-Key is not known here, or has been revoked")
        return principal
