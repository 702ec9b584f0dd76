"""Queries and updates of API keys, and of secrets that all replicas share."""

import secrets
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import and_, or_, select, update

from tinkercloud_api.catalog.access.project_rows import change_rights
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import ApiKey, ServerSecret, now


class KeyStatements(Statements):
    """A part of the catalog's queries, as `catalog.store` for everything else."""

    async def shared_secret(self, name: str) -> str:
        """Return a random secret, which the first server that asks for it creates."""
        existing = select(ServerSecret).where(ServerSecret.name == name)
        row = await self._one(existing)
        if row is None:
            row = await self._insert(
                ServerSecret(name=name, value=secrets.token_urlsafe(32)), existing
            )
        return row.value

    async def add_key(
        self,
        *,
        key_hash: str,
        name: str,
        owner: str,
        role: str,
        expires_at: datetime | None = None,
    ) -> ApiKey:
        """Register a key; if it is already registered, return the existing row."""
        return await self._insert(
            ApiKey(key_hash=key_hash, name=name, owner=owner, role=role, expires_at=expires_at),
            select(ApiKey).where(ApiKey.key_hash == key_hash),
        )

    async def add_bootstrap_key(
        self, *, key_hash: str, name: str, owner: str, role: str
    ) -> tuple[ApiKey, Sequence[int]]:
        """Register the configured bootstrap key, and revoke previously configured ones.

        A key that has been revoked stays revoked and does not replace others.

        Returns:
            The key, and the ids of the keys that it replaced.
        """
        row = await self._insert(
            ApiKey(key_hash=key_hash, name=name, owner=owner, role=role, is_bootstrap=True),
            select(ApiKey).where(ApiKey.key_hash == key_hash),
        )
        if not row.is_valid(now()):
            return row, []
        # A key from `keys create` that is later configured as bootstrap key is rotated as well.
        configured = update(ApiKey).where(ApiKey.id == row.id).values(is_bootstrap=True)
        is_replaced = and_(ApiKey.is_bootstrap, ApiKey.id != row.id, ApiKey.revoked_at.is_(None))
        replaced = update(ApiKey).where(is_replaced).values(revoked_at=now())
        async with self._writing() as db:
            await change_rights(db)
            await db.execute(configured)
            found = await db.scalars(replaced.returning(ApiKey.id))
            return row, sorted(found.all())

    async def key(self, key_hash: str) -> ApiKey | None:
        """Return a key that has not been revoked; it may have expired."""
        query = select(ApiKey).where(ApiKey.key_hash == key_hash, ApiKey.revoked_at.is_(None))
        return await self._one(query)

    async def key_numbered(self, key_id: int) -> ApiKey | None:
        """Return the key with an id, if it has not been revoked; it may have expired."""
        query = select(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        return await self._one(query)

    async def keys(self) -> Sequence[ApiKey]:
        """Return all keys, oldest first."""
        return await self._all(select(ApiKey).order_by(ApiKey.id))

    async def revoke_key(self, key_id: int) -> bool:
        """Revoke a key, for the next request of all servers; return whether there was one."""
        is_valid = and_(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        revoked = update(ApiKey).where(is_valid).values(revoked_at=now())
        async with self._writing() as db:
            await change_rights(db)
            return await db.scalar(revoked.returning(ApiKey.id)) is not None

    async def rotate_key(self, key_id: int, key_hash: str, ends_at: datetime) -> ApiKey | None:
        """Register the successor of a key, which expires at a time, if it does not earlier.

        Returns:
            The successor, with the name, owner, role and expiry of the key; None if there is no
            valid key with this id.
        """
        async with self._writing() as db:
            await change_rights(db)
            old = await db.get(ApiKey, key_id, with_for_update=True)
            if old is None or not old.is_valid(now()):
                return None
            successor = ApiKey(
                key_hash=key_hash,
                name=old.name,
                owner=old.owner,
                role=old.role,
                expires_at=old.expires_at,
            )
            db.add(successor)
            old.expires_at = min(ends_at, old.expires_at or ends_at)
        return successor

    async def last_use_of_key(self, key_id: int) -> datetime | None:
        """Return the recorded time of a key's last use."""
        row = await self._one(select(ApiKey).where(ApiKey.id == key_id))
        return row.last_used_at if row is not None else None

    async def touch_keys(self, moments: dict[int, datetime]) -> None:
        """Record when keys were last used."""
        async with self._writing() as db:
            # All replicas lock rows in the same order to prevent deadlocks.
            for key_id, moment in sorted(moments.items()):
                is_later = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < moment)
                await db.execute(
                    update(ApiKey).where(ApiKey.id == key_id, is_later).values(last_used_at=moment)
                )
