"""Spans of requests are kept for the latest sessions, and only so many."""

from prometheus_client import REGISTRY

from tinkercloud_worker.engine.turns import turn_waits
from tinkercloud_worker.head.wire.request_times import (
    MAX_ALL_SPANS,
    MAX_SPANS,
    SpanRecorder,
    count_pause,
)


async def test_the_spans_of_all_sessions_are_bounded_and_the_latest_sessions_keep_theirs() -> None:
    recorder, sessions = SpanRecorder(lambda: 1.5), MAX_ALL_SPANS // MAX_SPANS + 1

    async def work() -> None: ...

    for session in range(sessions):
        for _ in range(MAX_SPANS + 1):
            await recorder.timed(f"s{session}:train:0", "optim_step", "me", work)()

    kept = [len(recorder.of_session(f"s{session}")) for session in range(sessions)]
    assert kept == [0] + [MAX_SPANS] * (sessions - 1)
    span = recorder.of_session(f"s{sessions - 1}")[-1]
    assert (span.target, span.name) == (f"s{sessions - 1}:train:0", "optim_step")
    assert (span.accepted, span.started, span.finished) == (1.5, 1.5, 1.5)


async def test_the_times_of_a_batch_count_for_its_request_whatever_its_format() -> None:
    def counted() -> float:
        labels = {"request": "forward_backward"}
        return REGISTRY.get_sample_value("tinkercloud_request_seconds_count", labels) or 0

    async def work() -> None: ...

    before = counted()
    for name in ("forward_backward", "forward_backward in JSON"):
        await SpanRecorder().timed("s:train:0", name, "me", work)()

    assert counted() == before + 2


async def test_a_pause_is_a_part_of_the_wait_also_if_the_request_finds_it_when_it_runs() -> None:
    times = iter([1.0, 4.0, 9.0])
    recorder = SpanRecorder(lambda: next(times))

    async def work() -> None:
        count_pause(2.0)

    await recorder.timed("s:train:0", "sample", "me", work, lambda: 0.5)()

    (span,) = recorder.of_session("s")
    assert (span.accepted, span.started, span.finished, span.paused) == (1.0, 6.0, 9.0, 2.5)


async def test_turns_of_others_are_a_part_of_the_wait() -> None:
    times = iter([1.0, 4.0, 9.0])
    recorder = SpanRecorder(lambda: next(times))

    async def work() -> None:
        turn_waits.note(2.0)
        turn_waits.note(1.0)

    await recorder.timed("s:train:0", "optim_step", "me", work)()

    (span,) = recorder.of_session("s")
    assert (span.accepted, span.started, span.finished) == (1.0, 7.0, 9.0)


async def test_jobs_that_wait_at_the_same_time_make_no_wait_longer_than_their_request() -> None:
    times = iter([1.0, 4.0, 9.0])
    recorder = SpanRecorder(lambda: next(times))

    async def work() -> None:
        turn_waits.note(4.0)
        turn_waits.note(4.0)

    await recorder.timed("s:train:0", "optim_step", "me", work)()

    (span,) = recorder.of_session("s")
    assert (span.accepted, span.started, span.finished) == (1.0, 9.0, 9.0)
