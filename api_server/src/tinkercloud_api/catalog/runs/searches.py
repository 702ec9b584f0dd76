"""Searches in the catalog."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import and_, or_, select, tuple_

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import Checkpoint, Session, TrainingRun, now
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath


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


class SearchStatements(Statements):
    """Searches, as `catalog.store` for everything else."""

    async def search_checkpoints(self, wanted: CheckpointSearch) -> Sequence[Checkpoint]:
        """Return the readable checkpoints that match, newest first."""
        query = select(Checkpoint).where(
            Checkpoint.created_at.is_not(None),
            Checkpoint.damage.is_(None),
            or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now()),
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
