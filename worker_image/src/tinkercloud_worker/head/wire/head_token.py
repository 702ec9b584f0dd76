"""The token that requests to a head must carry."""

import hmac
import time
from pathlib import Path

_RELOAD_SECONDS = 1.0
"""Minimum time between two reads of the file, however many requests carry a wrong token."""


class HeadToken:
    """A token in a file that may change: a deleted Secret is recreated with another token.

    API servers that read the previous token keep using it, so it stays valid until a third appears.
    """

    def __init__(self, file: Path) -> None:
        """Read the token.

        Raises:
            OSError: the file does not exist.
            ValueError: it is empty, which every request without a token would match.
        """
        self._file = file
        self._current = self._previous = file.read_text().strip().encode()
        if not self._current:
            raise ValueError(f"token_file: {file} is empty; write a random token to it")
        self._read_at = time.monotonic()

    def is_carried_by(self, presented: str) -> bool:
        """Return whether a request presents the token."""
        return self._matches(presented) or (self._has_changed() and self._matches(presented))

    def _matches(self, presented: str) -> bool:
        content = presented.encode()
        is_current = hmac.compare_digest(content, self._current)
        return hmac.compare_digest(content, self._previous) or is_current

    def _has_changed(self) -> bool:
        moment = time.monotonic()
        if moment - self._read_at < _RELOAD_SECONDS:
            return False
        self._read_at = moment
        try:
            found = self._file.read_text().strip().encode()
        except OSError:
            return False
        if not found or found == self._current:
            return False
        self._current, self._previous = found, self._current
        return True
