"""Measurement method: interleaved runs, medians, and ratios rather than seconds.

Absolute times on a shared machine are meaningless; ratios of interleaved runs are not.
"""

import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROUNDS = 7


@dataclass(frozen=True)
class Measurement:
    """One row of the table. `value` is compared with `wanted` (`<= x` or `>= x`)."""

    id: str
    what: str
    value: float
    unit: str
    wanted: str
    strong: str = ""
    note: str = ""

    def as_row(self) -> dict[str, object]:
        return asdict(self)

    @property
    def verdict(self) -> str:
        """Return whether the target is met or exceeded."""
        if self.strong and _holds(self.value, self.strong):
            return "strong"
        return "pass" if _holds(self.value, self.wanted) else "below"


def _holds(value: float, bound: str) -> bool:
    operator, number = bound.split()
    return value <= float(number) if operator == "<=" else value >= float(number)


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest error; infinity if one is not finite, because `max` skips most NaN."""
    known = [float(error) for error in errors]
    return max(known) if all(map(math.isfinite, known)) else math.inf


def medians(*works: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Return the median seconds of each piece of work; they take turns."""
    for work in works:
        work()
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for taken, work in zip(seconds, works, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def peak_rss_bytes() -> int:
    """Return the most memory this process has held since the mark was last reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def revision(root: Path) -> dict[str, object]:
    """Return a folder's commit and whether files differ from it; None if it is not a clone."""
    if _git(root, "rev-parse", "--show-prefix") != "":
        return {"commit": None, "dirty": None}
    # Result files do not count as changes.
    changed = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": changed != ""}


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git for a folder; None if empty, or if git is missing."""
    git = shutil.which("git")
    if git is None:
        return None
    asked = subprocess.run([git, *arguments], cwd=root, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None
