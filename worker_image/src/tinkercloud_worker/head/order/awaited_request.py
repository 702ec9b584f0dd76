"""The request that a model's queue waits for: its number has not arrived, and later ones have."""

import asyncio
from collections.abc import Callable


class AwaitedRequest:
    """Ends the wait for a missing request. Belongs to one event loop."""

    def __init__(self, seconds: float, on_timeout: Callable[[int], None]) -> None:
        """Wait for nothing.

        Args:
            seconds: how long to wait for a request.
            on_timeout: called with the number of a request that has not arrived in time.
        """
        self._seconds = seconds
        self._on_timeout = on_timeout
        self._seq_id: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, seq_id: int | None) -> None:
        """Wait for the request of a number; None: for none.

        Requests that arrive behind the gap do not prolong the wait.
        """
        if seq_id == self._seq_id:
            return
        self.close()
        self._seq_id = seq_id
        if seq_id is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._on_timeout, seq_id)

    def close(self) -> None:
        """End the wait. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def why_waiting(self, request_id: str) -> str:
        """Describe what requests behind the missing one, which has this id, wait for."""
        return (
            f"waiting up to {self._seconds:.0f} s for request {request_id}, which has not arrived;"
            " requests run in the order of their seq_id"
        )

    def why_dropped(self, seq_id: int) -> str:
        """Describe why requests behind the one of this number failed."""
        return (
            f"seq_id {seq_id} did not arrive within {self._seconds:.0f} s, so the requests after"
            " it were dropped; create a new training client from a checkpoint"
        )
