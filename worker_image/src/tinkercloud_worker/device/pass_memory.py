"""Measures how much memory passes allocate in addition to what stays between them."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

_SELF = Path("/proc/self")
_RESET_PEAK = "5"
"""What makes Linux begin a new peak of the memory of a process (proc_pid_clear_refs)."""
_REMEMBERED = 256
"""Passes whose peaks are remembered: memory that something else took meanwhile counts no longer."""


class PeakMeter(Protocol):
    """Measures the most memory that is allocated at the same time."""

    def begin(self) -> None:
        """Begin to measure."""

    def peak_bytes(self) -> int | None:
        """Return the most since `begin`, beyond what was allocated then; None if unknown."""


class HostPeak:
    """Measures the memory of this process on Linux, without what only caches files."""

    def __init__(self, folder: Path = _SELF) -> None:
        """Create it.

        Args:
            folder: what the system says of this process.
        """
        self._folder = folder
        self._before: dict[str, int] | None = None

    def begin(self) -> None:
        """See `PeakMeter`."""
        self._before = None
        # Some containers may not write here.
        with suppress(OSError):
            (self._folder / "clear_refs").write_text(_RESET_PEAK)
            self._before = self._read()

    def peak_bytes(self) -> int | None:
        """See `PeakMeter`."""
        before = self._before
        if before is None:
            return None
        # Not every system that looks like Linux has all of these; a pass must not fail for that.
        with suppress(OSError, KeyError):
            after = self._read()
            of_files = after["RssFile"] - before["RssFile"]
            return max(0, after["VmHWM"] - before["VmRSS"] - max(0, of_files))
        return None

    def _read(self) -> dict[str, int]:
        """Return the sizes of this process in bytes, by the system's names."""
        lines = (self._folder / "status").read_text().splitlines()
        words = (line.split() for line in lines if line.endswith(" kB"))
        return {name.removesuffix(":"): int(kibibytes) << 10 for name, kibibytes, _ in words}


class PassMemory:
    """The most that the last passes have allocated. Belongs to one thread."""

    def __init__(self, meter: PeakMeter | None) -> None:
        """Remember no pass.

        Args:
            meter: measures them; None: nothing is known of them.
        """
        self._meter = meter
        self._peaks: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def bytes(self) -> int:
        """The most that a pass allocated; 0 if none was measured."""
        return max(self._peaks, default=0)

    def forget(self) -> None:
        """Forget all passes."""
        self._peaks.clear()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a pass, unless it fails."""
        if self._meter is None:
            yield
            return
        self._meter.begin()
        yield
        peak = self._meter.peak_bytes()
        if peak is not None:
            self._peaks.append(peak)
