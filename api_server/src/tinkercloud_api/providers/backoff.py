"""Delays between failed starts of a head."""

import time

from tinkercloud_api.providers.base import HeadFailed

_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
"""Limit of the delay between failed starts, which doubles after each failure."""


class Backoff:
    """Exponential backoff between failed starts of a head."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0
        self._reason = ""

    def check(self) -> None:
        """Check that a start may begin now.

        Raises:
            HeadFailed: a start failed recently; the message says why, and when to retry.
        """
        left = self._not_before - time.monotonic()
        if left > 0:
            raise HeadFailed(f"{self._reason}; try again in {left:.0f} s")

    def record(self, error: BaseException | None) -> None:
        """Record the outcome of a start; None means success."""
        self._failures = self._failures + 1 if error is not None else 0
        self._reason = str(error)
        pause = min(_BACKOFF_SECONDS * 2.0 ** (self._failures - 1), _MAX_BACKOFF_SECONDS)
        self._not_before = time.monotonic() + pause if error is not None else 0.0
