"""The ledger of usage and the index of checkpoints, as the SDK's billing calls group them."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from tinkercloud_api.catalog.schema.tables import Checkpoint, Session, TrainingRun, UsageHour
from tinkercloud_api.catalog.usage.stored_days import StoredDays


@dataclass(frozen=True, slots=True)
class SessionHour:
    """What a session has used of a base model in an hour."""

    hour: int
    """As `UsageHour.hour`."""
    owner: str
    session_id: str
    base_model: str
    training_tokens: int
    """Tokens of forward and backward passes, and of forward passes alone."""
    prefill_tokens: int
    """Prompt tokens that were computed."""
    cached_tokens: int
    """Prompt tokens that were read from a cache."""
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class ProjectStorage:
    """What the checkpoints of an owner's project occupy."""

    project_id: str | None
    owner: str
    checkpoints: int
    size_bytes: int


class Billing(StoredDays):
    """A part of the catalog's queries."""

    async def hours(
        self, owner: str | None, since: int, until: int, limit: int
    ) -> Sequence[SessionHour]:
        """Return what was used in the hours from `since` to before `until`, the earliest first.

        Args:
            owner: the owner; None means all owners.
            since: the first hour, as `UsageHour.hour`.
            until: the hour after the last one.
            limit: maximum number of rows.
        """
        group = (UsageHour.hour, UsageHour.owner, UsageHour.session_id, UsageHour.base_model)
        query = select(
            *group,
            func.sum(UsageHour.trained_tokens + UsageHour.forward_tokens),
            func.sum(UsageHour.prefill_tokens),
            func.sum(UsageHour.cached_tokens),
            func.sum(UsageHour.sampled_tokens),
        ).where(UsageHour.hour >= since, UsageHour.hour < until)
        if owner is not None:
            query = query.where(UsageHour.owner == owner)
        ordered = query.group_by(*group).order_by(*group).limit(limit)
        async with self._reading() as db:
            rows = (await db.execute(ordered)).all()
        return [SessionHour(*row[:4], *(int(amount) for amount in row[4:])) for row in rows]

    async def storage(self, owner: str | None, project_id: str | None) -> Sequence[ProjectStorage]:
        """Return what checkpoints occupy, by project and owner.

        Args:
            owner: the owner; None means all owners.
            project_id: the project; None means all, and checkpoints without one.
        """
        group = (Session.project_id, Checkpoint.owner)
        query = (
            select(*group, func.count(), func.sum(Checkpoint.size_bytes))
            .join(TrainingRun, TrainingRun.id == Checkpoint.run_id, isouter=True)
            .join(Session, Session.id == TrainingRun.session_id, isouter=True)
            .where(Checkpoint.size_bytes.is_not(None))
        )
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        if project_id is not None:
            query = query.where(Session.project_id == project_id)
        async with self._reading() as db:
            rows = (await db.execute(query.group_by(*group).order_by(*group))).all()
        return [
            ProjectStorage(project, who, count, int(size or 0))
            for project, who, count, size in rows
        ]
