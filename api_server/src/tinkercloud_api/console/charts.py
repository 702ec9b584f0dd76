"""Charts of a run's metrics as coordinates of SVG: the pages draw them without JavaScript."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tinkercloud_protocol.responses.run_states import CurveMetric, RunCurvePoint

WIDTH, HEIGHT = 640, 220
"""Size of a chart, in units of its view box."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
"""Margins, in the same units."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Its coordinate."""
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A metric by optimizer step."""

    metric: str
    lines: Sequence[str]
    """Coordinates of the means, one line for each part without a gap."""
    areas: Sequence[str]
    """Coordinates of the range between the lowest and the highest values, likewise."""
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    summary: str
    """What the chart shows, in a sentence."""


def chart(metric: str, points: Sequence[RunCurvePoint]) -> Chart | None:
    """Return the chart of a metric; None if no step has a finite value of it.

    Args:
        metric: its name.
        points: the curve. Its steps are drawn in the order in which they were taken.
    """
    found = [(point, point.metrics.get(metric)) for point in points]
    finite = [(point, values) for point, values in found if values and _is_shown(values)]
    if not finite:
        return None
    low = min(values.low for _, values in finite if values.low is not None)
    high = max(values.high for _, values in finite if values.high is not None)
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    axes = _Axes(len(points), low, high)
    parts = [
        [(axes.x(index), values) for index, values in part]
        for part in _parts([values for _, values in found])
    ]
    first, last = finite[0], finite[-1]
    return Chart(
        metric,
        [" ".join(f"{x:.1f},{axes.y(values.mean):.1f}" for x, values in part) for part in parts],
        [_area(part, axes) for part in parts],
        [Tick(axes.x(index), str(points[index].step)) for index in _marks(len(points))],
        [Tick(axes.y(value), f"{value:.4g}") for value in (low, (low + high) / 2, high)],
        f"{metric}: {first[1].mean:.4g} at step {first[0].step},"
        f" {last[1].mean:.4g} at step {last[0].step}",
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    num_points: int
    low: float
    high: float

    def x(self, index: int) -> float:
        share = index / (self.num_points - 1) if self.num_points > 1 else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float | None) -> float:
        assert value is not None  # noqa: S101 - only shown values are drawn
        # The span itself may not be finite, although its ends are.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _is_shown(values: CurveMetric | None) -> bool:
    return values is not None and values.mean is not None


def _parts(values: Sequence[CurveMetric | None]) -> Iterator[list[tuple[int, CurveMetric]]]:
    """Yield the parts of a curve that have values, with the indexes of their points."""
    for is_shown, part in groupby(enumerate(values), key=lambda item: _is_shown(item[1])):
        if is_shown:
            yield [(index, each) for index, each in part if each is not None]


def _area(part: Sequence[tuple[float, CurveMetric]], axes: _Axes) -> str:
    upper = [f"{x:.1f},{axes.y(values.high):.1f}" for x, values in part]
    lower = [f"{x:.1f},{axes.y(values.low):.1f}" for x, values in reversed(part)]
    return " ".join((*upper, *lower))


def _marks(num_points: int) -> list[int]:
    """Return the indexes of the points whose steps the axis names."""
    return sorted({0, num_points // 2, num_points - 1})
