"""The disks that the API server writes to, and how much room they have."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tinkercloud_api.config.settings import Settings

LOW_DISK_BYTES = 5 << 30
"""Free bytes below which a disk counts as nearly full."""


@dataclass(frozen=True, slots=True)
class FullDisk:
    """A disk with little room."""

    folder: Path
    """What the server keeps on it."""
    free_bytes: int


def full_disks(settings: Settings) -> Iterator[FullDisk]:
    """Yield the nearly full disks of the state folder, and of the checkpoints if they are local."""
    folders = [settings.state_dir]
    url = urlsplit(settings.checkpoint_url)
    if url.scheme == "file":
        folders.append(Path(url2pathname(url.path)))
    devices = set[int]()
    for folder in folders:
        try:
            device, free = folder.stat().st_dev, shutil.disk_usage(folder).free
        except OSError:
            # A missing folder of checkpoints is created by the first one; a lost disk fails a ping.
            continue
        if device not in devices and free < LOW_DISK_BYTES:
            yield FullDisk(folder, free)
        devices.add(device)
