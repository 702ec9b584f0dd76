"""What checkpoints occupied on each day: measured once a day, and summed up for a month.

A checkpoint that was deleted in a month still counts for the days before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import Checkpoint, Session, StoredDay, TrainingRun


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """What an owner's checkpoints of a base model, in a project, have occupied."""

    owner: str
    project_id: str | None
    base_model: str
    byte_days: int
    """The sum of the bytes of each day."""
    day: int | None = None
    """Days from 1970-01-01 in UTC; None if it sums up several days."""


class StoredDays(Statements):
    """Measures and sums up the storage of checkpoints."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Open the measurements in a catalog's database."""
        super().__init__(engine)
        self._ensure = self._insert_into(StoredDay).on_conflict_do_nothing()
        self._measured = -1

    async def measure(self, day: int) -> None:
        """Record what checkpoints occupy now, unless this was done before on the same day.

        Args:
            day: days from 1970-01-01 in UTC.

        Raises:
            Unavailable: the database does not respond.
        """
        if day == self._measured:
            return
        project = func.coalesce(Session.project_id, "")
        base_model = func.coalesce(Checkpoint.base_model, "")
        stored = (
            select(Checkpoint.owner, project, base_model, func.sum(Checkpoint.size_bytes))
            .join(TrainingRun, TrainingRun.id == Checkpoint.run_id, isouter=True)
            .join(Session, Session.id == TrainingRun.session_id, isouter=True)
            .where(Checkpoint.size_bytes.is_not(None))
            .group_by(Checkpoint.owner, project, base_model)
        )
        measured = select(StoredDay.day).where(StoredDay.day == day).limit(1)
        async with self._writing() as db:
            if await db.scalar(measured) is not None:
                # By another process, or before a restart.
                self._measured = day
                return
            found = [
                {
                    "day": day,
                    "owner": owner,
                    "project_id": project_id,
                    "base_model": name,
                    "size_bytes": int(size or 0),
                }
                for owner, project_id, name, size in await db.execute(stored)
            ]
            if found:
                await db.execute(self._ensure, found)
        self._measured = day

    async def stored(
        self, owner: str | None, since: int, until: int, *, by_day: bool = False
    ) -> Sequence[StoredBytes]:
        """Return sums of the days from `since` to before `until`.

        Args:
            owner: the owner; None means all owners.
            since: the first day.
            until: the day after the last one.
            by_day: whether to sum up by day, with all projects, rather than by project.
        """
        group = (
            StoredDay.owner,
            StoredDay.day if by_day else StoredDay.project_id,
            StoredDay.base_model,
        )
        query = select(*group, func.sum(StoredDay.size_bytes)).group_by(*group).order_by(*group)
        query = query.where(StoredDay.day >= since, StoredDay.day < until)
        if owner is not None:
            query = query.where(StoredDay.owner == owner)
        async with self._reading() as db:
            rows = (await db.execute(query)).all()
        return [
            StoredBytes(who, None, base_model, int(size), day=cast("int", third))
            if by_day
            else StoredBytes(who, cast("str", third) or None, base_model, int(size))
            for who, third, base_model, size in rows
        ]
