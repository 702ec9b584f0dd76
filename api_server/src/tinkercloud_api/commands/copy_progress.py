"""Shows on standard error how much of something was copied."""

import sys
import time

_LINE_SECONDS = 5.0
_TERMINAL_SECONDS = 0.2
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def binary_size(size: int) -> str:
    """Return a number of bytes for people, such as `1.5 GiB`."""
    shown, unit = float(size), 0
    while shown >= 1024 and unit < len(_UNITS) - 1:
        shown, unit = shown / 1024, unit + 1
    return f"{shown:.1f} {_UNITS[unit]}" if unit else f"{size} bytes"


class CopyProgress:
    """Shows a line every few seconds, or one that changes if there is a terminal."""

    def __init__(self, verb: str, total: int | None) -> None:
        """Begin.

        Args:
            verb: what is done, such as `copied`.
            total: number of all bytes, about; None if it is not known.
        """
        self._verb, self._total = verb, total
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._pause = _TERMINAL_SECONDS if self._is_terminal else _LINE_SECONDS
        self._shown_at = time.monotonic()

    def __call__(self, size: int) -> None:
        """Count some more bytes."""
        self._done += size
        if time.monotonic() - self._shown_at >= self._pause:
            self._show(end="\r" if self._is_terminal else "\n")
            self._shown_at = time.monotonic()

    def finish(self) -> None:
        """Show the whole."""
        self._total = self._done if self._total is not None else None
        self._show(end="\n")

    def _show(self, end: str) -> None:
        of = ""
        if self._total is not None:
            # The server may write while its files are copied.
            of = f" of {binary_size(max(self._total, self._done))}"
        text = f"{self._verb} {binary_size(self._done)}{of}"
        sys.stderr.write(f"\x1b[K{text}{end}" if self._is_terminal else f"{text}{end}")
        sys.stderr.flush()
