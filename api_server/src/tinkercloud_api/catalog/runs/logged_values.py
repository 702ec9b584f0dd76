"""Values that clients log for their runs, such as rewards: at most so many of each name.

A value that is logged again at its step replaces the earlier one, so a call can be repeated.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import LoggedValue, TrainingRun
from tinkercloud_protocol.heads.reports.thinned_curves import MAX_POINTS
from tinkercloud_protocol.responses.run_states import LoggedPoint
from tinkercloud_protocol.wire.errors import InvalidRequest

MAX_NAMES = 32
"""Names of a run."""


class LoggedValues(Statements):
    """Records and returns the values of runs."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create it in a catalog's database."""
        super().__init__(engine)
        self._add = self._insert_or_replace(LoggedValue, ("value", "at"))

    async def log(self, run_id: str, step: int, values: Mapping[str, float], at: datetime) -> None:
        """Record values of a step.

        Raises:
            InvalidRequest: the run would have too many names.
        """
        rows = [
            {"run_id": run_id, "name": name, "step": step, "value": value, "at": at}
            for name, value in sorted(values.items())
        ]
        async with self._writing() as db:
            # One call of a run after the other, on all servers.
            await db.execute(
                select(TrainingRun.id).where(TrainingRun.id == run_id).with_for_update()
            )
            of_run = select(func.count(LoggedValue.name.distinct()))
            others = of_run.where(LoggedValue.run_id == run_id, LoggedValue.name.not_in(values))
            if (await db.scalar(others) or 0) + len(values) > MAX_NAMES:
                raise InvalidRequest(
                    f"metrics: training run {run_id} would have more than {MAX_NAMES} names; use"
                    " fewer"
                )
            await db.execute(self._add, rows)
            for name in sorted(values):
                await _thin_out(db, run_id, name)

    async def of_runs(self, run_ids: Sequence[str]) -> dict[str, dict[str, list[LoggedPoint]]]:
        """Return the values of each of some runs by name, in the order of their steps."""
        key = (LoggedValue.run_id, LoggedValue.name, LoggedValue.step)
        columns = (*key, LoggedValue.value, LoggedValue.at)
        query = select(*columns).where(LoggedValue.run_id.in_(run_ids))
        async with self._reading() as db:
            rows = await db.execute(query.order_by(*key))
        found: dict[str, dict[str, list[LoggedPoint]]] = {run_id: {} for run_id in run_ids}
        for run_id, name, step, value, at in rows:
            point = LoggedPoint.model_construct(step=step, value=value, time=at)
            found[run_id].setdefault(name, []).append(point)
        return found


async def _thin_out(db: AsyncSession, run_id: str, name: str) -> None:
    """Delete what is too much of a name: of each stretch of steps, the last value stays."""
    of_name = (LoggedValue.run_id == run_id, LoggedValue.name == name)
    steps = (await db.scalars(select(LoggedValue.step).where(*of_name))).all()
    too_many = surplus(sorted(steps), MAX_POINTS)
    if too_many:
        await db.execute(delete(LoggedValue).where(*of_name, LoggedValue.step.in_(too_many)))


def surplus(steps: Sequence[int], most: int) -> list[int]:
    """Return which steps to delete, so that stretches of one width have one each, their last.

    Args:
        steps: in their order.
        most: how many may stay.
    """
    found, width = list[int](), 1
    while len(steps) - len(found) > most:
        width *= 2
        found = [step for step, following in pairwise(steps) if step // width == following // width]
    return found
