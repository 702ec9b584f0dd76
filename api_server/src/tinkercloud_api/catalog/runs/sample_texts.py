"""The text of some samples of the runs whose owners keep it.

A step of a run has a few places; of the samples in one, that whose request started last stays. Once
a run has samples of too many steps, those of some are deleted. A report that is late or repeated
therefore changes nothing that is newer.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.runs.logged_values import surplus
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import SampleText, TrainingRun
from tinkercloud_protocol.heads.reports.kept_samples import SampleReport

MAX_STEPS = 64
"""Steps of which a run keeps samples."""
_KEYS = ("step", "place")
_VALUES = ("at", "prompt", "prompt_tokens_left_out", "answer", "answer_tokens_left_out")


class SampleTexts(Statements):
    """Records and returns the text of samples, and the runs of which it is kept."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create it in a catalog's database."""
        super().__init__(engine)
        self._add = self._insert_or_replace(SampleText, _VALUES, unless_below="at")

    async def keep(self, run_id: str, at: datetime) -> None:
        """Keep samples of a run whose requests start from a time on. Idempotent."""
        is_off = (TrainingRun.id == run_id, TrainingRun.keeps_samples_since.is_(None))
        await self._change(update(TrainingRun).where(*is_off).values(keeps_samples_since=at))

    async def stop(self, run_id: str) -> None:
        """Keep no further sample of a run. Idempotent."""
        of_run = update(TrainingRun).where(TrainingRun.id == run_id)
        await self._change(of_run.values(keeps_samples_since=None))

    async def delete(self, run_id: str) -> None:
        """Keep no further sample of a run, and delete those that were kept. Idempotent."""
        of_run = update(TrainingRun).where(TrainingRun.id == run_id)
        async with self._writing() as db:
            await db.execute(of_run.values(keeps_samples_since=None))
            await db.execute(delete(SampleText).where(SampleText.run_id == run_id))

    async def keeping(self) -> Sequence[tuple[str, str]]:
        """Return the runs of which samples are kept, with their owners; no deleted ones."""
        query = select(TrainingRun.id, TrainingRun.owner).where(
            TrainingRun.keeps_samples_since.is_not(None), TrainingRun.deleted_at.is_(None)
        )
        async with self._reading() as db:
            return [(row.id, row.owner) for row in await db.execute(query)]

    async def record(self, report: SampleReport) -> None:
        """Record a report. It may be repeated, and late.

        Samples of other owners, and those from before their run's owner wanted them, are ignored.

        Raises:
            Unavailable: the database does not respond; the report was not recorded.
        """
        run_id = report.samples_of
        async with self._writing() as db:
            # A write, so that calls for a run wait for each other on every database and server.
            since = TrainingRun.keeps_samples_since
            of_run = update(TrainingRun).where(TrainingRun.id == run_id, since.is_not(None))
            unchanged = of_run.values(keeps_samples_since=since)
            run = (await db.execute(unchanged.returning(TrainingRun.owner, since))).first()
            if run is None:
                return
            rows = [
                {"run_id": run_id, **{name: getattr(each, name) for name in (*_KEYS, *_VALUES)}}
                for each in report.samples
                if each.owner == run.owner and each.at >= run.keeps_samples_since
            ]
            if not rows:
                return
            await db.execute(self._add, rows)
            kept = SampleText.run_id == run_id
            steps = (await db.scalars(select(SampleText.step).where(kept).distinct())).all()
            if too_many := surplus(sorted(steps), MAX_STEPS):
                await db.execute(delete(SampleText).where(kept, SampleText.step.in_(too_many)))

    async def of_run(self, run_id: str, limit: int) -> Sequence[SampleText]:
        """Return so many samples of a run, the newest first."""
        query = select(SampleText).where(SampleText.run_id == run_id)
        newest = query.order_by(SampleText.at.desc(), SampleText.step, SampleText.place)
        return await self._all(newest.limit(limit))
