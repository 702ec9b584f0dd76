"""How things are measured: interleaved, the median of several, ratios rather than seconds.

Absolute times on a shared machine mean nothing; a ratio of two things that took turns does.
"""

import math
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
    """One row of the table. `value` is what is compared with `wanted` (`<= x` or `>= x`)."""

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
        """Whether it is as wanted, or better."""
        if self.strong and _holds(self.value, self.strong):
            return "strong"
        return "pass" if _holds(self.value, self.wanted) else "below"


def _holds(value: float, bound: str) -> bool:
    operator, number = bound.split()
    return value <= float(number) if operator == "<=" else value >= float(number)


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest; infinity if one is not finite, since `max` passes over most NaN."""
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


def revision(root: Path) -> dict[str, object]:
    """Return which commit a folder is, and whether files differ from it; None: it is no clone."""
    if _git(root, "rev-parse", "--show-prefix") != "":
        return {"commit": None, "dirty": None}
    # What is written by measuring is no part of what is measured.
    changed = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": changed != ""}


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git says of a folder; None: nothing, or there is no git."""
    git = shutil.which("git")
    if git is None:
        return None
    asked = subprocess.run([git, *arguments], cwd=root, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None
