"""The console draws each curve inside its chart, for any finite numbers."""

import json
import sys
from datetime import UTC, datetime
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_api.console.charts import HEIGHT, WIDTH, Chart, by_steps_taken, chart
from tinkercloud_api.console.page_texts import number, shown
from tinkercloud_protocol.responses.run_states import CurveMetric, RunCurvePoint

ATTACK = '"><script>alert(1)</script>'
AT = datetime(2026, 1, 1, tzinfo=UTC)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def a_point(step: int, value: float | None) -> RunCurvePoint:
    metric = CurveMetric(mean=value, low=value, high=value, not_finite=int(value is None))
    return RunCurvePoint(step=step, steps=1, time=AT, metrics={"loss": metric})


def drawn(*values: float | None) -> Chart | None:
    return chart("loss", {"a": by_steps_taken(curve(*values))})


def curve(*values: float | None) -> list[RunCurvePoint]:
    return [a_point(step, value) for step, value in enumerate(values, 1)]


def coordinates(found: Chart) -> list[tuple[float, float]]:
    drawn = [part for line in found.lines for part in (*line.means, *line.ranges)]
    pairs = " ".join(drawn).split()
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in pairs)]


@given(st.lists(st.one_of(FLOATS, st.none()), max_size=20))
def test_every_coordinate_is_within_the_frame(values: list[float | None]) -> None:
    found = drawn(*values)

    if all(value is None for value in values):
        assert found is None
        return
    assert found is not None
    for x, y in coordinates(found):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert all(isfinite(tick.at) for tick in (*found.x_ticks, *found.y_ticks))


def test_the_largest_numbers_are_drawn() -> None:
    largest = sys.float_info.max
    for values in ([largest], [-largest], [largest, -largest], [5e-324], [5e-324, 0.0]):
        found = drawn(*values)
        assert found is not None
        assert all(0 <= y <= HEIGHT for _, y in coordinates(found))


def test_a_falling_loss_falls_from_left_to_right() -> None:
    found = drawn(3.0, 2.0, 1.0)

    assert found is not None
    ((first, high), _, (last, low)) = coordinates(found)[:3]
    assert first < last
    assert high < low
    assert [tick.label for tick in found.x_ticks] == ["1", "2", "3"]
    assert [tick.label for tick in found.y_ticks] == ["1", "2", "3"]
    assert found.summary == "loss by step; a: 3 at first, 1 at last"


def test_values_that_are_not_finite_leave_a_gap() -> None:
    found = drawn(3.0, 2.0, None, 1.0)

    assert found is not None
    assert [len(part.split()) for part in found.lines[0].means] == [2, 1]


def test_scripts_draw_the_numbers_of_each_run_that_has_some() -> None:
    of_steps = CurveMetric(mean=1.23456789, low=0.5, high=2.0, not_finite=0)
    several = RunCurvePoint(step=3, steps=4, time=AT, metrics={"loss": of_steps})
    placed = {
        "a": by_steps_taken(curve(3.0, None)),
        "none": by_steps_taken(curve(None)),
        ATTACK: by_steps_taken([several]),
    }

    found = chart("loss", placed)

    assert found is not None
    assert json.loads(found.numbers) == [
        {"name": "a", "number": 0, "steps": [1, 2], "means": [3.0, None], "lows": [], "highs": []},
        {
            "name": ATTACK,
            "number": 2,
            "steps": [4],
            "means": [1.23457],
            "lows": [0.5],
            "highs": [2.0],
        },
    ]


@given(st.lists(st.one_of(FLOATS, st.none()), max_size=20))
def test_the_numbers_of_scripts_are_finite(values: list[float | None]) -> None:
    if (found := drawn(*values)) is not None:
        (line,) = json.loads(found.numbers)
        assert [value is None for value in values] == [mean is None for mean in line["means"]]


def test_runs_are_compared_on_common_axes() -> None:
    curves = {"a": curve(4.0, 2.0), "none": [], "b": curve(4.0, 3.0, 1.0)}
    found = chart("loss", {name: by_steps_taken(points) for name, points in curves.items()})

    assert found is not None
    first, none, second = found.lines
    assert none.means == []
    assert first.means[0].split()[0] == second.means[0].split()[0]
    assert (
        first.means[0].split()[1].partition(",")[0] == second.means[0].split()[1].partition(",")[0]
    )
    assert [tick.label for tick in found.x_ticks] == ["1", "2", "3"]
    assert [tick.label for tick in found.y_ticks] == ["1", "2.5", "4"]


@pytest.mark.parametrize("value", [0.0, -2.5, 1e300])
def test_a_single_step_and_a_constant_are_drawn_in_the_middle(value: float) -> None:
    for values in ([value], [value, value]):
        found = drawn(*values)
        assert found is not None
        assert len({y for _, y in coordinates(found)}) == 1


def test_texts_of_others_are_cut_and_have_no_control_characters() -> None:
    assert shown("a\x00b\u202ec\nd") == "a\ufffdb\ufffdc\ufffdd"
    assert shown("x" * 10**6) == "x" * 200 + "…"
    assert shown("naïve 模型 🙂") == "naïve 模型 🙂"
    assert number(None) == "-"
