"""The curve of a run: what its optimizer steps report, in a bounded number of points.

A curve depends only on the steps that were added to it, so a head that repeats steps after a
restart has the same points. A head writes what has changed to the response of `routes.HEAD_LEASE`,
one `CurveReport` a line.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

MAX_POINTS = 256
"""Points of a curve. When there are as many, each has twice as many steps from then on."""


_MAX = sys.float_info.max
"""A sum beyond it would be no number of JSON."""


class MetricValues(NamedTuple):
    """The values of a metric in the steps of a point."""

    num_values: int
    """Number of finite values."""
    total: float
    """Their sum."""
    low: float
    high: float
    not_finite: int = 0
    """Number of values that are NaN or infinite."""

    @classmethod
    def of(cls, value: float) -> "MetricValues":
        """Return those of a single value."""
        if not math.isfinite(value):
            return cls(0, 0.0, 0.0, 0.0, 1)
        return cls(1, value, value, value)

    def plus(self, other: "MetricValues") -> "MetricValues":
        """Return those of the steps of two points."""
        bad = self.not_finite + other.not_finite
        if not self.num_values or not other.num_values:
            return (self if self.num_values else other)._replace(not_finite=bad)
        return MetricValues(
            self.num_values + other.num_values,
            max(-_MAX, min(self.total + other.total, _MAX)),
            min(self.low, other.low),
            max(self.high, other.high),
            bad,
        )

    @property
    def mean(self) -> float | None:
        """The mean of the finite values; None if there is none."""
        return self.total / self.num_values if self.num_values else None


class CurvePoint(BaseModel):
    """Some successive steps of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    index: int
    """Its number among the points of the curve, from 0."""
    steps: int
    """Number of steps in it: the curve's stride, or fewer in the last point."""
    step: int
    """The optimizer's number of the last of them."""
    at: datetime
    """When that was taken."""
    metrics: dict[str, MetricValues]

    def followed_by(self, later: "CurvePoint") -> "CurvePoint":
        """Return the point that has the steps of both."""
        metrics = dict(self.metrics)
        for name, values in later.metrics.items():
            known = metrics.get(name)
            metrics[name] = values if known is None else known.plus(values)
        return CurvePoint(
            index=self.index,
            steps=self.steps + later.steps,
            step=later.step,
            at=later.at,
            metrics=metrics,
        )


class CurveReport(BaseModel):
    """Points of a run that have changed since the previous report on the connection."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    curve_of: str
    """The run."""
    stride: int
    """Steps of a point. Points of a smaller stride have been merged into those of a larger one."""
    points: list[CurvePoint]


@dataclass(slots=True)
class Curve:
    """The points of a run, and how they grow."""

    stride: int = 1
    """Steps of each point but the last one."""
    points: list[CurvePoint] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Number of steps that were added."""
        return (len(self.points) - 1) * self.stride + self.points[-1].steps if self.points else 0

    def add(self, step: int, at: datetime, values: Mapping[str, float]) -> None:
        """Add a step.

        Args:
            step: the optimizer's number of the step.
            at: the time.
            values: its metrics, by name.
        """
        is_new = not self.points or self.points[-1].steps == self.stride
        if is_new and len(self.points) == MAX_POINTS:
            self._merge_pairs()
        metrics = {name: MetricValues.of(value) for name, value in values.items()}
        added = CurvePoint(index=len(self.points), steps=1, step=step, at=at, metrics=metrics)
        if is_new:
            self.points.append(added)
        else:
            self.points[-1] = self.points[-1].followed_by(added)

    def _merge_pairs(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [
            first.followed_by(second).model_copy(update={"index": index})
            for index, (first, second) in enumerate(pairs)
        ]
        self.stride *= 2

    def since(self, stride: int, num_steps: int) -> Sequence[CurvePoint]:
        """Return the points that have changed since the curve had a stride and a number of steps.

        If it has fewer steps now, its run has returned to an earlier state.
        """
        if stride != self.stride:
            return list(self.points)
        if num_steps == self.num_steps:
            return []
        return self.points[min(num_steps, self.num_steps) // stride :]
