"""How many engines a load needs."""

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.heads.engine_scaling_settings import EngineScaling
from tinkercloud_worker.inference.load import LoadHistory

SCALING = EngineScaling(min_engines=2, target_samples=10, up_seconds=30, down_seconds=600)
MOST = 8


def history(*levels: tuple[float, int], scaling: EngineScaling = SCALING) -> LoadHistory:
    """Return a history with samples in progress at some times."""
    found = LoadHistory(scaling, MOST)
    for moment, samples in levels:
        found.note(moment, samples)
    return found


def test_a_load_that_lasts_starts_engines() -> None:
    load = history((0, 55), (29, 55))

    assert load.needed(29, 2) == 2
    assert load.needed(30, 2) == 6


def test_a_short_burst_starts_none() -> None:
    load = history((0, 5), (40, 500), (60, 5))

    assert load.needed(60, 2) == 2
    assert load.needed(200, 2) == 2


def test_engines_end_only_after_a_long_pause() -> None:
    load = history((0, 70), (100, 5), (699, 5))

    assert load.needed(699, 7) == 7
    assert load.needed(701, 7) == 2


def test_a_peak_within_the_pause_keeps_the_engines_that_it_needs() -> None:
    load = history((0, 5), (500, 45), (501, 5))

    assert load.needed(1000, 7) == 5


def test_a_head_that_has_just_started_removes_no_engine() -> None:
    assert history((0, 0)).needed(599, 7) == 7


@given(
    st.lists(st.tuples(st.floats(0, 300), st.integers(0, 1000)), min_size=1, max_size=30),
    st.integers(1, 2 * MOST),
    st.floats(1, 600),
    st.floats(1, 600),
)
def test_the_number_is_within_its_bounds_and_stays_when_it_is_reached(
    steps: list[tuple[float, int]], engines: int, up: float, down: float
) -> None:
    scaling = EngineScaling(min_engines=2, target_samples=10, up_seconds=up, down_seconds=down)
    load, now = LoadHistory(scaling, MOST), 0.0
    for pause, samples in steps:
        now += pause
        load.note(now, samples)

        number = load.needed(now, engines)

        assert scaling.min_engines <= number <= MOST
        assert load.needed(now, number) == number


@given(st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 200)), min_size=1, max_size=100))
def test_the_answer_is_that_of_all_levels_in_the_two_spans(
    steps: list[tuple[float, int]],
) -> None:
    load, now, levels = LoadHistory(SCALING, MOST), 0.0, []
    for pause, samples in steps:
        now += pause
        load.note(now, samples)
        levels.append((now, samples))

    def within(seconds: float) -> list[int]:
        """Return the levels at all moments of the last seconds, of a function of steps."""
        begin = now - seconds
        ends = [moment for moment, _ in levels[1:]] + [float("inf")]
        spans = zip(levels, ends, strict=True)
        return (
            [samples for (_, samples), end in spans if end > begin] if levels[0][0] <= begin else []
        )

    low, high = within(SCALING.up_seconds), within(SCALING.down_seconds)
    expected = max(4, -(-min(low) // 10)) if low else 4
    expected = min(expected, -(-max(high) // 10)) if high else expected
    assert load.needed(now, 4) == min(max(expected, 2), MOST)
