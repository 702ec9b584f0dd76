"""Downsampled curves have a bounded number of points and are deterministic."""

import math
from datetime import UTC, datetime
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.heads.reports.thinned_curves import (
    MAX_POINTS,
    Curve,
    CurvePoint,
    MetricValues,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)


def a_curve(num_steps: int) -> Curve:
    curve = Curve()
    for step in range(1, num_steps + 1):
        curve.add(step, AT, {"loss": float(step)})
    return curve


@given(st.integers(0, 5 * MAX_POINTS))
def test_no_step_is_lost_and_the_points_are_bounded(num_steps: int) -> None:
    curve = a_curve(num_steps)

    assert len(curve.points) <= MAX_POINTS
    assert curve.num_steps == num_steps
    assert [point.index for point in curve.points] == list(range(len(curve.points)))
    assert all(point.steps == curve.stride for point in curve.points[:-1])
    total = sum(point.metrics["loss"].total for point in curve.points)
    assert total == num_steps * (num_steps + 1) / 2
    if num_steps:
        assert curve.points[0].metrics["loss"].low == 1
        assert curve.points[-1].metrics["loss"].high == curve.points[-1].step == num_steps


def test_a_point_has_the_range_and_the_mean_of_its_steps() -> None:
    curve = a_curve(MAX_POINTS + 1)

    first = curve.points[0]
    assert (curve.stride, first.steps, first.step) == (2, 2, 2)
    assert first.metrics["loss"] == MetricValues(2, 3.0, 1.0, 2.0)
    assert first.metrics["loss"].mean == 1.5
    assert len(curve.points) == MAX_POINTS // 2 + 1


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_values_that_are_not_finite_are_counted_apart(value: float) -> None:
    odd, one = MetricValues.of(value), MetricValues.of(1.0)

    assert odd.mean is None
    assert odd.plus(one) == one.plus(odd) == MetricValues(1, 1.0, 1.0, 1.0, 1)
    assert odd.plus(odd) == MetricValues(0, 0.0, 0.0, 0.0, 2)


def test_a_sum_stays_a_number_of_json() -> None:
    values = MetricValues.of(1e308).plus(MetricValues.of(1.5e308))

    assert math.isfinite(values.total)


def test_a_metric_that_only_some_steps_have_is_that_of_those_steps() -> None:
    first = CurvePoint(index=0, steps=1, step=1, at=AT, metrics={})
    second = CurvePoint(
        index=1, steps=1, step=2, at=AT, metrics={"kl": MetricValues(1, 2.0, 2.0, 2.0)}
    )

    assert first.followed_by(second).metrics == second.metrics
    assert second.followed_by(first).metrics == second.metrics


@given(st.integers(0, 3 * MAX_POINTS), st.integers(0, 3 * MAX_POINTS))
def test_who_knows_a_curve_needs_only_what_has_changed_since(before: int, added: int) -> None:
    earlier, later = a_curve(before), a_curve(before + added)
    known = {point.index: point for point in earlier.points}

    changed = later.since(earlier.stride, earlier.num_steps)

    if later.stride != earlier.stride:
        known = {}
    known |= {point.index: point for point in changed}
    assert list(known.values()) == later.points
    if later.stride == earlier.stride:
        assert len(changed) <= added + 1


def test_nothing_has_changed_if_no_step_was_added() -> None:
    assert list(a_curve(0).since(1, 0)) == []
    assert list(a_curve(300).since(2, 300)) == []
