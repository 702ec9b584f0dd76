"""Links to the console and sessions of browsers, each bound to an API key.

The catalog has only their hashes. They end with their key, and on all servers at once.
"""

from datetime import datetime

from sqlalchemy import ColumnElement, Update, and_, delete, select, update

from tinkercloud_api.catalog.access.project_rows import change_rights
from tinkercloud_api.catalog.access.user_rows import LoginKey
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import ApiKey, ConsoleToken, now


class ConsoleTokens(Statements):
    """A part of the catalog's queries."""

    async def add(self, row: ConsoleToken) -> None:
        """Record a link or a session."""
        async with self._writing() as db:
            db.add(row)

    async def use_link(
        self, token_hash: str, moment: datetime
    ) -> tuple[int, datetime | None] | None:
        """Use up a link.

        Returns:
            The id of its key, and when the session has to end; None if the link is unknown or has
            expired.
        """
        used = delete(ConsoleToken).where(
            ConsoleToken.token_hash == token_hash, ConsoleToken.is_link
        )
        columns = (ConsoleToken.key_id, ConsoleToken.session_ends_at, ConsoleToken.expires_at)
        async with self._writing() as db:
            row = (await db.execute(used.returning(*columns))).first()
        return (row[0], row[1]) if row is not None and row[2] > moment else None

    async def key_of_session(self, token_hash: str, moment: datetime) -> int | None:
        """Return the id of the key of a session; None if it is unknown or has expired."""
        query = select(ConsoleToken).where(
            ConsoleToken.token_hash == token_hash, ConsoleToken.is_link.is_(False)
        )
        row = await self._one(query)
        return row.key_id if row is not None and row.expires_at > moment else None

    async def end_session(self, token_hash: str) -> None:
        """End a session, and its key if that is of a login of the console. This is idempotent."""
        ended = delete(ConsoleToken).where(ConsoleToken.token_hash == token_hash)
        async with self._writing() as db:
            await change_rights(db)
            key_id = await db.scalar(ended.returning(ConsoleToken.key_id))
            await db.execute(_end_unseen(ApiKey.id == key_id))

    async def end_sessions(self, owner: str) -> None:
        """End all sessions of an owner, the links and the keys of logins of the console.

        This is idempotent.
        """
        keys = select(ApiKey.id).where(ApiKey.owner == owner)
        async with self._writing() as db:
            await change_rights(db)
            await db.execute(delete(ConsoleToken).where(ConsoleToken.key_id.in_(keys)))
            await db.execute(_end_unseen(ApiKey.owner == owner))

    async def forget(self, moment: datetime) -> None:
        """Remove what has expired."""
        await self._change(delete(ConsoleToken).where(ConsoleToken.expires_at <= moment))


def _end_unseen(which: ColumnElement[bool]) -> Update:
    """Return the statement that revokes keys that nobody saw, which only sessions could use."""
    is_unseen = and_(which, ApiKey.name == LoginKey.CONSOLE, ApiKey.revoked_at.is_(None))
    return update(ApiKey).where(is_unseen).values(revoked_at=now())
