"""Charts of a run's metrics: as coordinates of SVG, and as the numbers that console.js draws."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import orjson

from tinkercloud_protocol.responses.run_states import CurveMetric, RunCurvePoint

WIDTH, HEIGHT = 640, 220
"""Size of a chart, in units of its view box."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 12, 28
"""Margins, in the same units."""
_MAX = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Its coordinate."""
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """The values of one run."""

    number: int
    """Its colour."""
    means: Sequence[str]
    """Coordinates of the means, one line for each part without a gap."""
    ranges: Sequence[str]
    """Coordinates of the areas between the lowest and the highest values, likewise."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A metric by number of steps that a run has taken."""

    metric: str
    lines: Sequence[Line]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    summary: str
    """What the chart shows, in a sentence."""
    numbers: str
    """JSON of each run with a finite value: its name, the number of its colour, steps, means (null
    if not finite), and lowest and highest values, which are empty if all are equal to the means."""


Place = tuple[int, RunCurvePoint]
"""A step of the axis, and the point there."""


def by_steps_taken(points: Sequence[RunCurvePoint]) -> list[Place]:
    """Return the points of a run at the numbers of steps that it had taken with them.

    The optimizer's numbers would go back where a run has loaded an earlier checkpoint.
    """
    return list(zip(accumulate(point.steps for point in points), points, strict=True))


def chart(metric: str, placed: Mapping[str, Sequence[Place]]) -> Chart | None:
    """Return the chart of a metric; None if no step of any run has a finite value of it.

    Args:
        metric: its name.
        placed: the points of runs, by name, in the order of their steps.
    """
    shown = {
        name: [values for _, point in places if (values := _shown(point, metric)) is not None]
        for name, places in placed.items()
    }
    finite = [values for found in shown.values() for values in found]
    if not finite:
        return None
    axes = _axes_of(finite, [step for places in placed.values() for step, _ in places])
    lines = [_line(number, metric, places, axes) for number, places in enumerate(placed.values())]
    summaries = [
        f"{name}: {found[0].mean:.4g} at first, {found[-1].mean:.4g} at last"
        for name, found in shown.items()
        if found
    ]
    marks = sorted({axes.first, (axes.first + axes.last) // 2, axes.last})
    heights = (axes.low, axes.low / 2 + axes.high / 2, axes.high)
    return Chart(
        metric,
        lines,
        [Tick(axes.x(step), str(step)) for step in marks],
        [Tick(axes.y(value), f"{value:.3g}") for value in heights],
        f"{metric} by step; {'; '.join(summaries)}",
        orjson.dumps(
            [
                _numbers(name, number, metric, places)
                for number, (name, places) in enumerate(placed.items())
                if shown[name]
            ]
        ).decode(),
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    first: int
    last: int
    low: float
    high: float

    def x(self, step: int) -> float:
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float | None) -> float:
        assert value is not None  # noqa: S101 - only shown values are drawn
        # The span itself may not be finite, although its ends are.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _axes_of(finite: Sequence[CurveMetric], steps: Sequence[int]) -> _Axes:
    low = min(values.low for values in finite if values.low is not None)
    high = max(values.high for values in finite if values.high is not None)
    if low / 2 == high / 2:
        margin = abs(low) / 2 or 1.0
        low, high = max(low - margin, -_MAX), min(high + margin, _MAX)
    return _Axes(min(steps), max(steps), low, high)


def _shown(point: RunCurvePoint, metric: str) -> CurveMetric | None:
    values = point.metrics.get(metric)
    return values if values is not None and values.mean is not None else None


def _numbers(
    name: str, number: int, metric: str, places: Sequence[Place]
) -> dict[str, str | int | Sequence[float | None]]:
    found = [_shown(point, metric) for _, point in places]
    means, lows, highs = (
        [None if values is None else _short(getattr(values, each)) for values in found]
        for each in ("mean", "low", "high")
    )
    is_flat = means == lows == highs
    return {
        "name": name,
        "number": number,
        "steps": [step for step, _ in places],
        "means": means,
        "lows": [] if is_flat else lows,
        "highs": [] if is_flat else highs,
    }


def _short(value: float) -> float:
    """Return a number with as many digits as a chart can show."""
    return float(f"{value:.6g}")


def _line(number: int, metric: str, places: Sequence[Place], axes: _Axes) -> Line:
    valued = [(axes.x(step), _shown(point, metric)) for step, point in places]
    parts = [
        [(x, values) for x, values in part if values is not None]
        for is_shown, part in groupby(valued, key=lambda each: each[1] is not None)
        if is_shown
    ]
    means = [" ".join(f"{x:.1f},{axes.y(values.mean):.1f}" for x, values in part) for part in parts]
    return Line(number, means, [_range(part, axes) for part in parts])


def _range(part: Sequence[tuple[float, CurveMetric]], axes: _Axes) -> str:
    upper = [f"{x:.1f},{axes.y(values.high):.1f}" for x, values in part]
    lower = [f"{x:.1f},{axes.y(values.low):.1f}" for x, values in reversed(part)]
    return " ".join((*upper, *lower))
