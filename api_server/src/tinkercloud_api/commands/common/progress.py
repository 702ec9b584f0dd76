"""Shows on standard error what a command does, how far it is, and what it waits for.

In a terminal that is one line that changes, elsewhere a line every few seconds. What takes less
time shows nothing.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tinkercloud_api.config.readable import binary_size, printable

_LINE_SECONDS = 5.0
_TERMINAL_SECONDS = 0.2


class _Line:
    """The line of a terminal that changes, or lines of their own."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self.pause = _TERMINAL_SECONDS if self._is_terminal else _LINE_SECONDS
        """Time in seconds between two texts."""

    def show(self, text: str) -> None:
        """Replace the text, or add a line."""
        shown = printable(text)
        sys.stderr.write(f"\r\x1b[K{shown}" if self._is_terminal else f"{shown}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Let what is printed next begin on a new line."""
        if self._is_terminal:
            sys.stderr.write("\n")


class CopyProgress:
    """Shows how much of something was copied."""

    def __init__(self, verb: str, total: int | None) -> None:
        """Begin.

        Args:
            verb: what is done, such as `copied`.
            total: number of all bytes, about; None if it is not known.
        """
        self._verb, self._total = verb, total
        self._done = 0
        self._line = _Line()
        self._shown_at = time.monotonic()

    def __call__(self, size: int) -> None:
        """Count some more bytes."""
        self._done += size
        if time.monotonic() - self._shown_at >= self._line.pause:
            self._show()
            self._shown_at = time.monotonic()

    def finish(self) -> None:
        """Show the whole."""
        self._total = self._done if self._total is not None else None
        self._show()
        self._line.end()

    def _show(self) -> None:
        of = ""
        if self._total is not None:
            # The server may write while its files are copied.
            of = f" of {binary_size(max(self._total, self._done))}"
        self._line.show(f"{self._verb} {binary_size(self._done)}{of}")


class StateProgress:
    """Shows the states of something that the command waits for."""

    def __init__(self) -> None:
        self._line = _Line()
        self._shown_at = float("-inf")

    def __call__(self, text: str) -> None:
        """Show a state, unless another one was shown just now."""
        if time.monotonic() - self._shown_at >= self._line.pause:
            self._line.show(text)
            self._shown_at = time.monotonic()

    def finish(self) -> None:
        """Let what is printed next begin on a new line."""
        if self._shown_at > float("-inf"):
            self._line.end()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show what a command waits for, and for how long, within the context.

    Args:
        what: a clause such as `waiting for the server`.
    """
    ended, line, began = threading.Event(), _Line(), time.monotonic()

    def run() -> None:
        # The first line comes late even in a terminal: most waits are short.
        if ended.wait(_LINE_SECONDS):
            return
        while True:
            line.show(f"{what}, for {time.monotonic() - began:.0f} s")
            if ended.wait(line.pause):
                line.end()
                return

    shown = threading.Thread(target=run, daemon=True)
    shown.start()
    try:
        yield
    finally:
        ended.set()
        shown.join()
