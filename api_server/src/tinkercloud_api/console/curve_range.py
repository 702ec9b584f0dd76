"""Curves as charts and as tables: a range of the steps of one run, and several runs together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from tinkercloud_api.console.charts import Chart, Place, by_steps_taken, chart
from tinkercloud_protocol.responses.run_states import (
    CurveMetric,
    LoggedPoint,
    RunCurve,
    RunCurvePoint,
)

METRICS = ("loss", "grad_norm", "learning_rate", "kl", "tokens", "tokens_per_second")
"""The metrics of optimizer steps, in the order of their charts."""


_MOST_ROWS = 256
"""Rows of a table on the page that compares runs."""


@dataclass(frozen=True, slots=True)
class Zoom:
    """The steps that a page shows, both ends included."""

    first: int
    last: int
    is_whole: bool
    """Whether no others were asked for than all steps of the run."""

    @property
    def halves(self) -> Mapping[str, "Zoom"]:
        """The halves of the steps, by name; none of a single step."""
        if self.first >= self.last:
            return {}
        middle = (self.first + self.last) // 2
        return {
            "First half": Zoom(self.first, middle, is_whole=False),
            "Last half": Zoom(middle + 1, self.last, is_whole=False),
        }


@dataclass(frozen=True, slots=True)
class ShownCurve:
    """The content of a page."""

    zoom: Zoom
    points: Sequence[RunCurvePoint]
    """The rows of the table."""
    metrics: Sequence[str]
    """Its columns."""
    logged: Mapping[int, Mapping[str, float]]
    """The rows of the table of values that the client logged, by step: values by name."""
    charts: Sequence[Chart]


def shown_curve(curve: RunCurve, first: int | None, last: int | None) -> ShownCurve:
    """Return what the page of a run shows.

    Args:
        curve: the whole curve.
        first: the first step to show, counted as the axis of the charts does; None for all.
        last: the last one, likewise.
    """
    taken, logged = by_steps_taken(curve.points), _logged(curve)
    zoom = _zoom(list(chain(taken, *logged.values())), first, last)
    found = _within(zoom, taken)
    of_client = (chart(name, {curve.run_id: _within(zoom, of)}) for name, of in logged.items())
    return ShownCurve(
        zoom=zoom,
        points=[point for _, point in found],
        metrics=[name for name in METRICS if any(name in point.metrics for _, point in found)],
        logged=_by_step(curve.logged, zoom),
        charts=[*_charts_of({curve.run_id: found}), *(each for each in of_client if each)],
    )


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """A metric that some of several runs have."""

    name: str
    """What a client logged under the name of a metric of steps is `logged/NAME`."""
    rows: Mapping[int, Sequence[CurveMetric | None]]
    """The values of the runs, in their order, by step; None where a run has none. Of more than
    256 steps, it has as many, evenly chosen, with the first and the last."""
    num_steps: int
    """How many steps have values in all."""
    chart: Chart | None
    """All runs on common axes; None without a finite value."""


def compared(curves: Sequence[RunCurve]) -> list[ComparedMetric]:
    """Return the metrics of runs: those of optimizer steps, then those that clients logged."""
    of_steps = {curve.run_id: by_steps_taken(curve.points) for curve in curves}
    logged = {curve.run_id: _logged(curve) for curve in curves}
    placed: list[tuple[str, Mapping[str, Sequence[Place]]]] = [
        *((name, of_steps) for name in METRICS),
        *(
            (name, {run: of_run.get(name, []) for run, of_run in logged.items()})
            for name in sorted(set(chain(*logged.values())))
        ),
    ]
    return [
        ComparedMetric(name, _evenly(rows), len(rows), chart(name, of_runs))
        for name, of_runs in placed
        if (rows := _rows(name, of_runs))
    ]


def _evenly(
    rows: Mapping[int, Sequence[CurveMetric | None]],
) -> Mapping[int, Sequence[CurveMetric | None]]:
    """Return all rows, or as many as a page shows of a metric, the first and the last included."""
    steps, last = list(rows), _MOST_ROWS - 1
    if len(steps) <= _MOST_ROWS:
        return rows
    chosen = [steps[place * (len(steps) - 1) // last] for place in range(_MOST_ROWS)]
    return {step: rows[step] for step in chosen}


def _rows(
    metric: str, placed: Mapping[str, Sequence[Place]]
) -> Mapping[int, Sequence[CurveMetric | None]]:
    columns = [
        {step: values for step, point in places if (values := point.metrics.get(metric))}
        for places in placed.values()
    ]
    return {step: [values.get(step) for values in columns] for step in sorted(set(chain(*columns)))}


def _charts_of(placed: Mapping[str, Sequence[Place]]) -> list[Chart]:
    return [found for name in METRICS if (found := chart(name, placed)) is not None]


def _zoom(places: Sequence[Place], first: int | None, last: int | None) -> Zoom:
    earliest = min((step - point.steps + 1 for step, point in places), default=0)
    latest = max((step for step, _ in places), default=earliest)
    return Zoom(
        earliest if first is None else first,
        latest if last is None else last,
        is_whole=first is None and last is None,
    )


def _within(zoom: Zoom, places: Iterable[Place]) -> list[Place]:
    """Return the places whose point has a step that is shown."""
    return [
        (step, point)
        for step, point in places
        if step >= zoom.first and step - point.steps < zoom.last
    ]


def _logged(curve: RunCurve) -> dict[str, list[Place]]:
    """Return the values that the client of a run logged, by a name that no metric of steps has."""
    names = {name: f"logged/{name}" if name in METRICS else name for name in curve.logged}
    return {
        names[name]: [(value.step, _as_point(names[name], value)) for value in values]
        for name, values in curve.logged.items()
    }


def _by_step(
    logged: Mapping[str, Iterable[LoggedPoint]], zoom: Zoom
) -> dict[int, dict[str, float]]:
    rows = defaultdict[int, dict[str, float]](dict)
    for name, values in logged.items():
        for each in values:
            if zoom.first <= each.step <= zoom.last:
                rows[each.step][name] = each.value
    return dict(sorted(rows.items()))


def _as_point(name: str, logged: LoggedPoint) -> RunCurvePoint:
    number = logged.value
    value = CurveMetric.model_construct(mean=number, low=number, high=number, not_finite=0)
    return RunCurvePoint.model_construct(
        step=logged.step, steps=1, time=logged.time, metrics={name: value}
    )
