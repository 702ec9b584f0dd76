"""The text of samples in the catalog: whose is kept, how many, and what late reports do."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.runs.sample_texts import MAX_STEPS, SampleTexts
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.heads.reports.kept_samples import (
    SAMPLES_PER_STEP,
    KeptSample,
    SampleReport,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "s:train:0"
MOST = MAX_STEPS * SAMPLES_PER_STEP


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """Return a database with a run."""
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_session(
        Session(id="s", owner="me", sdk_version="1", tags=[], user_metadata={})
    )
    await catalog.add_run(
        TrainingRun(id=RUN, session_id="s", owner="me", base_model="m", spec={"owner": "me"})
    )
    yield engine
    await engine.dispose()


@pytest.fixture
def texts(engine: AsyncEngine) -> SampleTexts:
    return SampleTexts(engine)


def a_sample(answer: str = "", *, step: int = 1, seconds: int = 0, owner: str = "me") -> KeptSample:
    """Return a sample of a second after `AT`."""
    return KeptSample(
        step=step,
        place=seconds % SAMPLES_PER_STEP,
        at=AT + timedelta(seconds=seconds),
        owner=owner,
        prompt="p",
        prompt_tokens_left_out=0,
        answer=answer,
        answer_tokens_left_out=0,
    )


def a_report(*samples: KeptSample, run: str = RUN) -> SampleReport:
    return SampleReport(samples_of=run, samples=list(samples))


async def answers(texts: SampleTexts, limit: int = MOST) -> list[str]:
    return [row.answer for row in await texts.of_run(RUN, limit)]


async def test_samples_are_kept_from_the_time_on_when_their_owner_wants_it(
    texts: SampleTexts,
) -> None:
    await texts.record(a_report(a_sample("off", seconds=1)))
    await texts.keep(RUN, AT + timedelta(seconds=2))
    # The switch stays as old as it is.
    await texts.keep(RUN, AT + timedelta(seconds=9))

    await texts.record(
        a_report(a_sample("before", seconds=1), *(a_sample(f"{n}", seconds=n) for n in (2, 3)))
    )
    await texts.record(a_report(a_sample("of another", seconds=4, owner="somebody")))
    await texts.record(a_report(a_sample("of no run"), run="other:train:0"))

    assert await answers(texts) == ["3", "2"]
    assert await answers(texts, limit=1) == ["3"]
    assert await texts.keeping() == [(RUN, "me")]

    await texts.stop(RUN)
    await texts.record(a_report(a_sample("late", seconds=5)))
    assert await answers(texts) == ["3", "2"]
    assert await texts.keeping() == []
    await texts.delete(RUN)
    assert await answers(texts) == []


async def test_a_report_that_is_late_or_repeated_changes_nothing(texts: SampleTexts) -> None:
    await texts.keep(RUN, AT)
    late = a_report(*(a_sample(f"{n}", seconds=n) for n in range(SAMPLES_PER_STEP)))
    await texts.record(late)
    await texts.record(a_report(a_sample("newer", seconds=SAMPLES_PER_STEP)))
    await texts.record(late)

    assert await answers(texts) == ["newer", "3", "2", "1"]


async def test_samples_are_bounded_and_the_newest_and_an_even_spread_of_steps_stay(
    texts: SampleTexts,
) -> None:
    await texts.keep(RUN, AT)
    steps = range(1, 3 * MAX_STEPS)
    for step in steps:
        first = SAMPLES_PER_STEP * step
        await texts.record(
            a_report(*(a_sample(f"{n}", step=step, seconds=n) for n in range(first, first + 6)))
        )

    kept = await texts.of_run(RUN, 2 * MOST)

    found = sorted({row.step for row in kept})
    assert len(kept) == SAMPLES_PER_STEP * len(found)
    assert MAX_STEPS // 2 < len(found) <= MAX_STEPS
    assert found[-1] == kept[0].step == steps[-1]
    assert {later - earlier for earlier, later in pairwise(found)} <= {2, 4}


async def test_samples_are_forgotten_with_the_curve_of_their_run(
    texts: SampleTexts, engine: AsyncEngine
) -> None:
    await texts.keep(RUN, AT)
    await texts.record(a_report(a_sample("old")))
    points = RunPoints(engine)

    assert not await points.forget(now() - timedelta(days=1))
    assert await answers(texts) == ["old"]
    assert await points.forget(now() + timedelta(days=1))
    assert await answers(texts) == []


async def test_no_samples_are_reported_of_a_deleted_run(
    texts: SampleTexts, engine: AsyncEngine
) -> None:
    await texts.keep(RUN, AT)
    await Catalog(engine).delete_run(RUN)

    assert await texts.keeping() == []
