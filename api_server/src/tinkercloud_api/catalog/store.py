"""What the server asks of its catalog: named questions and statements, nothing else.

Every statement may be repeated: creating what exists returns what exists. One that the database
does not answer raises Unavailable, which asks the client to send its request again.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinkercloud_api.catalog.statements import Page, Statements
from tinkercloud_api.catalog.tables import (
    ApiKey,
    Checkpoint,
    SamplingSession,
    Session,
    TrainingRun,
    now,
)
from tinkercloud_protocol.checkpoints import Manifest
from tinkercloud_protocol.paths import CheckpointPath

_MAX_DAMAGE_CHARACTERS = 1000
_MAX_SWEPT = 100
"""Runs, or sessions, that one round of housekeeping sweeps up."""


class Catalog(Statements):
    """Queries and statements over one database."""

    async def ping(self) -> None:
        """Return if the database answers."""
        async with self._reading() as session:
            await session.execute(select(1))

    # Keys

    async def add_key(
        self,
        *,
        key_hash: str,
        name: str,
        owner: str,
        role: str,
        expires_at: datetime | None = None,
    ) -> ApiKey:
        """Register a key; one that is registered already is returned as it is."""
        return await self._insert(
            ApiKey(key_hash=key_hash, name=name, owner=owner, role=role, expires_at=expires_at),
            select(ApiKey).where(ApiKey.key_hash == key_hash),
        )

    async def add_bootstrap_key(
        self, *, key_hash: str, name: str, owner: str, role: str
    ) -> tuple[ApiKey, Sequence[int]]:
        """Register the key of the settings, and revoke those that came from there before.

        One that has been revoked stays so, and revokes nothing.

        Returns:
            The key, and the ids of the keys it has replaced.
        """
        row = await self._insert(
            ApiKey(key_hash=key_hash, name=name, owner=owner, role=role, is_bootstrap=True),
            select(ApiKey).where(ApiKey.key_hash == key_hash),
        )
        if not row.is_valid(now()):
            return row, []
        # One that was made by `keys create` before it was configured is rotated like the others.
        configured = update(ApiKey).where(ApiKey.id == row.id).values(is_bootstrap=True)
        is_replaced = and_(ApiKey.is_bootstrap, ApiKey.id != row.id, ApiKey.revoked_at.is_(None))
        replaced = update(ApiKey).where(is_replaced).values(revoked_at=now())
        async with self._writing() as session:
            await session.execute(configured)
            found = await session.scalars(replaced.returning(ApiKey.id))
            return row, sorted(found.all())

    async def key(self, key_hash: str) -> ApiKey | None:
        """Return a key that has not been revoked; it may have expired."""
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

    async def last_use_of_key(self, key_id: int) -> datetime | None:
        """Return when a key was last used, as far as that has been recorded."""
        row = await self._one(select(ApiKey).where(ApiKey.id == key_id))
        return row.last_used_at if row is not None else None

    async def touch_keys(self, moments: dict[int, datetime]) -> None:
        """Record when keys were last used."""
        async with self._writing() as connection:
            # All replicas lock rows in one order, or two could wait for each other.
            for key_id, moment in sorted(moments.items()):
                is_later = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < moment)
                await connection.execute(
                    update(ApiKey).where(ApiKey.id == key_id, is_later).values(last_used_at=moment)
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

    async def sessions_named(self, session_ids: Sequence[str]) -> Sequence[Session]:
        """Return some sessions, newest first."""
        query = select(Session).where(Session.id.in_(session_ids))
        return await self._all(query.order_by(Session.created_at.desc(), Session.id))

    async def expired_sessions(self, since: datetime) -> Sequence[str]:
        """Return some sessions that are not over, and were not heard of or used since then."""
        is_used = select(TrainingRun.id).where(
            TrainingRun.session_id == Session.id, TrainingRun.last_request_at >= since
        )
        query = select(Session.id).where(
            Session.finished_at.is_(None), Session.last_heartbeat_at < since, ~is_used.exists()
        )
        async with self._reading() as connection:
            return (await connection.scalars(query.order_by(Session.id).limit(_MAX_SWEPT))).all()

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
        """Finish a session and delete its runs, whose checkpoints stay.

        Returns:
            False if it was finished before; the first reason stays.
        """
        is_open = and_(Session.id == session_id, Session.finished_at.is_(None))
        finished = update(Session).where(is_open)
        finished = finished.values(finished_at=now(), finish_reason=reason, finish_detail=detail)
        async with self._writing() as connection:
            result = await connection.execute(finished.returning(Session.id))
            is_first = result.first() is not None
            await _delete_runs(connection, TrainingRun.session_id == session_id)
        return is_first

    async def runs_of_session(self, session_id: str) -> Sequence[TrainingRun]:
        """Return a session's runs, in order of their creation."""
        return await self.runs_of_sessions([session_id])

    async def runs_of_sessions(self, session_ids: Sequence[str]) -> Sequence[TrainingRun]:
        """Return the runs of some sessions, in order of their creation."""
        query = select(TrainingRun).where(TrainingRun.session_id.in_(session_ids))
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

    async def runs_of_generation(self, generation: str) -> Sequence[TrainingRun]:
        """Return the runs that a head holds or held last, without deleted ones."""
        query = select(TrainingRun).where(
            TrainingRun.generation == generation, TrainingRun.deleted_at.is_(None)
        )
        return await self._all(query.order_by(TrainingRun.id))

    async def set_generation(self, run_id: str, generation: str, *, after: str | None) -> bool:
        """Record which head holds a model.

        Args:
            run_id: the run.
            generation: of the head that holds it now.
            after: of the head that held it before; None if none did.

        Returns:
            False if another one holds it by now, or it was deleted, and nothing was recorded.
        """
        is_current = TrainingRun.generation.is_not_distinct_from(after)
        return await self._change(
            update(TrainingRun)
            .where(TrainingRun.id == run_id, TrainingRun.deleted_at.is_(None))
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

    async def inactive_runs(self, run_ids: Collection[str], since: datetime) -> Sequence[str]:
        """Return which of some runs had no request, and their sessions no heartbeat, since then."""
        query = select(TrainingRun.id).join(Session, Session.id == TrainingRun.session_id)
        query = query.where(
            TrainingRun.id.in_(run_ids),
            TrainingRun.deleted_at.is_(None),
            TrainingRun.last_request_at < since,
            Session.last_heartbeat_at < since,
        )
        async with self._reading() as session:
            return (await session.scalars(query.order_by(TrainingRun.id))).all()

    async def delete_run(self, run_id: str) -> None:
        """Delete a run; its checkpoints stay. Repeating it is fine."""
        async with self._writing() as connection:
            await _delete_runs(connection, TrainingRun.id == run_id)

    async def delete_runs_of_finished_sessions(self) -> None:
        """Delete runs that were begun as their sessions were finished; their checkpoints stay."""
        is_over = select(Session.id).where(Session.finished_at.is_not(None))
        async with self._writing() as connection:
            await _delete_runs(connection, TrainingRun.session_id.in_(is_over))

    async def deleted_runs(self, run_ids: Collection[str]) -> Sequence[str]:
        """Return which of some runs were deleted."""
        is_deleted = TrainingRun.deleted_at.is_not(None)
        async with self._reading() as session:
            query = select(TrainingRun.id).where(TrainingRun.id.in_(run_ids), is_deleted)
            return (await session.scalars(query)).all()

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

    async def is_empty(self) -> bool:
        """Whether there are neither runs nor checkpoints."""
        async with self._reading() as session:
            runs = await session.scalar(select(TrainingRun.id).limit(1))
            return runs is None and await session.scalar(select(Checkpoint.name).limit(1)) is None

    # Sampling sessions

    async def add_sampler(self, sampler: SamplingSession) -> SamplingSession:
        """Record a sampling session; one of the same id is returned as it is."""
        query = select(SamplingSession).where(SamplingSession.id == sampler.id)
        return await self._insert(sampler, query)

    async def sampler(self, sampler_id: str) -> SamplingSession | None:
        """Return a sampling session."""
        return await self._one(select(SamplingSession).where(SamplingSession.id == sampler_id))

    # Checkpoints

    async def record_pending_checkpoint(self, path: CheckpointPath, owner: str) -> datetime | None:
        """Record that a checkpoint was asked for: its manifest must be looked at.

        Returns:
            The moment that is recorded, with which `cancel_pending_checkpoint` undoes this; None if
            the checkpoint was asked for before, and is still waited for.
        """
        asked_at = now()
        new = Checkpoint(
            run_id=path.run_id, kind=str(path.kind), name=path.name, owner=owner, asked_at=asked_at
        )
        row = await self._insert(new, select(Checkpoint).where(_is(path)))
        if row is new:
            return asked_at
        # Also of one that is waited for: whoever asked before must not withdraw it now.
        await self._change(
            update(Checkpoint).where(_is(path)).values(is_indexed=False, asked_at=asked_at)
        )
        return asked_at if row.is_indexed else None

    async def cancel_pending_checkpoint(self, path: CheckpointPath, asked_at: datetime) -> None:
        """Undo `record_pending_checkpoint`, unless somebody has asked for the checkpoint since."""
        is_asked_for = and_(
            _is(path), Checkpoint.asked_at == asked_at, Checkpoint.is_indexed.is_(False)
        )
        is_new = Checkpoint.created_at.is_(None)
        async with self._writing() as session:
            await session.execute(delete(Checkpoint).where(is_asked_for, is_new))
            await session.execute(update(Checkpoint).where(is_asked_for).values(is_indexed=True))

    async def size_of_checkpoints(self, owner: str) -> int:
        """Return the bytes of an owner's checkpoints."""
        query = select(func.sum(Checkpoint.size_bytes)).where(Checkpoint.owner == owner)
        async with self._reading() as session:
            return await session.scalar(query) or 0

    async def largest_checkpoints(self, owner: str, count: int) -> Sequence[Checkpoint]:
        """Return an owner's largest checkpoints, the largest first."""
        query = select(Checkpoint).where(Checkpoint.owner == owner, _is_listed())
        return await self._all(query.order_by(Checkpoint.size_bytes.desc()).limit(count))

    async def index_checkpoint(self, manifest: Manifest) -> None:
        """Record what a manifest says, of a checkpoint that nobody may have asked for."""
        await self.record_pending_checkpoint(manifest.path, manifest.owner)
        await self.reindex_checkpoint(manifest)

    async def reindex_checkpoint(self, manifest: Manifest) -> None:
        """Record what the manifest says of a checkpoint in the index; one that is not stays so.

        If it was recorded before, what was set since (`set_expiry`) stays.
        """
        path = manifest.path
        is_another = Checkpoint.created_at.is_distinct_from(manifest.created_at)
        async with self._writing() as session:
            await session.execute(
                update(Checkpoint)
                .where(_is(path), is_another)
                .values(
                    owner=manifest.owner,
                    created_at=manifest.created_at,
                    size_bytes=manifest.size_bytes,
                    user_metadata=manifest.user_metadata,
                    expires_at=manifest.expires_at,
                )
            )
            known = update(Checkpoint).where(_is(path)).values(is_indexed=True, damage=None)
            await session.execute(known)

    async def mark_damaged(self, path: CheckpointPath, damage: str, *, is_indexed: bool) -> None:
        """Record why the manifest of a checkpoint can't be read, and whether to look again."""
        await self._change(
            update(Checkpoint)
            .where(_is(path))
            .values(damage=damage[:_MAX_DAMAGE_CHARACTERS], is_indexed=is_indexed)
        )

    async def unindexed_checkpoints(self, owner: str | None) -> Sequence[Checkpoint]:
        """Return the checkpoints whose manifests must be looked at; owner None: everybody's."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(False))
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        return await self._all(query)

    async def unindexed_checkpoints_of_runs(self, run_ids: Sequence[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs whose manifests must be looked at."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(False))
        return await self._all(query.where(Checkpoint.run_id.in_(run_ids)))

    async def checkpoint(self, path: CheckpointPath) -> Checkpoint | None:
        """Return a checkpoint that exists, damaged or not."""
        query = select(Checkpoint).where(_is(path), _exists())
        return await self._one(query)

    async def is_known(self, path: CheckpointPath) -> bool:
        """Whether a checkpoint exists, or was asked for."""
        return await self._one(select(Checkpoint).where(_is(path))) is not None

    async def checkpoints_of_runs(self, run_ids: Sequence[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs, oldest first."""
        query = select(Checkpoint).where(Checkpoint.run_id.in_(run_ids), _is_listed())
        return await self._all(query.order_by(_time(), Checkpoint.name))

    async def checkpoints(self, owner: str | None, page: Page) -> tuple[Sequence[Checkpoint], int]:
        """Return checkpoints, newest first, and how many there are in all."""
        query = select(Checkpoint).where(_is_listed())
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        return await self._page(query.order_by(_time().desc()), page)

    async def set_expiry(self, path: CheckpointPath, expires_at: datetime | None) -> None:
        """Let a checkpoint in the index expire at a moment; None means never."""
        await self._change(update(Checkpoint).where(_is(path)).values(expires_at=expires_at))

    async def expired_checkpoints(self, moment: datetime) -> Sequence[Checkpoint]:
        """Return the checkpoints whose time to live has passed and that nobody saves anew."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(True))
        return await self._all(query.where(Checkpoint.expires_at <= moment))

    async def forget_checkpoint(self, path: CheckpointPath) -> None:
        """Drop a checkpoint from the index."""
        await self._change(delete(Checkpoint).where(_is(path)))

    async def set_public(self, path: CheckpointPath, *, is_public: bool) -> None:
        """Let everybody read a checkpoint, or only its owner."""
        await self._change(update(Checkpoint).where(_is(path)).values(is_public=is_public))


async def _delete_runs(connection: AsyncSession, which: ColumnElement[bool]) -> None:
    is_left = and_(which, TrainingRun.deleted_at.is_(None))
    # All replicas lock rows in one order, or two could wait for each other.
    left = select(TrainingRun.id).where(is_left).order_by(TrainingRun.id)
    await connection.execute(left.with_for_update())
    deleted = update(TrainingRun).where(is_left).values(deleted_at=now())
    await connection.execute(deleted.execution_options(synchronize_session=False))


def _is_listed() -> ColumnElement[bool]:
    is_left = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now())
    return and_(_exists(), is_left)


def _exists() -> ColumnElement[bool]:
    return or_(Checkpoint.created_at.is_not(None), Checkpoint.damage.is_not(None))


def _time() -> ColumnElement[datetime]:
    return func.coalesce(Checkpoint.created_at, Checkpoint.asked_at)


def _is(path: CheckpointPath) -> ColumnElement[bool]:
    return and_(
        Checkpoint.run_id == path.run_id,
        Checkpoint.kind == str(path.kind),
        Checkpoint.name == path.name,
    )
