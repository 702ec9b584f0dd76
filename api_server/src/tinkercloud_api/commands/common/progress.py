"""Shows on standard error what a command does, how far it is, and what it waits for.

In a terminal that is one line that changes, elsewhere a line every few seconds. Those are counted
from what the command showed last, or from the start of its process.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from tinkercloud_api.config.readable import binary_size, printable
from tinkercloud_api.process_start import STARTED_AT

_LINE_SECONDS = 5.0
_TERMINAL_SECONDS = 0.2
_SHORTEST_SECONDS = 1.0
"""Waits that have lasted less are not shown."""
_BAR_CHARACTERS = 20


class _Line:
    """The line of a terminal that changes, or lines of their own."""

    shown_at: ClassVar[float] = STARTED_AT
    """When the command last showed something, by the monotonic clock; at first its start."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self.pause = _TERMINAL_SECONDS if self._is_terminal else _LINE_SECONDS
        """Time in seconds between two texts."""

    def show(self, text: str) -> None:
        """Replace the text, or add a line."""
        shown = printable(text)
        sys.stderr.write(f"\r\x1b[K{shown}" if self._is_terminal else f"{shown}\n")
        sys.stderr.flush()
        note_output()

    def bar(self, done: int, total: int | None) -> str:
        """Return a bar and a space before a text, in a terminal and if the total is known."""
        if not self._is_terminal or not total:
            return ""
        filled = "#" * (_BAR_CHARACTERS * min(done, total) // total)
        return f"[{filled:{_BAR_CHARACTERS}}] "

    @property
    def is_due(self) -> bool:
        """Whether the command has shown nothing for as long as a text stays."""
        return time.monotonic() - _Line.shown_at >= self.pause

    def end(self) -> None:
        """Let what is printed next begin on a new line."""
        if self._is_terminal:
            sys.stderr.write("\n")


def note_output() -> None:
    """Note that the command has just shown something, so that no line is needed for a while."""
    _Line.shown_at = time.monotonic()


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

    def __call__(self, size: int) -> None:
        """Count some more bytes."""
        self._done += size
        if self._line.is_due:
            self._show()

    def finish(self) -> None:
        """Show the whole."""
        self._total = self._done if self._total is not None else None
        self._show()
        self._line.end()

    def text(self) -> str:
        """Return how much was copied, such as `copied 1.0 MiB of 3.0 MiB`."""
        of = ""
        if self._total is not None:
            # The server may write while its files are copied.
            of = f" of {binary_size(max(self._total, self._done))}"
        return f"{self._verb} {binary_size(self._done)}{of}"

    def _show(self) -> None:
        self._line.show(f"{self._line.bar(self._done, self._total)}{self.text()}")


class StateProgress:
    """Shows the states of something that the command waits for."""

    def __init__(self) -> None:
        self._line = _Line()
        self._has_shown = False

    def __call__(self, text: str) -> None:
        """Show a state, unless another one was shown just now."""
        if not self._has_shown or self._line.is_due:
            self._line.show(text)
            self._has_shown = True

    def finish(self) -> None:
        """Let what is printed next begin on a new line."""
        if self._has_shown:
            self._line.end()


@contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """Show what a command waits for, and for how long, within the context.

    Args:
        what: a clause such as `waiting for the server`, or a function that returns it with how far
            it is.
    """
    ended, line, began = threading.Event(), _Line(), time.monotonic()

    def run() -> None:
        # The first line comes late even in a terminal: most waits are short.
        pause, shown_at = _LINE_SECONDS, None
        while not ended.wait(max(_Line.shown_at + pause - time.monotonic(), _TERMINAL_SECONDS)):
            now = time.monotonic()
            if now >= max(_Line.shown_at + pause, began + _SHORTEST_SECONDS):
                shown = what if isinstance(what, str) else what()
                line.show(f"{shown}, for {now - began:.0f} s")
                shown_at = _Line.shown_at
            # What the command shows itself is not replaced before it has become old.
            pause = line.pause if _Line.shown_at == shown_at else _LINE_SECONDS
        if shown_at is not None:
            line.end()

    showing = threading.Thread(target=run, daemon=True)
    showing.start()
    try:
        yield
    finally:
        ended.set()
        showing.join()


@contextmanager
def copying(verb: str, total: int | None) -> Iterator[CopyProgress]:
    """Show how much is copied within the context, also for as long as no bytes pass.

    That is so while a disk or a server completes what was written to it.

    Args:
        verb: as of `CopyProgress`.
        total: as of `CopyProgress`.
    """
    progress = CopyProgress(verb, total)
    with waiting(progress.text):
        yield progress
    progress.finish()
