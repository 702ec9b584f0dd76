"""Counts of what an owner uses, and the creation of sessions under ids that the server derives."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, or_, select

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.search_terms import terms_of_session
from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import STORED, Checkpoint, Session, TrainingRun

_IS_OPEN = (
    TrainingRun.deleted_at.is_(None),
    TrainingRun.generation.is_distinct_from(STORED),
)


@dataclass(frozen=True, slots=True)
class Storage:
    """What the checkpoints of an owner occupy."""

    owner: str
    checkpoints: int
    size_bytes: int


class Counts(Statements):
    """A part of the catalog's queries."""

    async def storage(self, owner: str | None, page: Page) -> Sequence[Storage]:
        """Return what checkpoints occupy, by owner, the largest first; owner None means all."""
        size = func.sum(Checkpoint.size_bytes)
        query = select(Checkpoint.owner, func.count(), size).group_by(Checkpoint.owner)
        query = query.where(Checkpoint.size_bytes.is_not(None))
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        ordered = query.order_by(size.desc(), Checkpoint.owner)
        async with self._reading() as db:
            rows = (await db.execute(ordered.offset(page.offset).limit(page.limit))).all()
        return [Storage(name, count, int(size or 0)) for name, count, size in rows]

    async def run_totals(self, session_ids: Collection[str]) -> Mapping[str, tuple[int, datetime]]:
        """Return the number of runs, and the time of their last request, by session with runs."""
        latest = func.max(TrainingRun.last_request_at)
        query = select(TrainingRun.session_id, func.count(), latest)
        query = query.where(TrainingRun.session_id.in_(session_ids))
        async with self._reading() as db:
            rows = (await db.execute(query.group_by(TrainingRun.session_id))).all()
        return {session_id: (count, last) for session_id, count, last in rows}

    async def last_used_runs(
        self, session_ids: Collection[str], most: int
    ) -> Sequence[TrainingRun]:
        """Return the runs of sessions, in order of creation: of each at most some.

        Runs that have not ended come first, then ended ones, each the last used first.
        """
        is_deleted = TrainingRun.deleted_at.is_not(None)
        by_use = (is_deleted, TrainingRun.last_request_at.desc(), TrainingRun.id)
        place = func.row_number().over(partition_by=TrainingRun.session_id, order_by=by_use)
        of_sessions = TrainingRun.session_id.in_(session_ids)
        placed = select(TrainingRun.id, place.label("place")).where(of_sessions).subquery()
        chosen = select(placed.c.id).where(placed.c.place <= most)
        query = select(TrainingRun).where(TrainingRun.id.in_(chosen))
        return await self._all(query.order_by(TrainingRun.created_at, TrainingRun.id))

    async def visible_runs(self, run_ids: Collection[str], visible: Visibility) -> Set[str]:
        """Return which of these runs a list shows, deleted ones included."""
        if not run_ids:
            return frozenset()
        query = select(TrainingRun.id).where(TrainingRun.id.in_(run_ids), visible.of(TrainingRun))
        async with self._reading() as db:
            return frozenset((await db.scalars(query)).all())

    async def count_runs_named(self, run_ids: Collection[str], owner: str | None) -> int:
        """Return how many of these runs exist and were not deleted.

        Args:
            run_ids: ids of runs.
            owner: owner of the runs to count; None means all owners.
        """
        query = select(func.count()).where(
            TrainingRun.id.in_(run_ids), TrainingRun.deleted_at.is_(None)
        )
        if owner is not None:
            query = query.where(TrainingRun.owner == owner)
        async with self._reading() as db:
            return await db.scalar(query) or 0

    async def count_open_runs(self, visible: Visibility) -> Mapping[str, int]:
        """Return the number of runs that have not ended, by their base model."""
        query = select(TrainingRun.base_model, func.count()).group_by(TrainingRun.base_model)
        async with self._reading() as db:
            rows = (await db.execute(query.where(visible.of(TrainingRun), *_IS_OPEN))).all()
        return {name: count for name, count in rows}  # noqa: C416 - rows are no pairs to mypy

    async def count_open_runs_of(self, owners: Collection[str]) -> Mapping[str, int]:
        """Return the number of runs that have not ended, by their owner."""
        query = select(TrainingRun.owner, func.count()).where(TrainingRun.owner.in_(owners))
        async with self._reading() as db:
            rows = (await db.execute(query.where(*_IS_OPEN).group_by(TrainingRun.owner))).all()
        return {name: count for name, count in rows}  # noqa: C416 - rows are no pairs to mypy

    async def open_runs(self, base_model: str, limit: int) -> Sequence[TrainingRun]:
        """Return some runs of a base model that have not ended, the last used first."""
        query = select(TrainingRun).where(TrainingRun.base_model == base_model, *_IS_OPEN)
        newest = (TrainingRun.last_request_at.desc(), TrainingRun.id)
        return await self._all(query.order_by(*newest).limit(limit))

    async def count_active_sessions(self, since: datetime, owner: str | None) -> int:
        """Return the number of open sessions with a heartbeat or a request since a time."""
        is_used = select(TrainingRun.id).where(
            TrainingRun.session_id == Session.id, TrainingRun.last_request_at >= since
        )
        query = select(func.count()).where(
            Session.finished_at.is_(None),
            or_(Session.last_heartbeat_at >= since, is_used.exists()),
        )
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._reading() as db:
            return await db.scalar(query) or 0

    async def open_session(self, owner: str, sdk_version: str) -> Session | None:
        """Return an owner's oldest open session that this client created, outside of projects.

        In a project, others could use it, and the owner may no longer be a member.
        """
        query = select(Session).where(
            Session.owner == owner,
            Session.sdk_version == sdk_version,
            Session.project.is_(None),
            Session.finished_at.is_(None),
        )
        return await self._one(query.order_by(Session.created_at, Session.id).limit(1))

    async def ensure_session(self, session: Session) -> Session:
        """Record a session; if the id exists, return the existing row."""
        existing = select(Session).where(Session.id == session.id)
        return await self._insert(session, existing, *terms_of_session(session))
