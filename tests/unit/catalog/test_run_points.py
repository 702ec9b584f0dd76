"""The curves of runs in the catalog: what heads report late, twice or of nobody's run."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.heads.reports.run_curves import MAX_POINTS, Curve, CurveReport

AT = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "s:train:0"


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_session(
        Session(id="s", owner="me", sdk_version="1", tags=[], user_metadata={})
    )
    await catalog.add_run(
        TrainingRun(id=RUN, session_id="s", owner="me", base_model="m", spec={"owner": "me"})
    )
    yield catalog
    await catalog.close()


@pytest.fixture
def points(catalog: Catalog) -> RunPoints:
    return RunPoints(catalog._engine)


def extend(curve: Curve, num_steps: int) -> Curve:
    for step in range(curve.num_steps + 1, curve.num_steps + 1 + num_steps):
        curve.add(step, AT, {"loss": float(step)})
    return curve


def a_report(curve: Curve, first: int = 0, run: str = RUN) -> CurveReport:
    return CurveReport(curve_of=run, stride=curve.stride, points=curve.points[first:])


async def test_a_curve_is_returned_as_it_was_reported(points: RunPoints) -> None:
    curve = extend(Curve(), 3)
    await points.record(a_report(curve))
    await points.record(a_report(extend(curve, 2), 3))

    assert await points.curve(RUN) == curve


async def test_points_that_were_merged_replace_those_that_they_have(points: RunPoints) -> None:
    curve = extend(Curve(), MAX_POINTS)
    await points.record(a_report(curve))
    late = a_report(curve, MAX_POINTS - 1)
    await points.record(a_report(extend(curve, 5)))
    # From another server that holds the head's lease.
    await points.record(late)

    assert curve.stride == 2
    assert await points.curve(RUN) == curve


async def test_a_report_that_is_late_changes_nothing(points: RunPoints) -> None:
    curve = extend(Curve(), MAX_POINTS + 1)
    await points.record(late := a_report(curve))
    await points.record(a_report(extend(curve, 1), len(curve.points) - 1))
    await points.record(late)

    assert (await points.curve(RUN)).points[-1].steps == 2


async def test_a_report_of_a_run_that_does_not_exist_is_ignored(points: RunPoints) -> None:
    await points.record(a_report(extend(Curve(), 3), run="other:train:0"))

    assert await points.curve("other:train:0") == Curve()


async def test_curves_are_forgotten_some_time_after_the_last_request(points: RunPoints) -> None:
    curve = extend(Curve(), 3)
    await points.record(a_report(curve))

    assert not await points.forget(now() - timedelta(days=1))
    assert await points.curve(RUN) == curve
    assert await points.forget(now() + timedelta(days=1))
    assert await points.curve(RUN) == Curve()
