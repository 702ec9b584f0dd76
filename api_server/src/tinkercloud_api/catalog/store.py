"""The catalog's queries and updates.

All updates are idempotent: creating a row that exists returns the existing row. If the database
does not respond, methods raise Unavailable, on which the client sends its request again.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, CursorResult, Select, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinkercloud_api.catalog.access.key_rows import KeyStatements
from tinkercloud_api.catalog.access.project_rows import ProjectStatements, keep_project
from tinkercloud_api.catalog.access.user_rows import UserStatements
from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs import run_ends
from tinkercloud_api.catalog.runs.checkpoint_uses import CheckpointUses
from tinkercloud_api.catalog.runs.counts import Counts
from tinkercloud_api.catalog.runs.indexed_checkpoints import CheckpointStatements
from tinkercloud_api.catalog.runs.run_search import RunSearch, runs_that_match
from tinkercloud_api.catalog.runs.search_terms import (
    SearchTerms,
    terms_of_run,
    terms_of_session,
)
from tinkercloud_api.catalog.runs.session_search import Search, matching
from tinkercloud_api.catalog.runs.uploads import UploadStatements
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import (
    Checkpoint,
    SamplingSession,
    Session,
    TrainingRun,
    now,
)

_MAX_SWEPT = 100
"""Limit of runs or sessions per housekeeping round."""


class Catalog(
    KeyStatements,
    UserStatements,
    ProjectStatements,
    Counts,
    CheckpointStatements,
    CheckpointUses,
    UploadStatements,
    SearchTerms,
):
    """Queries and updates of the catalog database."""

    async def ping(self) -> None:
        """Check that the database responds."""
        async with self._reading() as db:
            await db.execute(select(1))

    # Sessions

    async def add_session(self, session: Session) -> None:
        """Record a new session.

        Raises:
            NotFound: its project does not exist any more.
        """
        async with self._writing() as db:
            db.add_all((session, *terms_of_session(session)))
            if session.project_id is not None:
                await db.flush()
                await keep_project(db, session.project_id)

    async def session(self, session_id: str) -> Session | None:
        """Return a session."""
        return await self._one(select(Session).where(Session.id == session_id))

    async def find_sessions(self, query: Select[Session]) -> list[Session]:
        """Return the sessions of a query (`session_search.matching`)."""
        return list(await self._all(query))

    async def page_of_sessions(
        self, search: Search, ids: Collection[str] | None, page: Page
    ) -> tuple[Sequence[Session], int]:
        """Return the sessions of a search, newest first, and their total number.

        Args:
            search: what they have in common.
            ids: ids to select from; None means all.
            page: page to return.
        """
        query = matching(search)
        return await self._page(query if ids is None else query.where(Session.id.in_(ids)), page)

    async def sessions(self, visible: Visibility, page: Page) -> Sequence[str]:
        """Return session ids, newest first."""
        query = select(Session.id).order_by(Session.created_at.desc(), Session.id)
        query = query.where(visible.of(Session))
        async with self._reading() as db:
            rows = await db.scalars(query.offset(page.offset).limit(page.limit))
            return rows.all()

    async def sessions_named(self, session_ids: Sequence[str]) -> Sequence[Session]:
        """Return the sessions with the given ids, newest first."""
        query = select(Session).where(Session.id.in_(session_ids))
        return await self._all(query.order_by(Session.created_at.desc(), Session.id))

    async def expired_sessions(self, since: datetime) -> Sequence[str]:
        """Return some open sessions without a heartbeat or request since a time."""
        is_used = select(TrainingRun.id).where(
            TrainingRun.session_id == Session.id, TrainingRun.last_request_at >= since
        )
        query = select(Session.id).where(
            Session.finished_at.is_(None), Session.last_heartbeat_at < since, ~is_used.exists()
        )
        async with self._reading() as db:
            return (await db.scalars(query.order_by(Session.id).limit(_MAX_SWEPT))).all()

    async def record_heartbeats(self, session_ids: Collection[str]) -> None:
        """Record that the clients of sessions are alive."""
        named = Session.id.in_(session_ids)
        async with self._writing() as db:
            # All replicas lock rows in the same order to prevent deadlocks.
            await db.execute(select(Session.id).where(named).order_by(Session.id).with_for_update())
            await db.execute(update(Session).where(named).values(last_heartbeat_at=now()))

    async def count_live_sessions(self, since: datetime) -> int:
        """Return the number of open sessions with a heartbeat since a time."""
        query = select(func.count()).where(
            Session.finished_at.is_(None), Session.last_heartbeat_at >= since
        )
        async with self._reading() as db:
            return await db.scalar(query) or 0

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> bool:
        """End a session and delete its runs, but keep their checkpoints.

        Returns:
            False if the session had already ended; the first reason is kept.
        """
        is_open = and_(Session.id == session_id, Session.finished_at.is_(None))
        finished = update(Session).where(is_open)
        finished = finished.values(finished_at=now(), finish_reason=reason, finish_detail=detail)
        async with self._writing() as db:
            result = await db.execute(finished.returning(Session.id))
            is_first = result.first() is not None
            await _delete_runs(db, TrainingRun.session_id == session_id)
        return is_first

    async def runs_of_session(self, session_id: str) -> Sequence[TrainingRun]:
        """Return a session's runs, in order of creation."""
        return await self.runs_of_sessions([session_id])

    async def runs_of_sessions(self, session_ids: Sequence[str]) -> Sequence[TrainingRun]:
        """Return the runs of sessions, in order of creation."""
        query = select(TrainingRun).where(TrainingRun.session_id.in_(session_ids))
        return await self._all(query.order_by(TrainingRun.created_at, TrainingRun.id))

    async def samplers_of_session(self, session_id: str) -> Sequence[SamplingSession]:
        """Return a session's sampling sessions, in order of creation."""
        query = select(SamplingSession).where(SamplingSession.session_id == session_id)
        return await self._all(query.order_by(SamplingSession.created_at, SamplingSession.id))

    # Training runs

    async def add_run(self, run: TrainingRun) -> TrainingRun:
        """Record a run; if the id exists, return the existing row."""
        existing = select(TrainingRun).where(TrainingRun.id == run.id)
        return await self._insert(run, existing, *terms_of_run(run))

    async def run(self, run_id: str) -> TrainingRun | None:
        """Return a run."""
        return await self._one(select(TrainingRun).where(TrainingRun.id == run_id))

    async def runs_named(self, run_ids: Sequence[str]) -> Sequence[TrainingRun]:
        """Return the runs with the given ids."""
        return await self._all(select(TrainingRun).where(TrainingRun.id.in_(run_ids)))

    async def runs(
        self, visible: Visibility, page: Page, project_id: str | None = None
    ) -> tuple[Sequence[TrainingRun], int]:
        """Return runs, newest first, and their total number.

        Args:
            visible: which runs the caller sees.
            page: page to return.
            project_id: project of the runs' sessions; None means any project or none.
        """
        query = select(TrainingRun).where(visible.of(TrainingRun))
        if project_id is not None:
            in_project = select(Session.id).where(Session.project_id == project_id)
            query = query.where(TrainingRun.session_id.in_(in_project))
        ordered = query.order_by(TrainingRun.created_at.desc(), TrainingRun.id)
        return await self._page(ordered, page)

    async def runs_by_use(self, search: RunSearch, page: Page) -> tuple[Sequence[TrainingRun], int]:
        """Return runs, the last used first and ended ones last, and their total number."""
        return await self._page(runs_that_match(search), page)

    async def runs_of_generation(self, generation: str) -> Sequence[TrainingRun]:
        """Return the runs whose current or last head has this generation, without deleted ones."""
        query = select(TrainingRun).where(
            TrainingRun.generation == generation, TrainingRun.deleted_at.is_(None)
        )
        return await self._all(query.order_by(TrainingRun.id))

    async def set_generation(self, run_id: str, generation: str, *, after: str | None) -> bool:
        """Record which head holds a model.

        Args:
            run_id: the run.
            generation: generation of the head that holds it now.
            after: generation of its previous head; None if it had none.

        Returns:
            False, without recording anything, if another head holds it or it was deleted.
        """
        is_current = TrainingRun.generation.is_not_distinct_from(after)
        return await self._change(
            update(TrainingRun)
            .where(TrainingRun.id == run_id, TrainingRun.deleted_at.is_(None))
            .where(or_(is_current, TrainingRun.generation == generation))
            .values(generation=generation)
        )

    async def touch_runs(self, moments: dict[str, datetime]) -> None:
        """Record when runs were last used; later recorded times are kept."""
        async with self._writing() as db:
            # All replicas lock rows in the same order to prevent deadlocks.
            for run_id, moment in sorted(moments.items()):
                await db.execute(
                    update(TrainingRun)
                    .where(TrainingRun.id == run_id, TrainingRun.last_request_at < moment)
                    .values(last_request_at=moment)
                )

    async def inactive_runs(self, run_ids: Collection[str], since: datetime) -> Sequence[str]:
        """Return the runs without a request, and without a session heartbeat, since a time."""
        query = select(TrainingRun.id).join(Session, Session.id == TrainingRun.session_id)
        query = query.where(
            TrainingRun.id.in_(run_ids),
            TrainingRun.deleted_at.is_(None),
            TrainingRun.last_request_at < since,
            Session.last_heartbeat_at < since,
        )
        async with self._reading() as db:
            return (await db.scalars(query.order_by(TrainingRun.id))).all()

    async def delete_run(self, run_id: str, stopped_by: str | None = None) -> None:
        """Delete a run, but keep its checkpoints. This is idempotent.

        Args:
            run_id: the run.
            stopped_by: who stopped it, as `TrainingRun.stopped_by`.
        """
        async with self._writing() as db:
            await _delete_runs(db, TrainingRun.id == run_id, stopped_by)

    async def delete_runs_of_finished_sessions(self) -> bool:
        """Delete runs that were created while their session ended; keep their checkpoints.

        Returns:
            Whether there were any.
        """
        is_over = select(Session.id).where(Session.finished_at.is_not(None))
        async with self._writing() as db:
            return await _delete_runs(db, TrainingRun.session_id.in_(is_over))

    async def deleted_runs(self, run_ids: Collection[str]) -> Sequence[str]:
        """Return the runs among `run_ids` that were deleted."""
        is_deleted = TrainingRun.deleted_at.is_not(None)
        async with self._reading() as db:
            query = select(TrainingRun.id).where(TrainingRun.id.in_(run_ids), is_deleted)
            return (await db.scalars(query)).all()

    async def runs_to_sweep(self, before: datetime) -> Sequence[str]:
        """Return some runs that were deleted before a time and have not been swept since."""
        query = select(TrainingRun.id).where(
            TrainingRun.is_swept.is_(False), TrainingRun.deleted_at < before
        )
        async with self._reading() as db:
            return (await db.scalars(query.limit(_MAX_SWEPT))).all()

    async def mark_swept(self, run_id: str) -> None:
        """Record that all state of a deleted run has been removed."""
        await self._change(
            update(TrainingRun).where(TrainingRun.id == run_id).values(is_swept=True)
        )

    async def is_empty(self) -> bool:
        """Whether there are neither runs nor checkpoints."""
        async with self._reading() as db:
            runs = await db.scalar(select(TrainingRun.id).limit(1))
            return runs is None and await db.scalar(select(Checkpoint.name).limit(1)) is None

    # Sampling sessions

    async def add_sampler(self, sampler: SamplingSession) -> SamplingSession:
        """Record a sampling session; if the id exists, return the existing row."""
        query = select(SamplingSession).where(SamplingSession.id == sampler.id)
        return await self._insert(sampler, query)

    async def sampler(self, sampler_id: str) -> SamplingSession | None:
        """Return a sampling session."""
        return await self._one(select(SamplingSession).where(SamplingSession.id == sampler_id))


async def _delete_runs(
    db: AsyncSession, which: ColumnElement[bool], stopped_by: str | None = None
) -> bool:
    """Delete runs; return whether there were any."""
    is_left = and_(which, TrainingRun.deleted_at.is_(None))
    # All replicas lock rows in the same order to prevent deadlocks.
    left = select(TrainingRun.id).where(is_left).order_by(TrainingRun.id)
    await db.execute(left.with_for_update())
    deleted = update(TrainingRun).where(is_left).values(deleted_at=now(), stopped_by=stopped_by)
    result = await db.execute(deleted.execution_options(synchronize_session=False))
    is_any = isinstance(result, CursorResult) and bool(result.rowcount)
    if is_any:
        await run_ends.announce(db)
    return is_any
