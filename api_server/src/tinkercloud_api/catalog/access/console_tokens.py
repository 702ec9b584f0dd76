"""Links to the console and sessions of browsers, each bound to an API key.

The catalog has only their hashes. They end with their key, and on all servers at once.
"""

from datetime import datetime

from sqlalchemy import delete, select

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import ApiKey, ConsoleToken


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
        """End a session. This is idempotent."""
        await self._change(delete(ConsoleToken).where(ConsoleToken.token_hash == token_hash))

    async def end_sessions(self, owner: str) -> None:
        """End all sessions of an owner, and the links. This is idempotent."""
        keys = select(ApiKey.id).where(ApiKey.owner == owner)
        await self._change(delete(ConsoleToken).where(ConsoleToken.key_id.in_(keys)))

    async def forget(self, moment: datetime) -> None:
        """Remove what has expired."""
        await self._change(delete(ConsoleToken).where(ConsoleToken.expires_at <= moment))
