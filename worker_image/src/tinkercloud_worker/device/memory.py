"""Free memory for new models, on the machine and within the container limit."""

import ctypes
from collections.abc import Callable
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
"""The control group of this process, as seen in a container (cgroup v2)."""

Available = Callable[[], int | None]
"""Returns the bytes that can still be allocated; None if unknown."""


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of host memory that this process can still allocate.

    Args:
        meminfo: the memory statistics of the machine.
        cgroup: the folder of the control group that limits this process, if there is one.

    Returns:
        The smaller of the memory left on the machine and in the control group, including file
        caches that can be dropped; None if neither can be read, as on systems other than Linux.
    """
    left = [room for room in (_of_machine(meminfo), _of_cgroup(cgroup)) if room is not None]
    return min(left, default=None)


def part_of(available: Available, processes: int) -> Available:
    """Return one process's part of memory that several divide between them."""

    def part() -> int | None:
        total = available()
        return None if total is None else total // processes

    return part


def return_free_memory() -> None:
    """Return unused memory of the allocator to the operating system, where supported.

    Large tensors of finished steps leave gaps that glibc does not return by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
