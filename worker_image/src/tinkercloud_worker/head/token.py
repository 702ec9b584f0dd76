"""The token that a request must carry to be served by a head."""

import hmac
import time
from pathlib import Path

_LOOK_SECONDS = 1.0
"""At least this long between two looks at the file, however many requests carry a wrong token."""


class HeadToken:
    """A token in a file that may be replaced: a Secret that was deleted is made again with another.

    API servers that read the one before go on with it, so it is good until a third one comes.
    """

    def __init__(self, file: Path) -> None:
        """Read the token.

        Raises:
            OSError: there is no such file.
            ValueError: it is empty, which every request without a token would match.
        """
        self._file = file
        self._current = self._previous = file.read_text().strip().encode()
        if not self._current:
            raise ValueError(f"token_file {file} is empty; write a random token into it")
        self._looked_at = time.monotonic()

    def is_carried_by(self, presented: str) -> bool:
        """Return whether what a request presents is the token."""
        return self._matches(presented) or (self._has_changed() and self._matches(presented))

    def _matches(self, presented: str) -> bool:
        content = presented.encode()
        is_current = hmac.compare_digest(content, self._current)
        return hmac.compare_digest(content, self._previous) or is_current

    def _has_changed(self) -> bool:
        moment = time.monotonic()
        if moment - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = moment
        try:
            found = self._file.read_text().strip().encode()
        except OSError:
            return False
        if not found or found == self._current:
            return False
        self._current, self._previous = found, self._current
        return True
