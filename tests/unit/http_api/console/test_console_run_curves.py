"""Which points of a run its page shows, by the steps that it is asked for."""

from datetime import UTC, datetime

from tinkercloud_api.console.curve_range import compared, shown_curve
from tinkercloud_protocol.responses.run_states import (
    CurveMetric,
    LoggedPoint,
    RunCurve,
    RunCurvePoint,
)

AT = datetime(2026, 11, 29, tzinfo=UTC)


def a_curve(steps_of_points: list[int], logged: dict[str, list[int]] | None = None) -> RunCurve:
    """Return a curve whose optimizer counts from 1 again in each point."""
    value = CurveMetric(mean=1.0, low=1.0, high=1.0, not_finite=0)
    return RunCurve(
        run_id="a",
        points=[
            RunCurvePoint(step=steps, steps=steps, time=AT, metrics={"loss": value})
            for steps in steps_of_points
        ],
        logged={
            name: [LoggedPoint(step=step, value=1.0, time=AT) for step in steps]
            for name, steps in (logged or {}).items()
        },
    )


def shown_steps(curve: RunCurve, first: int | None, last: int | None) -> list[int]:
    return [point.steps for point in shown_curve(curve, first, last).points]


def test_a_point_is_shown_if_it_has_one_of_the_steps() -> None:
    # Its points have the steps 1, 2 and 3, and 4 to 9.
    curve = a_curve([1, 2, 6])

    assert shown_steps(curve, None, None) == [1, 2, 6]
    assert shown_steps(curve, 1, 1) == [1]
    assert shown_steps(curve, 3, 3) == [2]
    assert shown_steps(curve, 3, 4) == [2, 6]
    assert shown_steps(curve, 9, None) == [6]
    assert shown_steps(curve, 10, None) == []
    assert shown_steps(curve, None, 0) == []


def test_the_halves_of_the_steps_are_all_of_them() -> None:
    zoom = shown_curve(a_curve([1, 2, 6]), None, None).zoom

    assert (zoom.first, zoom.last, zoom.is_whole) == (1, 9, True)
    assert [(half.first, half.last) for half in zoom.halves.values()] == [(1, 5), (6, 9)]
    assert shown_curve(a_curve([1, 2, 6]), 9, None).zoom.halves == {}


def test_what_the_client_logs_is_shown_by_its_own_steps() -> None:
    curve = a_curve([1, 1], {"reward": [0, 1, 7]})

    whole, end = shown_curve(curve, None, None), shown_curve(curve, 7, 7)

    assert (whole.zoom.first, whole.zoom.last) == (0, 7)
    assert [chart.metric for chart in whole.charts] == ["loss", "reward"]
    assert [tick.label for tick in whole.charts[1].x_ticks] == ["0", "3", "7"]
    assert [(chart.metric, chart.x_ticks[0].label) for chart in end.charts] == [("reward", "7")]
    assert (list(whole.logged), end.logged) == ([0, 1, 7], {7: {"reward": 1.0}})


def test_a_run_without_points_has_no_steps_to_choose_from() -> None:
    shown = shown_curve(a_curve([]), None, None)

    assert (shown.charts, shown.points, shown.zoom.halves) == ([], [], {})


def test_runs_are_compared_by_every_metric_that_one_of_them_has() -> None:
    curves = [
        a_curve([1, 2]).model_copy(update={"run_id": "b"}),
        a_curve([1], {"reward": [0, 7], "loss": [3]}),
        a_curve([]).model_copy(update={"run_id": "empty"}),
    ]

    metrics = {each.name: each for each in compared(curves)}

    assert list(metrics) == ["loss", "logged/loss", "reward"]
    steps = {
        name: {step: [value is not None for value in values] for step, values in each.rows.items()}
        for name, each in metrics.items()
    }
    assert steps == {
        "loss": {1: [True, True, False], 3: [True, False, False]},
        "logged/loss": {3: [False, True, False]},
        "reward": {0: [False, True, False], 7: [False, True, False]},
    }
    drawn = metrics["reward"].chart
    assert drawn is not None
    assert [line.number for line in drawn.lines if line.means] == [1]


def test_a_metric_without_a_finite_value_is_in_the_table_alone() -> None:
    none = CurveMetric(mean=None, low=None, high=None, not_finite=1)
    point = RunCurvePoint(step=1, steps=1, time=AT, metrics={"loss": none})

    (metric,) = compared([RunCurve(run_id="a", points=[point], logged={})])

    assert (metric.name, metric.chart, metric.rows) == ("loss", None, {1: [none]})


def test_runs_without_a_metric_have_nothing_to_compare() -> None:
    assert compared([a_curve([])]) == []


def test_a_table_of_many_steps_has_256_of_them_with_the_first_and_the_last() -> None:
    first = a_curve([], {"reward": list(range(1, 1001))})
    other = a_curve([], {"reward": list(range(1001, 2001))}).model_copy(update={"run_id": "b"})

    (metric,) = compared([first, other])

    assert (len(metric.rows), metric.num_steps) == (256, 2000)
    assert (min(metric.rows), max(metric.rows)) == (1, 2000)
