"""How the catalog talks to its database: sessions, and what becomes of one that does not answer."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog
from sqlalchemy import CursorResult, Delete, Select, Update, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from tinkercloud_api import metrics
from tinkercloud_api.catalog.database import NO_ANSWER, WRONG_STATEMENT
from tinkercloud_api.catalog.tables import Table
from tinkercloud_protocol.errors import Unavailable

log = structlog.get_logger(__name__)

RowT = TypeVar("RowT", bound=Table)


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    offset: int
    limit: int


class Statements:
    """Statements over one database, each in a transaction of its own.

    Each raises `Unavailable` if the database does not answer.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncSession]:
        with _translate_errors():
            async with self._sessions() as session:
                yield session

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncSession]:
        with _translate_errors():
            async with self._sessions.begin() as session:
                yield session

    async def _insert(self, row: RowT, existing: Select[RowT]) -> RowT:
        try:
            async with self._writing() as session:
                session.add(row)
        except IntegrityError:
            found = await self._one(existing)
            if found is None:
                raise
            return found
        return row

    async def _one(self, query: Select[RowT]) -> RowT | None:
        async with self._reading() as session:
            return await session.scalar(query)

    async def _all(self, query: Select[RowT]) -> Sequence[RowT]:
        async with self._reading() as session:
            return (await session.scalars(query)).all()

    async def _page(self, query: Select[RowT], page: Page) -> tuple[Sequence[RowT], int]:
        async with self._reading() as session:
            count = select(func.count()).select_from(query.order_by(None).subquery())
            rows = await session.scalars(query.offset(page.offset).limit(page.limit))
            return rows.all(), await session.scalar(count) or 0

    async def _change(self, statement: Update | Delete) -> bool:
        async with self._writing() as session:
            result = await session.execute(statement)
            return isinstance(result, CursorResult) and bool(result.rowcount)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Tell a database that does not answer from a statement that it refuses.

    Raises:
        Unavailable: it does not answer.
    """
    try:
        yield
    except WRONG_STATEMENT:
        raise
    except NO_ANSWER as error:
        metrics.CATALOG_ERRORS.inc()
        log.warning("the catalog's database did not answer", error=str(error))
        raise Unavailable("the catalog does not answer; send the request again") from error
