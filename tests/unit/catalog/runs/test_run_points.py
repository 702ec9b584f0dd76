"""The curves of runs in the catalog: what heads report late, twice or of nobody's run."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.catalog.runs.logged_values import MAX_NAMES, LoggedValues
from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.heads.reports.thinned_curves import MAX_POINTS, Curve, CurveReport
from tinkercloud_protocol.wire.errors import InvalidRequest

AT = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "s:train:0"


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
def points(engine: AsyncEngine) -> RunPoints:
    return RunPoints(engine)


@pytest.fixture
def logged(engine: AsyncEngine) -> LoggedValues:
    return LoggedValues(engine)


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

    assert (await points.curves([RUN]))[RUN] == curve


async def test_points_that_were_merged_replace_those_that_they_have(points: RunPoints) -> None:
    curve = extend(Curve(), MAX_POINTS)
    await points.record(a_report(curve))
    late = a_report(curve, MAX_POINTS - 1)
    await points.record(a_report(extend(curve, 5)))
    # From another server that holds the head's lease.
    await points.record(late)

    assert curve.stride == 2
    assert (await points.curves([RUN]))[RUN] == curve


async def test_a_report_that_is_late_changes_nothing(points: RunPoints) -> None:
    curve = extend(Curve(), MAX_POINTS + 1)
    await points.record(late := a_report(curve))
    await points.record(a_report(extend(curve, 1), len(curve.points) - 1))
    await points.record(late)

    assert (await points.curves([RUN]))[RUN].points[-1].steps == 2


async def test_a_report_of_a_run_that_does_not_exist_is_ignored(points: RunPoints) -> None:
    await points.record(a_report(extend(Curve(), 3), run="other:train:0"))

    assert await points.curves(["other:train:0"]) == {"other:train:0": Curve()}


async def test_curves_are_forgotten_some_time_after_the_last_request(points: RunPoints) -> None:
    curve = extend(Curve(), 3)
    await points.record(a_report(curve))

    assert not await points.forget(now() - timedelta(days=1))
    assert (await points.curves([RUN]))[RUN] == curve
    assert await points.forget(now() + timedelta(days=1))
    assert (await points.curves([RUN]))[RUN] == Curve()


async def test_a_value_that_is_logged_again_replaces_the_earlier_one(logged: LoggedValues) -> None:
    await logged.log(RUN, 3, {"reward": 1.0, "length": 7.0}, AT)
    await logged.log(RUN, 3, {"reward": 2.0}, AT)
    await logged.log(RUN, 1, {"reward": 0.5}, AT)

    found = (await logged.of_runs([RUN]))[RUN]

    assert {name: [(row.step, row.value) for row in rows] for name, rows in found.items()} == {
        "length": [(3, 7.0)],
        "reward": [(1, 0.5), (3, 2.0)],
    }


async def test_logged_values_are_bounded_and_the_last_of_each_stretch_stays(
    logged: LoggedValues,
) -> None:
    steps = range(1, 2 * MAX_POINTS, 2)
    for step in steps:
        await logged.log(RUN, step, {"reward": float(step)}, AT)
    kept = [row.step for row in (await logged.of_runs([RUN]))[RUN]["reward"]]
    assert kept == list(steps)

    await logged.log(RUN, 4 * MAX_POINTS - 1, {"reward": 0.0}, AT)

    kept = [row.step for row in (await logged.of_runs([RUN]))[RUN]["reward"]]
    assert kept == [*range(3, 2 * MAX_POINTS, 4), 4 * MAX_POINTS - 1]


async def test_a_run_has_a_bounded_number_of_names(logged: LoggedValues) -> None:
    for number in range(MAX_NAMES):
        await logged.log(RUN, 1, {f"m{number}": 1.0}, AT)
    await logged.log(RUN, 2, {"m0": 1.0}, AT)

    with pytest.raises(InvalidRequest, match="more than 32 names"):
        await logged.log(RUN, 2, {"another": 1.0}, AT)


async def test_values_at_late_steps_and_one_mistaken_step_are_thinned_out_like_others(
    logged: LoggedValues,
) -> None:
    for step in range(100_000, 100_000 + MAX_POINTS + 1):
        await logged.log(RUN, step, {"late": 1.0}, AT)
    for step in (*range(MAX_POINTS), 2**53 - 1):
        await logged.log(RUN, step, {"mistaken": 1.0}, AT)

    found = (await logged.of_runs([RUN]))[RUN]

    assert len(found["late"]) > MAX_POINTS // 2
    assert len(found["mistaken"]) > MAX_POINTS // 2
