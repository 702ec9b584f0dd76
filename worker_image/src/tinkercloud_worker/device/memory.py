"""Memory that is left for new models, on the machine and within the limit of a container."""

from collections.abc import Callable
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
"""Of this process, as containers see it (cgroup v2)."""

Available = Callable[[], int | None]
"""Returns the bytes that may still be taken; None where that can't be told."""


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of host memory that this process may still take.

    Args:
        meminfo: what Linux says of the machine.
        cgroup: folder of the control group that bounds this process, if one does.

    Returns:
        The smaller of what the machine and the control group have left, file caches that can be
        dropped included; None where neither can be read, as on other systems than Linux.
    """
    left = [room for room in (_of_machine(meminfo), _of_cgroup(cgroup)) if room is not None]
    return min(left, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        kibibytes = _numbers(meminfo).get("MemAvailable:")
    except OSError:
        return None
    return kibibytes * 1024 if kibibytes is not None else None


def _of_cgroup(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if not limit.isdecimal():
            return None
        used = int((folder / "memory.current").read_text())
        cached = _numbers(folder / "memory.stat").get("inactive_file", 0)
    except OSError:
        return None
    return int(limit) - used + cached


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line by its first word."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
