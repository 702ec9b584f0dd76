"""What the server asks of its catalog: named questions and statements, nothing else.

Every statement may be repeated: creating what exists returns what exists. One that the database
does not answer raises Unavailable, which asks the client to send its request again.
"""

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import structlog
from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Delete,
    Select,
    Update,
    and_,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from tinkercloud_api import metrics
from tinkercloud_api.catalog.database import NO_ANSWER, WRONG_STATEMENT
from tinkercloud_api.catalog.tables import (
    ApiKey,
    Checkpoint,
    SamplingSession,
    Session,
    Table,
    TrainingRun,
    now,
)
from tinkercloud_protocol.checkpoints import Manifest
from tinkercloud_protocol.errors import Unavailable
from tinkercloud_protocol.paths import CheckpointPath

log = structlog.get_logger(__name__)

RowT = TypeVar("RowT", bound=Table)

_MAX_SWEPT = 100
"""Runs that one round of housekeeping sweeps up."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    offset: int
    limit: int


class Catalog:
    """Queries and statements over one database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def ping(self) -> None:
        """Return if the database answers."""
        async with self._reading() as session:
            await session.execute(select(1))

    # Keys

    async def add_key(self, *, key_hash: str, name: str, owner: str, role: str) -> ApiKey:
        """Register a key; one that is registered already is returned as it is."""
        return await self._insert(
            ApiKey(key_hash=key_hash, name=name, owner=owner, role=role),
            select(ApiKey).where(ApiKey.key_hash == key_hash),
        )

    async def key(self, key_hash: str) -> ApiKey | None:
        """Return a key that has not been revoked."""
        query = select(ApiKey).where(ApiKey.key_hash == key_hash, ApiKey.revoked_at.is_(None))
        return await self._one(query)

    async def keys(self) -> Sequence[ApiKey]:
        """Return all keys, oldest first."""
        return await self._all(select(ApiKey).order_by(ApiKey.id))

    async def revoke_key(self, key_id: int) -> bool:
        """Revoke a key; return whether there was one to revoke."""
        return await self._change(
            update(ApiKey)
            .where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
            .values(revoked_at=now())
        )

    # Sessions

    async def add_session(self, session: Session) -> None:
        """Record a new session."""
        async with self._writing() as connection:
            connection.add(session)

    async def session(self, session_id: str) -> Session | None:
        """Return a session."""
        return await self._one(select(Session).where(Session.id == session_id))

    async def sessions(self, owner: str | None, page: Page) -> Sequence[str]:
        """Return session ids, newest first; `owner` None means everybody's."""
        query = select(Session.id).order_by(Session.created_at.desc(), Session.id)
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._reading() as connection:
            rows = await connection.scalars(query.offset(page.offset).limit(page.limit))
            return rows.all()

    async def beat(self, session_ids: Collection[str]) -> None:
        """Record that these sessions' clients are alive."""
        named = Session.id.in_(session_ids)
        async with self._writing() as connection:
            # All replicas lock rows in one order, or two could wait for each other.
            await connection.execute(
                select(Session.id).where(named).order_by(Session.id).with_for_update()
            )
            await connection.execute(update(Session).where(named).values(last_heartbeat_at=now()))

    async def count_live_sessions(self, since: datetime) -> int:
        """Return how many sessions are not over and had a heartbeat since then."""
        query = select(func.count()).where(
            Session.finished_at.is_(None), Session.last_heartbeat_at >= since
        )
        async with self._reading() as connection:
            return await connection.scalar(query) or 0

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> bool:
        """Finish a session; return False if it was finished before (the first reason stays)."""
        return await self._change(
            update(Session)
            .where(Session.id == session_id, Session.finished_at.is_(None))
            .values(finished_at=now(), finish_reason=reason, finish_detail=detail)
        )

    async def runs_of_session(self, session_id: str) -> Sequence[TrainingRun]:
        """Return a session's runs, in order of their creation."""
        query = select(TrainingRun).where(TrainingRun.session_id == session_id)
        return await self._all(query.order_by(TrainingRun.created_at, TrainingRun.id))

    async def samplers_of_session(self, session_id: str) -> Sequence[SamplingSession]:
        """Return a session's sampling sessions, in order of their creation."""
        query = select(SamplingSession).where(SamplingSession.session_id == session_id)
        return await self._all(query.order_by(SamplingSession.created_at, SamplingSession.id))

    # Training runs

    async def add_run(self, run: TrainingRun) -> TrainingRun:
        """Record a run; one of the same id is returned as it is."""
        return await self._insert(run, select(TrainingRun).where(TrainingRun.id == run.id))

    async def run(self, run_id: str) -> TrainingRun | None:
        """Return a run."""
        return await self._one(select(TrainingRun).where(TrainingRun.id == run_id))

    async def runs(
        self, owner: str | None, page: Page, project_id: str | None = None
    ) -> tuple[Sequence[TrainingRun], int]:
        """Return runs, newest first, and how many there are in all.

        Args:
            owner: whose; None means everybody's.
            page: which part.
            project_id: that their sessions were begun with; None means any or none.
        """
        query = select(TrainingRun)
        if owner is not None:
            query = query.where(TrainingRun.owner == owner)
        if project_id is not None:
            in_project = select(Session.id).where(Session.project_id == project_id)
            query = query.where(TrainingRun.session_id.in_(in_project))
        ordered = query.order_by(TrainingRun.created_at.desc(), TrainingRun.id)
        return await self._page(ordered, page)

    async def set_generation(self, run_id: str, generation: str, *, after: str | None) -> bool:
        """Record which head holds a model.

        Args:
            run_id: the run.
            generation: of the head that holds it now.
            after: of the head that held it before; None if none did.

        Returns:
            False if another one holds it by now, and nothing was recorded.
        """
        is_current = TrainingRun.generation.is_not_distinct_from(after)
        return await self._change(
            update(TrainingRun)
            .where(TrainingRun.id == run_id)
            .where(or_(is_current, TrainingRun.generation == generation))
            .values(generation=generation)
        )

    async def touch_runs(self, moments: dict[str, datetime]) -> None:
        """Record when runs were last used; what was recorded later stays."""
        async with self._writing() as connection:
            # All replicas lock rows in one order, or two could wait for each other.
            for run_id, moment in sorted(moments.items()):
                await connection.execute(
                    update(TrainingRun)
                    .where(TrainingRun.id == run_id, TrainingRun.last_request_at < moment)
                    .values(last_request_at=moment)
                )

    async def delete_run(self, run_id: str) -> None:
        """Record that a model was let go; its checkpoints stay."""
        await self._change(
            update(TrainingRun)
            .where(TrainingRun.id == run_id, TrainingRun.deleted_at.is_(None))
            .values(deleted_at=now())
        )

    async def runs_to_sweep(self, before: datetime) -> Sequence[str]:
        """Return some runs that were deleted before a moment and have not been swept since."""
        query = select(TrainingRun.id).where(
            TrainingRun.is_swept.is_(False), TrainingRun.deleted_at < before
        )
        async with self._reading() as connection:
            return (await connection.scalars(query.limit(_MAX_SWEPT))).all()

    async def mark_swept(self, run_id: str) -> None:
        """Record that a deleted run has left nothing behind."""
        await self._change(
            update(TrainingRun).where(TrainingRun.id == run_id).values(is_swept=True)
        )

    # Sampling sessions

    async def add_sampler(self, sampler: SamplingSession) -> SamplingSession:
        """Record a sampling session; one of the same id is returned as it is."""
        query = select(SamplingSession).where(SamplingSession.id == sampler.id)
        return await self._insert(sampler, query)

    async def sampler(self, sampler_id: str) -> SamplingSession | None:
        """Return a sampling session."""
        return await self._one(select(SamplingSession).where(SamplingSession.id == sampler_id))

    # Checkpoints

    async def expect_checkpoint(self, path: CheckpointPath, owner: str) -> None:
        """Record that a checkpoint was asked for: its manifest must be looked at."""
        row = await self._insert(
            Checkpoint(run_id=path.run_id, kind=str(path.kind), name=path.name, owner=owner),
            select(Checkpoint).where(_is(path)),
        )
        if row.is_indexed:
            await self._change(
                update(Checkpoint).where(_is(path)).values(is_indexed=False, asked_at=now())
            )

    async def index_checkpoint(self, manifest: Manifest) -> None:
        """Record what a manifest says."""
        path = manifest.path
        await self.expect_checkpoint(path, manifest.owner)
        await self._change(
            update(Checkpoint)
            .where(_is(path))
            .values(
                is_indexed=True,
                created_at=manifest.created_at,
                size_bytes=manifest.size_bytes,
                user_metadata=manifest.user_metadata,
                expires_at=manifest.expires_at,
            )
        )

    async def unindexed_checkpoints(self) -> Sequence[Checkpoint]:
        """Return the checkpoints whose manifests must be looked at."""
        return await self._all(select(Checkpoint).where(Checkpoint.is_indexed.is_(False)))

    async def checkpoint(self, path: CheckpointPath) -> Checkpoint | None:
        """Return a checkpoint that exists."""
        query = select(Checkpoint).where(_is(path)).where(Checkpoint.created_at.is_not(None))
        return await self._one(query)

    async def checkpoints_of_run(self, run_id: str) -> Sequence[Checkpoint]:
        """Return a run's checkpoints, oldest first."""
        query = select(Checkpoint).where(
            Checkpoint.run_id == run_id, Checkpoint.created_at.is_not(None)
        )
        return await self._all(query.order_by(Checkpoint.created_at, Checkpoint.name))

    async def checkpoints(self, owner: str | None, page: Page) -> tuple[Sequence[Checkpoint], int]:
        """Return checkpoints, newest first, and how many there are in all."""
        query = select(Checkpoint).where(Checkpoint.created_at.is_not(None))
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        return await self._page(query.order_by(Checkpoint.created_at.desc()), page)

    async def expired_checkpoints(self, moment: datetime) -> Sequence[Checkpoint]:
        """Return the checkpoints whose time to live has passed."""
        return await self._all(select(Checkpoint).where(Checkpoint.expires_at <= moment))

    async def forget_checkpoint(self, path: CheckpointPath) -> None:
        """Drop a checkpoint from the index."""
        await self._change(delete(Checkpoint).where(_is(path)))

    async def set_public(self, path: CheckpointPath, *, is_public: bool) -> None:
        """Let everybody read a checkpoint, or only its owner."""
        await self._change(update(Checkpoint).where(_is(path)).values(is_public=is_public))

    # How

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncSession]:
        with _an_answer():
            async with self._sessions() as session:
                yield session

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncSession]:
        with _an_answer():
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
def _an_answer() -> Iterator[None]:
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


def _is(path: CheckpointPath) -> ColumnElement[bool]:
    return and_(
        Checkpoint.run_id == path.run_id,
        Checkpoint.kind == str(path.kind),
        Checkpoint.name == path.name,
    )
