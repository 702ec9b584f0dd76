"""The counters of a trace."""

import pytest

from tinkercloud_api.routes.sessions.trace_counters import counter_events
from tinkercloud_protocol.heads.request_timeline import Span


def a_span(accepted: float, started: float, finished: float, tokens: int = 0) -> Span:
    return Span(
        target="s:train:0",
        name="forward_backward",
        accepted=accepted,
        started=started,
        finished=finished,
        tokens=tokens,
    )


def counters(*spans: Span) -> dict[str, list[tuple[float, float]]]:
    """Return the moments in seconds and the values of each series."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in counter_events(spans, 1):
        assert (event["ph"], event["pid"]) == ("C", 1)
        assert isinstance(event["args"], dict)
        assert isinstance(event["ts"], int)
        for series, value in event["args"].items():
            found.setdefault(f"{event['name']} {series}", []).append((event["ts"] / 1e6, value))
    return found


def test_counters_show_requests_in_flight_throughput_and_totals() -> None:
    found = counters(a_span(31, 31, 32), a_span(1, 2, 4, tokens=30), a_span(1, 4, 9, tokens=50))

    assert found["requests waiting"] == [(1, 2), (2, 1), (4, 0), (9, 0), (31, 0), (32, 0)]
    assert found["requests running"] == [(1, 0), (2, 1), (4, 1), (9, 0), (31, 1), (32, 0)]
    assert found["tokens per second"] == [(0, 8), (10, 0), (30, 0), (40, 0)]
    assert found["total requests"] == [(4, 1), (9, 2), (32, 3)]
    assert found["total tokens"] == [(4, 30), (9, 80), (32, 80)]


def test_latencies_are_percentiles_of_what_finishes_in_ten_seconds() -> None:
    # They take 10, 20, ... 200 ms.
    found = counters(*(a_span(11, 11, 11 + number / 100) for number in range(1, 21)))

    [(_, median)] = found["latency p50 ms"]
    [(start, high)] = found["latency p95 ms"]
    assert [start, median, high] == pytest.approx([10, 100, 190])


def test_a_clock_that_was_set_back_makes_no_number_negative() -> None:
    found = counters(a_span(5, 3, 1, tokens=20))

    assert min(value for rows in found.values() for _, value in rows) == 0
