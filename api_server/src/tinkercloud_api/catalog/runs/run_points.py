"""The curves of runs, as heads report them.

A row has its number of steps, which only grows. A report that is late or repeated, or recorded by
several servers, therefore changes nothing that is already known.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, delete, or_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import LoggedValue, RunPoint, SampleText, TrainingRun
from tinkercloud_protocol.heads.reports.thinned_curves import Curve, CurvePoint, CurveReport

_VALUES = ("steps", "step", "at", "metrics")
_COLUMNS = {name: getattr(RunPoint, name) for name in ("number", *_VALUES)}
_OF_RUNS = (RunPoint, LoggedValue, SampleText)
"""What is forgotten together."""
_MAX_FORGOTTEN = 100
"""Runs whose points one call of `forget` deletes at most."""


class RunPoints(Statements):
    """Records and returns the points of runs."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create it in a catalog's database."""
        super().__init__(engine)
        self._add = self._insert_or_replace(RunPoint, _VALUES, unless_below="steps")

    async def record(self, report: CurveReport) -> None:
        """Record a report. It may be repeated, and late. That of an unknown run is ignored.

        Raises:
            Unavailable: the database does not respond; the report was not recorded.
        """
        run_id, stride = report.curve_of, report.stride
        rows = [_row(run_id, stride, point) for point in report.points]
        if not rows:
            return
        async with self._writing() as db:
            known = select(TrainingRun.id).where(TrainingRun.id == run_id)
            if await db.scalar(known) is None:
                return
            await db.execute(self._add, rows)
            if rows[0]["number"] == 0:
                merged = (RunPoint.run_id == run_id, RunPoint.stride < stride)
                await db.execute(delete(RunPoint).where(*merged))

    async def curves(self, run_ids: Sequence[str]) -> dict[str, Curve]:
        """Return the points of each of some runs, the earliest first; none without a report."""
        # Columns: entities of hundreds of points would take most of the time of a curve.
        columns = (RunPoint.run_id, RunPoint.stride, *_COLUMNS.values())
        query = select(*columns).where(RunPoint.run_id.in_(run_ids))
        async with self._reading() as db:
            found = await db.execute(
                query.order_by(RunPoint.run_id, RunPoint.stride, RunPoint.number)
            )
        curves = {run_id: Curve() for run_id in run_ids}
        for run_id, of_run in groupby(found, key=attrgetter("run_id")):
            rows = list(of_run)
            stride = rows[-1].stride
            points = [_point(row) for row in rows if row.stride == stride]
            curves[run_id] = Curve(stride, points)
        return curves

    async def last_points(self, run_ids: Sequence[str]) -> dict[str, CurvePoint]:
        """Return the last point that each of some runs has reported, without those that have none.

        Args:
            run_ids: the runs; at most a page of them.
        """
        # Subqueries of one row each, which both databases answer from the primary key.
        newest = [
            select(column)
            .where(RunPoint.run_id == TrainingRun.id)
            .order_by(RunPoint.stride.desc(), RunPoint.number.desc())
            .limit(1)
            .scalar_subquery()
            .label(name)
            for name, column in _COLUMNS.items()
        ]
        query = select(TrainingRun.id, *newest).where(TrainingRun.id.in_(run_ids))
        async with self._reading() as db:
            rows = (await db.execute(query)).all()
        return {row.id: _point(row) for row in rows if row.steps is not None}

    async def forget(self, before: datetime) -> bool:
        """Delete the points, logged values and samples of some runs without a request since a time.

        Returns:
            Whether there were any.
        """
        kept = [select(each).where(each.run_id == TrainingRun.id) for each in _OF_RUNS]
        has_some = or_(*(each.exists() for each in kept))
        old = select(TrainingRun.id).where(TrainingRun.last_request_at < before, has_some)
        chosen = old.limit(_MAX_FORGOTTEN)
        async with self._writing() as db:
            runs = (await db.scalars(chosen)).all()
            for table in _OF_RUNS:
                await db.execute(delete(table).where(table.run_id.in_(runs)))
        return bool(runs)


def _row(run_id: str, stride: int, point: CurvePoint) -> dict[str, object]:
    return {
        "run_id": run_id,
        "stride": stride,
        "number": point.index,
        **{name: getattr(point, name) for name in _VALUES},
    }


def _point(row: Row[Any]) -> CurvePoint:
    return CurvePoint(
        index=row.number, steps=row.steps, step=row.step, at=row.at, metrics=row.metrics
    )
