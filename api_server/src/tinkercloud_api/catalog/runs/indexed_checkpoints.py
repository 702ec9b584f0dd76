"""Queries and updates of the index of checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, tuple_, update

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import Checkpoint, Session, TrainingRun, now
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_MAX_DAMAGE_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class CheckpointSearch:
    """What checkpoints to search for; None means any."""

    visible: Visibility
    owners: Collection[str] | None = None
    """Owners of the checkpoints; None means all that are visible."""
    project_ids: Collection[str] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """Entries that must all be equal."""
    kind: CheckpointKind | None = None
    base_models: Collection[str] | None = None
    after: tuple[datetime, CheckpointPath] | None = None
    """Time and path of the last checkpoint of the previous page."""
    limit: int = 50


class CheckpointStatements(Statements):
    """Queries and updates of checkpoints, as `catalog.store` for everything else."""

    async def record_pending_checkpoint(self, path: CheckpointPath, owner: str) -> datetime | None:
        """Record that a save was requested, so that the checkpoint's manifest is read later.

        Returns:
            The recorded time, with which `cancel_pending_checkpoint` undoes this; None if the
            checkpoint was already pending.
        """
        asked_at = now()
        new = Checkpoint(
            run_id=path.run_id, kind=str(path.kind), name=path.name, owner=owner, asked_at=asked_at
        )
        row = await self._insert(new, select(Checkpoint).where(_is(path)))
        if row is new:
            return asked_at
        # Also update a pending checkpoint, so that the earlier request cannot cancel it.
        await self._change(
            update(Checkpoint).where(_is(path)).values(is_indexed=False, asked_at=asked_at)
        )
        return asked_at if row.is_indexed else None

    async def cancel_pending_checkpoint(self, path: CheckpointPath, asked_at: datetime) -> None:
        """Undo `record_pending_checkpoint`, unless the checkpoint was requested again since."""
        is_pending = and_(
            _is(path), Checkpoint.asked_at == asked_at, Checkpoint.is_indexed.is_(False)
        )
        is_new = Checkpoint.created_at.is_(None)
        async with self._writing() as db:
            await db.execute(delete(Checkpoint).where(is_pending, is_new))
            await db.execute(update(Checkpoint).where(is_pending).values(is_indexed=True))

    async def size_of_checkpoints(self, owner: str) -> int:
        """Return the total bytes of an owner's checkpoints."""
        query = select(func.sum(Checkpoint.size_bytes)).where(Checkpoint.owner == owner)
        async with self._reading() as db:
            return await db.scalar(query) or 0

    async def largest_checkpoints(self, owner: str, count: int) -> Sequence[Checkpoint]:
        """Return an owner's largest checkpoints, largest first."""
        query = select(Checkpoint).where(Checkpoint.owner == owner, _is_listed())
        return await self._all(query.order_by(Checkpoint.size_bytes.desc()).limit(count))

    async def index_checkpoint(self, manifest: CheckpointManifest) -> None:
        """Add a checkpoint to the index from its manifest, or update it."""
        await self.record_pending_checkpoint(manifest.path, manifest.owner)
        await self.reindex_checkpoint(manifest)

    async def reindex_checkpoint(self, manifest: CheckpointManifest) -> None:
        """Update a checkpoint in the index from its manifest; do nothing if it is not indexed.

        If this manifest was already recorded, an expiry time that was set since is kept.
        """
        path = manifest.path
        is_another = Checkpoint.created_at.is_distinct_from(manifest.created_at)
        async with self._writing() as db:
            await db.execute(
                update(Checkpoint)
                .where(_is(path), is_another)
                .values(
                    owner=manifest.owner,
                    created_at=manifest.created_at,
                    size_bytes=manifest.size_bytes,
                    base_model=manifest.base_model,
                    user_metadata=manifest.user_metadata,
                    expires_at=manifest.expires_at,
                )
            )
            known = update(Checkpoint).where(_is(path)).values(is_indexed=True, damage=None)
            await db.execute(known)

    async def mark_damaged(self, path: CheckpointPath, damage: str, *, is_indexed: bool) -> None:
        """Record why a checkpoint's manifest cannot be read, and whether to try again."""
        await self._change(
            update(Checkpoint)
            .where(_is(path))
            .values(damage=damage[:_MAX_DAMAGE_CHARACTERS], is_indexed=is_indexed)
        )

    async def unindexed_checkpoints(self, visible: Visibility) -> Sequence[Checkpoint]:
        """Return the pending checkpoints, whose manifests must be read."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(False))
        return await self._all(query.where(visible.of(Checkpoint)))

    async def unindexed_checkpoints_of_runs(self, run_ids: Sequence[str]) -> Sequence[Checkpoint]:
        """Return the pending checkpoints of runs."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(False))
        return await self._all(query.where(Checkpoint.run_id.in_(run_ids)))

    async def checkpoint(self, path: CheckpointPath) -> Checkpoint | None:
        """Return a checkpoint that exists, including a damaged one."""
        query = select(Checkpoint).where(_is(path), _exists())
        return await self._one(query)

    async def names_of_checkpoints(self, run_id: str, kind: CheckpointKind) -> set[str]:
        """Return the names of a run's checkpoints of a kind that exist, including damaged ones."""
        of_kind = and_(Checkpoint.run_id == run_id, Checkpoint.kind == str(kind))
        async with self._reading() as db:
            return set(await db.scalars(select(Checkpoint.name).where(of_kind, _exists())))

    async def is_known(self, path: CheckpointPath) -> bool:
        """Whether a checkpoint exists or is pending."""
        return await self._one(select(Checkpoint).where(_is(path))) is not None

    async def checkpoints_of_runs(self, run_ids: Sequence[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of runs, oldest first."""
        query = select(Checkpoint).where(Checkpoint.run_id.in_(run_ids), _is_listed())
        return await self._all(query.order_by(_time(), Checkpoint.name))

    async def checkpoints(
        self, visible: Visibility, page: Page
    ) -> tuple[Sequence[Checkpoint], int]:
        """Return checkpoints, newest first, and their total number."""
        query = select(Checkpoint).where(_is_listed(), visible.of(Checkpoint))
        return await self._page(query.order_by(_time().desc()), page)

    async def search_checkpoints(self, wanted: CheckpointSearch) -> Sequence[Checkpoint]:
        """Return the readable checkpoints that match, newest first."""
        query = select(Checkpoint).where(
            Checkpoint.created_at.is_not(None),
            Checkpoint.damage.is_(None),
            _is_listed(),
            wanted.visible.of(Checkpoint),
        )
        if wanted.owners is not None:
            query = query.where(Checkpoint.owner.in_(wanted.owners))
        if wanted.kind is not None:
            query = query.where(Checkpoint.kind == str(wanted.kind))
        if wanted.base_models is not None:
            query = query.where(Checkpoint.base_model.in_(wanted.base_models))
        if wanted.project_ids is not None:
            of_projects = (
                select(TrainingRun.id)
                .join(Session, Session.id == TrainingRun.session_id)
                .where(Session.project_id.in_(wanted.project_ids))
            )
            query = query.where(Checkpoint.run_id.in_(of_projects))
        for key, value in wanted.user_metadata.items():
            query = query.where(Checkpoint.user_metadata[key].as_string() == value)
        name = (Checkpoint.run_id, Checkpoint.kind, Checkpoint.name)
        if wanted.after is not None:
            moment, path = wanted.after
            is_later = tuple_(*name) > tuple_(path.run_id, str(path.kind), path.name)
            is_same = and_(Checkpoint.created_at == moment, is_later)
            query = query.where(or_(Checkpoint.created_at < moment, is_same))
        ordered = query.order_by(Checkpoint.created_at.desc(), *name)
        return await self._all(ordered.limit(wanted.limit))

    async def set_expiry(self, path: CheckpointPath, expires_at: datetime | None) -> None:
        """Set the expiry time of a checkpoint in the index; None means never."""
        await self._change(update(Checkpoint).where(_is(path)).values(expires_at=expires_at))

    async def expired_checkpoints(self, moment: datetime) -> Sequence[Checkpoint]:
        """Return the expired checkpoints that are not being overwritten."""
        query = select(Checkpoint).where(Checkpoint.is_indexed.is_(True))
        return await self._all(query.where(Checkpoint.expires_at <= moment))

    async def forget_checkpoint(self, path: CheckpointPath) -> None:
        """Remove a checkpoint from the index."""
        await self._change(delete(Checkpoint).where(_is(path)))

    async def set_public(self, path: CheckpointPath, *, is_public: bool) -> None:
        """Make a checkpoint readable by everybody, or only by its owner."""
        await self._change(update(Checkpoint).where(_is(path)).values(is_public=is_public))


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
