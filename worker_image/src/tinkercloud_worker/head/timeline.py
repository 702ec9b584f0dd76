"""Remembers when requests were accepted, started and finished, for traces of sessions."""

import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tinkercloud_protocol import request_ids
from tinkercloud_protocol.timeline import Span

T = TypeVar("T")

MAX_SPANS = 5000
"""Spans that are kept of one session, the latest ones."""
MAX_SESSIONS = 256
"""Sessions whose spans are kept: those that finished a request last."""


class SpanRecorder:
    """The latest spans of sessions. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Create a recorder without spans.

        Args:
            clock: returns the time in seconds from 1970-01-01 in UTC.
        """
        self._clock = clock
        self._sessions: OrderedDict[str, deque[Span]] = OrderedDict()

    def timed(
        self, target: str, name: str, work: Callable[[], Awaitable[T]]
    ) -> Callable[[], Awaitable[T]]:
        """Return work that records a span when it has run.

        Args:
            target: the model or sampling session of a request that has just been accepted.
            name: what was requested.
            work: executes it when it is its turn.
        """
        accepted = self._clock()
        request = structlog.contextvars.get_contextvars().get(request_ids.LOG_FIELD)

        async def run() -> T:
            started = self._clock()
            try:
                return await work()
            finally:
                times = {"accepted": accepted, "started": started, "finished": self._clock()}
                self._add(Span(target=target, name=name, request=request, **times))

        return run

    def of_session(self, session_id: str) -> list[Span]:
        """Return the spans of a session, in the order in which they finished."""
        return list(self._sessions.get(session_id, ()))

    def _add(self, span: Span) -> None:
        session_id = span.target.partition(":")[0]
        self._sessions.setdefault(session_id, deque(maxlen=MAX_SPANS)).append(span)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
