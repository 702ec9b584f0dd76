"""Remembers when requests were accepted, started and finished, for traces and metrics.

An OpenTelemetry collector gets the same times as spans (`SpanSender`), if there is one.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import structlog

from tinkercloud_protocol.heads.request_timeline import Span
from tinkercloud_protocol.wire import request_ids
from tinkercloud_worker.engine.turns import rank_times, turn_waits
from tinkercloud_worker.engine.turns.rank_times import RankTime
from tinkercloud_worker.metrics import REQUEST_SECONDS, REQUEST_WAIT_SECONDS

if TYPE_CHECKING:
    from tinkercloud_protocol.wire.span_sender import SpanSender

T = TypeVar("T")

MAX_SPANS = 5000
"""Spans that are kept of one session, the latest ones."""
MAX_SESSIONS = 256
"""Sessions whose spans are kept: those that finished a request last."""
MAX_ALL_SPANS = 100_000
"""Spans that are kept of all sessions, about 20 MB."""

_Row = tuple[str, str, float, float, float, str | None, int, float]
"""The fields of a `Span`, which would take several times as much memory."""
_FIELDS = ("target", "name", "accepted", "started", "finished", "request", "tokens", "paused")
"""Their names, in the order of a row."""


@dataclass(slots=True)
class _Work:
    tokens: int = 0
    paused: float = 0.0
    failure: BaseException | None = None
    rank_times: Sequence[RankTime] = ()


_RUNNING: ContextVar[_Work | None] = ContextVar("running", default=None)
"""The work of the request that runs in a task and those that it starts."""


def count_tokens(count: int) -> None:
    """Count tokens that were computed for the request that runs, for its span."""
    if (work := _RUNNING.get()) is not None:
        work.tokens += count


def count_pause(seconds: float) -> None:
    """Count time in which the request that runs had to wait for its owner: its turn is only now."""
    if (work := _RUNNING.get()) is not None:
        work.paused += seconds


class SpanRecorder:
    """The latest spans of sessions. Belongs to one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.time, sender: "SpanSender | None" = None
    ) -> None:
        """Create a recorder without spans.

        Args:
            clock: returns the time in seconds from 1970-01-01 in UTC.
            sender: sends spans to a collector; None: there is none.
        """
        self._clock = clock
        self._sender = sender
        self._sessions: OrderedDict[str, deque[_Row]] = OrderedDict()
        self._num_spans = 0

    def timed(
        self,
        target: str,
        name: str,
        owner: str,
        work: Callable[[], Awaitable[T]],
        paused_before: Callable[[], float] = float,
    ) -> Callable[[], Awaitable[T]]:
        """Return work that records a span when it has run.

        Args:
            target: the model or sampling session of a request that has just been accepted.
            name: what was requested.
            owner: who requested it.
            work: executes it when it is its turn.
            paused_before: returns for how many of the last seconds it had to wait for its owner,
                when it is its turn.
        """
        accepted = self._clock()
        names = structlog.contextvars.get_contextvars()
        request, parent = map(names.get, (request_ids.LOG_FIELD, request_ids.TRACE_LOG_FIELD))

        async def run() -> T:
            started, paused = self._clock(), paused_before()
            done, turns = _Work(), turn_waits.collect()
            _RUNNING.set(done)
            if self._sender is not None and parent is not None:
                done.rank_times = rank_times.collect()
            try:
                return await work()
            except BaseException as error:
                done.failure = error
                raise
            finally:
                _RUNNING.set(None)
                rank_times.stop()
                finished = self._clock()
                started, paused = started + done.paused, paused + done.paused
                _observe(name, accepted, started, finished)
                # Jobs of a request may wait at the same time.
                started = min(started + turns.seconds, max(started, finished))
                row = (target, name, accepted, started, finished, request, done.tokens, paused)
                self._add(row)
                if self._sender is not None and parent is not None:
                    _send(self._sender, parent, owner, row, done)

        return run

    def of_session(self, session_id: str) -> list[Span]:
        """Return the spans of a session, in the order in which they finished."""
        rows = self._sessions.get(session_id, ())
        return [Span.model_validate(dict(zip(_FIELDS, row, strict=True))) for row in rows]

    def _add(self, row: _Row) -> None:
        session_id = row[0].partition(":")[0]
        rows = self._sessions.setdefault(session_id, deque(maxlen=MAX_SPANS))
        self._num_spans += len(rows) < MAX_SPANS
        rows.append(row)
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > MAX_SESSIONS or self._num_spans > MAX_ALL_SPANS:
            _, oldest = self._sessions.popitem(last=False)
            self._num_spans -= len(oldest)


def _send(sender: "SpanSender", parent: str, owner: str, row: _Row, done: _Work) -> None:
    """Send the wait and the execution of a request, and of the latter what its ranks did."""
    target, name, accepted, started, finished, request, tokens, _ = row
    named = {"tinkercloud.target": target, "tinkercloud.owner": owner}
    if request is not None:
        named["tinkercloud.http_request_id"] = request
    # The clock may be set back.
    sender.record("queue", parent, accepted, max(accepted, started), attributes=named)
    execution = sender.record(
        _kind_of(name),
        parent,
        started,
        max(started, finished),
        attributes={**named, "tinkercloud.tokens": tokens},
        error=done.failure,
    )
    if execution is None:
        return
    for each in done.rank_times:
        of_rank: dict[str, str | int] = {**named, "tinkercloud.rank": each.rank}
        # The clock of its node may differ.
        end = max(each.started, each.finished)
        sender.record(f"rank {each.command}", execution, each.started, end, attributes=of_rank)


def _observe(name: str, accepted: float, started: float, finished: float) -> None:
    """Count a request in the metrics, whose waits for the engine are those of owners."""
    # The clock may be set back.
    kind = _kind_of(name)
    REQUEST_WAIT_SECONDS.labels(kind).observe(max(started - accepted, 0.0))
    REQUEST_SECONDS.labels(kind).observe(max(finished - started, 0.0))


def _kind_of(name: str) -> str:
    # The format of a batch is a part of its name.
    return name.partition(" ")[0]
