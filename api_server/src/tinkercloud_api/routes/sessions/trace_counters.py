"""Counters of a trace: requests in flight, throughput, latency and totals of a session."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil

from tinkercloud_protocol.heads.request_timeline import Span

MICROSECONDS = 1e6
"""Units of time in a trace, in a second."""
_WINDOW_SECONDS = 10
"""Throughput and latency are those of the requests that finish in such a window."""


def counter_events(spans: Iterable[Span], track: int) -> Iterator[dict[str, object]]:
    """Yield the counters of all spans in the Trace Event Format.

    `requests`: how many wait and how many run. `tokens` per second, and `latency` from acceptance
    to the result, median and 95th percentile: of the requests that finish in each ten seconds.
    `total`: finished requests, and the tokens that were computed for them. Perfetto names each
    series with both words, such as `latency p95 ms`.

    Args:
        spans: the requests of a session.
        track: number of the process that has the counters.
    """
    by_end = sorted(spans, key=_end)
    for name, rows in (
        ("requests", _in_flight(by_end)),
        ("tokens", _throughput(by_end)),
        ("latency", _latency(by_end)),
        ("total", _totals(by_end)),
    ):
        for moment, values in rows:
            ts = round(moment * MICROSECONDS)
            yield {"ph": "C", "name": name, "pid": track, "ts": ts, "args": values}


_Rows = Iterable[tuple[float, dict[str, float]]]
"""Moments, and the values of the series of a counter from then on."""


def _start(span: Span) -> float:
    # A head's clock may be set back.
    return max(span.accepted, span.started)


def _end(span: Span) -> float:
    return max(_start(span), span.finished)


def _in_flight(spans: Sequence[Span]) -> _Rows:
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0])
    for span in spans:
        changes[span.accepted][0] += 1
        changes[_start(span)][0] -= 1
        changes[_start(span)][1] += 1
        changes[_end(span)][1] -= 1
    waiting = running = 0
    for moment in sorted(changes):
        more_waiting, more_running = changes[moment]
        waiting, running = waiting + more_waiting, running + more_running
        yield moment, {"waiting": waiting, "running": running}


def _windows(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[int(_end(span) // _WINDOW_SECONDS)].append(span)
    return found


def _throughput(spans: Sequence[Span]) -> _Rows:
    windows = _windows(spans)
    for number, finished in windows.items():
        rate = sum(span.tokens for span in finished) / _WINDOW_SECONDS
        yield number * _WINDOW_SECONDS, {"per second": rate}
        if number + 1 not in windows:
            yield (number + 1) * _WINDOW_SECONDS, {"per second": 0.0}


def _latency(spans: Sequence[Span]) -> _Rows:
    for number, finished in _windows(spans).items():
        took = sorted((_end(span) - span.accepted) * 1000 for span in finished)
        middle, high = (took[ceil(len(took) * share) - 1] for share in (0.5, 0.95))
        yield number * _WINDOW_SECONDS, {"p50 ms": middle, "p95 ms": high}


def _totals(spans: Sequence[Span]) -> _Rows:
    tokens = accumulate(span.tokens for span in spans)
    for number, (span, total) in enumerate(zip(spans, tokens, strict=True), 1):
        yield _end(span), {"requests": number, "tokens": total}
