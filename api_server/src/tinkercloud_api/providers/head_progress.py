"""How far a session head of this machine is that loads its model."""

import os
from pathlib import Path

from tinkercloud_api.config.readable import binary_size


def weight_bytes(folder: Path) -> int:
    """Return the size of the weight files of a model that a head loads."""
    # Some folders have the same weights in a second format.
    files = [
        file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")
    ]
    return sum(file.stat().st_size for file in files or folder.glob("pytorch_model*.bin"))


def resident_bytes(pid: int) -> int | None:
    """Return the memory of a process in bytes; None if it is not running, or not on Linux."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def describe(seconds: float, pid: int | None, num_bytes: int, doing: str | None) -> str:
    """Describe a head that has been loading for some seconds.

    Args:
        seconds: time since its start.
        pid: its process, if there is one.
        num_bytes: size of the model's weights.
        doing: what it has logged about its progress; None if its process is only starting.
    """
    memory = resident_bytes(pid) if pid is not None else None
    has = f"; {binary_size(memory)} in memory" if memory is not None else ""
    weights = f"its weights have {binary_size(num_bytes)}"
    return f"for {seconds:.0f} s, {doing or 'starting its process'}{has}; {weights}"
