"""Where a queue keeps the requests that it has accepted, in case its process is killed."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from tinkercloud_worker.head.order.queued_request import QueuedRequest


class RequestLog(Protocol):
    """The requests of one model. Methods do not raise, except where they say so."""

    def append(self, queued: QueuedRequest) -> None:
        """Add a request that the queue accepts."""

    def record_key(self, seq_id: int, key: str | None) -> None:
        """Record the idempotency key of the request that is added next; None: it has none."""

    def record_read(self, request_id: str) -> None:
        """Record that a client has read a result."""

    def note_change(self) -> None:
        """Record that the order or the gradient has changed, other than by a request."""

    async def change_kept(self) -> None:
        """Return once the changes so far (`note_change`) would survive, or can't be kept now."""

    async def accepted(self) -> None:
        """Return once the requests so far would survive the end of this process.

        Raises:
            Moved: another head has taken over the model.
        """

    async def settled(self) -> None:
        """Return once all results so far are published.

        Raises:
            Moved: another head has taken over the model.
        """

    async def check_owned(self) -> None:
        """Check that no other head is known to have taken over the model.

        Raises:
            Moved: one has.
        """

    def release(self, seq_id: int, finish: Callable[[], None]) -> None:
        """Publish the result of a request once the request itself is durable."""

    def repeating(self, seq_id: int) -> AbstractAsyncContextManager[None]:
        """Run a request that another head had accepted within the context.

        Raises:
            EndsHeads: it has ended too many heads.
        """

    async def at_boundary(self) -> None:
        """Do what must be done between two requests, while none runs."""

    @property
    def is_due_at_boundary(self) -> bool:
        """Whether `at_boundary` has work that takes time, as far as is known by now.

        May be read on any thread.
        """


class NoLog:
    """Keeps nothing."""

    def append(self, queued: QueuedRequest) -> None:
        """See `RequestLog.append`."""

    def record_key(self, seq_id: int, key: str | None) -> None:
        """See `RequestLog.record_key`."""

    def record_read(self, request_id: str) -> None:
        """See `RequestLog.record_read`."""

    def note_change(self) -> None:
        """See `RequestLog.note_change`."""

    async def change_kept(self) -> None:
        """See `RequestLog.change_kept`."""

    async def accepted(self) -> None:
        """See `RequestLog.accepted`."""

    async def settled(self) -> None:
        """See `RequestLog.settled`."""

    async def check_owned(self) -> None:
        """See `RequestLog.check_owned`."""

    def release(self, seq_id: int, finish: Callable[[], None]) -> None:  # noqa: ARG002 - as above
        """See `RequestLog.release`."""
        finish()

    def repeating(self, seq_id: int) -> AbstractAsyncContextManager[None]:  # noqa: ARG002 - as above
        """See `RequestLog.repeating`."""
        return nullcontext()

    async def at_boundary(self) -> None:
        """See `RequestLog.at_boundary`."""

    @property
    def is_due_at_boundary(self) -> bool:
        """See `RequestLog.is_due_at_boundary`."""
        return False
