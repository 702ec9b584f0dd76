"""Room for snapshots of whole models on the disk of a head's journals.

A disk that a snapshot fills would end the journals of all runs there.
"""

import shutil
from pathlib import Path
from threading import Lock

from tinkercloud_protocol.durability import DurabilityConfig
from tinkercloud_protocol.errors import WireError
from tinkercloud_protocol.paths import suspended_prefix


class NoRoom(WireError):
    """A snapshot is too large for the disk; nothing was written."""

    status = 503
    category = "server"


class SnapshotRoom:
    """Counts the snapshots that are being written. Methods may be called on any thread."""

    def __init__(self, folder: Path, config: DurabilityConfig) -> None:
        """Start with none.

        Args:
            folder: of the journals.
            config: how much room there is.
        """
        self._folder = folder
        self._limit = config.max_whole_model_bytes
        self._kept_free = 2 * config.max_journal_bytes
        """Room for the largest journal."""
        self._reserved: dict[str, int] = {}
        """Bytes by run. Some may be written already, so that a little too much is reserved."""
        self._lock = Lock()

    def reserve(self, run_id: str, size: int) -> None:
        """Reserve room for a snapshot until `give_back`.

        Args:
            run_id: the run.
            size: its size in bytes.

        Raises:
            NoRoom: there is not enough.
            OSError: the disk can't be read.
        """
        with self._lock:
            stored = self._stored(run_id)
            if self._limit is not None and stored + size > self._limit:
                both = f", the last one {stored}" if stored else ""
                raise NoRoom(
                    f"no room for a snapshot: it takes {size} bytes{both}, and"
                    f" durability.max_whole_model_bytes is {self._limit} (on Kubernetes, a share of"
                    " head.resources.scratch of the BaseModel)"
                )
            kept = self._kept_free + sum(self._reserved.values())
            free = shutil.disk_usage(self._folder).free
            if size + kept > free:
                raise NoRoom(
                    f"no room for a snapshot: it takes {size} bytes, {kept} are kept for journals"
                    f" and other snapshots, and {free} are free in {self._folder}"
                )
            self._reserved[run_id] = size

    def give_back(self, run_id: str) -> None:
        """Release what was reserved for a snapshot that was written, or has failed. Idempotent."""
        with self._lock:
            self._reserved.pop(run_id, None)

    def _stored(self, run_id: str) -> int:
        files = (self._folder / suspended_prefix(run_id)).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())
