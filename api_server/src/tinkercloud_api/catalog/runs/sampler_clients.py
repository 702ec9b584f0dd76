"""Numbers of the clients of a sampling session: the one that created it has number 0."""

from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import SamplerClientCount as Row


class SamplerClients(Statements):
    """Gives each client that joins a sampling session a number of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Count clients in a catalog's database."""
        super().__init__(engine)
        first = self._insert_into(Row)
        self._next = first.on_conflict_do_update(
            index_elements=[Row.sampler_id], set_={"joined": Row.joined + 1}
        ).returning(Row.joined)

    async def join(self, sampler_id: str) -> int:
        """Return the next number of a sampling session, from 1.

        Raises:
            Unavailable: the database does not respond.
        """
        async with self._writing() as db:
            number = await db.scalar(self._next.values(sampler_id=sampler_id, joined=1))
        return int(number or 0)
