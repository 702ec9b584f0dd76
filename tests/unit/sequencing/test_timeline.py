"""Spans of requests are kept for the latest sessions, and only so many."""

from tinkercloud_worker.head.wire.request_times import MAX_ALL_SPANS, MAX_SPANS, SpanRecorder


async def test_the_spans_of_all_sessions_are_bounded_and_the_latest_sessions_keep_theirs() -> None:
    recorder, sessions = SpanRecorder(lambda: 1.5), MAX_ALL_SPANS // MAX_SPANS + 1

    async def work() -> None: ...

    for session in range(sessions):
        for _ in range(MAX_SPANS + 1):
            await recorder.timed(f"s{session}:train:0", "optim_step", work)()

    kept = [len(recorder.of_session(f"s{session}")) for session in range(sessions)]
    assert kept == [0] + [MAX_SPANS] * (sessions - 1)
    span = recorder.of_session(f"s{sessions - 1}")[-1]
    assert (span.target, span.name) == (f"s{sessions - 1}:train:0", "optim_step")
    assert (span.accepted, span.started, span.finished) == (1.5, 1.5, 1.5)
