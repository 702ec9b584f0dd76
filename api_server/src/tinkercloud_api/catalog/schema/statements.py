"""Database access of the catalog: transactions, and the handling of an unreachable database."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog
from sqlalchemy import CursorResult, Delete, Insert, Select, Update, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker

from tinkercloud_api.catalog.schema.connection import NO_ANSWER, WRONG_STATEMENT
from tinkercloud_api.catalog.schema.tables import Table
from tinkercloud_api.config import api_metrics
from tinkercloud_protocol.wire.errors import Unavailable

log = structlog.get_logger(__name__)

RowT = TypeVar("RowT", bound=Table)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list."""

    offset: int
    limit: int


class Statements:
    """Executes statements on one database, each in its own transaction.

    All methods raise `Unavailable` if the database does not respond.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    def _insert_into(self, table: type[Table]) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT that can say what happens on a conflict: no part of the SQL standard."""
        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        return insert(table)

    def _insert_or_replace(
        self, table: type[Table], values: Sequence[str], *, unless_below: str | None = None
    ) -> Insert:
        """Return an INSERT that replaces the values of the row with the same primary key.

        Args:
            table: the table.
            values: names of its columns that are replaced.
            unless_below: name of a column; a row with a lower value in it replaces nothing.
        """
        columns = table.__table__.c
        add = self._insert_into(table)
        return add.on_conflict_do_update(
            index_elements=list(table.__table__.primary_key),
            set_={name: add.excluded[name] for name in values},
            where=add.excluded[unless_below] >= columns[unless_below] if unless_below else None,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncSession]:
        with _translate_errors():
            async with self._sessions() as db:
                yield db

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection for a value that is read often: less work than `_reading`."""
        with _translate_errors():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncSession]:
        with _translate_errors():
            async with self._sessions.begin() as db:
                yield db

    async def _insert(self, row: RowT, existing: Select[RowT], *others: Table) -> RowT:
        """Insert a row, and others with it; if it exists, return the existing one instead."""
        try:
            async with self._writing() as db:
                db.add_all((row, *others))
        except IntegrityError:
            found = await self._one(existing)
            if found is None:
                raise
            return found
        return row

    async def _one(self, query: Select[RowT]) -> RowT | None:
        async with self._reading() as db:
            return await db.scalar(query)

    async def _all(self, query: Select[RowT]) -> Sequence[RowT]:
        async with self._reading() as db:
            return (await db.scalars(query)).all()

    async def _page(self, query: Select[RowT], page: Page) -> tuple[Sequence[RowT], int]:
        async with self._reading() as db:
            count = select(func.count()).select_from(query.order_by(None).subquery())
            rows = await db.scalars(query.offset(page.offset).limit(page.limit))
            return rows.all(), await db.scalar(count) or 0

    async def _change(self, statement: Update | Delete) -> bool:
        async with self._writing() as db:
            result = await db.execute(statement)
            return isinstance(result, CursorResult) and bool(result.rowcount)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate errors of an unreachable database; errors in statements are raised unchanged.

    Raises:
        Unavailable: the database does not respond.
    """
    try:
        yield
    except WRONG_STATEMENT:
        raise
    except NO_ANSWER as error:
        api_metrics.CATALOG_ERRORS.inc()
        log.warning("the catalog database did not respond", error=str(error))
        raise Unavailable("the catalog does not respond; send the request again") from error
