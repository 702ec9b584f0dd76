"""The room on the disk that the journals and snapshots of all runs of a head share.

Kubernetes evicts a pod that uses more than its scratch volume, and a disk that is full ends all
journals on it. So the run that takes the most gives way before that: it trains on without a
journal.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import RLock

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.wire.errors import WireError


class NoRoom(WireError):
    """A snapshot is too large for the disk; nothing of it remains there."""

    status = 503
    category = "server"


class JournalRoom:
    """Counts what the runs of a head have on the disk. Methods may be called on any thread."""

    def __init__(self, folder: Path, config: DurabilityConfig) -> None:
        """Start without runs.

        Args:
            folder: of the journals.
            config: how much room there is.
        """
        self.folder = folder
        self.max_bytes = config.max_disk_bytes
        self.largest_journal_bytes = 2 * config.max_journal_bytes
        """Size of the largest journal, which whole models leave free on the disk."""
        self.lock = RLock()
        self._shares: dict[str, RoomShare] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all journals and snapshots."""
        return sum(share.num_bytes for share in self._shares.values())

    @property
    def num_runs(self) -> int:
        """Number of runs with files."""
        return len(self._shares)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of whole models that are being written; some may be on the disk already."""
        return sum(share.reserved_bytes for share in self._shares.values())

    def share(self, name: str, owner: str) -> "RoomShare":
        """Return the share of a run, which replaces an earlier one of it.

        Args:
            name: id of the run.
            owner: owner of the run.
        """
        with self.lock:
            share = self._shares[name] = RoomShare(self, owner)
            return share

    def remove(self, name: str) -> None:
        """Forget a run whose files were deleted. Idempotent."""
        with self.lock:
            self._shares.pop(name, None)

    def make_room(self) -> None:
        """Degrade runs until the disk has no more than allowed.

        The first is the largest one of the owner with the most.
        """
        while self.max_bytes is not None:
            staying = [each for each in self._shares.values() if not each.is_leaving]
            shares = [each for each in staying if each.can_give_way]
            if not shares or sum(each.num_bytes for each in staying) <= self.max_bytes:
                return
            totals: dict[str, int] = {}
            for each in staying:
                totals[each.owner] = totals.get(each.owner, 0) + each.num_bytes
            max(shares, key=lambda each: (totals[each.owner], each.num_bytes)).leave()


class RoomShare:
    """What one run has on the disk. Methods may be called on any thread, except `set_journal`."""

    def __init__(self, room: JournalRoom, owner: str) -> None:
        """Start empty; see `JournalRoom.share`."""
        self._room = room
        self.owner = owner
        self.give_way: Callable[[str], None] | None = None
        """Deletes the journal and the last snapshot, and is given the reason. None if no head
        trains the run."""
        self._journal = self._snapshot = self._staged = self.reserved_bytes = 0
        self._needed = 0
        """Size of the last snapshot that was complete, or had no room, in bytes."""
        self.is_leaving = False
        """Whether the run has given way, and its files are being deleted."""
        self.is_abandoned = False
        """Whether all files will be deleted."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the journal, the snapshot, and the next snapshot as far as it is written."""
        return self._journal + self._snapshot + self._staged

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal."""
        return self._journal

    @property
    def can_give_way(self) -> bool:
        """Whether `give_way` would delete anything."""
        return self.give_way is not None and self._journal + self._snapshot > 0

    def found(self, journal_bytes: int, snapshot_bytes: int) -> None:
        """Record what the disk has of the run."""
        with self._room.lock:
            self._journal, self._snapshot = journal_bytes, snapshot_bytes
            self._needed = snapshot_bytes

    def set_journal(self, num_bytes: int) -> None:
        """Record the size of the journal. If it exceeds the room, the largest run gives way.

        Call it on the thread of the runs.
        """
        with self._room.lock:
            grows, self._journal = num_bytes > self._journal, num_bytes
            if grows:
                self._room.make_room()

    def check_snapshot(self) -> None:
        """Check that a snapshot as large as the last one has room.

        Raises:
            NoRoom: it does not. The next call lets the snapshot be measured again.
        """
        with self._room.lock:
            needed, self._needed = self._needed, 0
            self._check(needed)
            self._needed = needed

    def stage(self, num_bytes: int) -> None:
        """Count a file of the next snapshot before it is written.

        Raises:
            NoRoom: there is no room for it.
        """
        with self._room.lock:
            self._needed = max(self._needed, self._staged + num_bytes)
            self._check(num_bytes)
            self._staged += num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count a whole model's next snapshot, and check that the disk has room for it. Blocks.

        Raises:
            NoRoom: there is no room for it.
            OSError: the disk can't be read.
        """
        # Without the lock, which other threads need even if the disk does not respond.
        free = shutil.disk_usage(self._room.folder).free
        with self._room.lock:
            kept = self._room.largest_journal_bytes + self._room.reserved_bytes
            if num_bytes + kept > free:
                raise NoRoom(
                    f"no room for a snapshot: it takes {num_bytes} bytes, {kept} are kept for"
                    f" journals and other snapshots, and {free} are free in {self._room.folder}"
                )
            self.stage(num_bytes)
            self.reserved_bytes = num_bytes

    def sampler_bytes(self) -> int | None:
        """Return how many bytes of samplers the next snapshot may have, once its state is staged.

        While it exists, the snapshot after it, of the same size, must have room too, and so must
        those of the other runs. None if only the disk is a limit.
        """
        with self._room.lock:
            if self._room.max_bytes is None:
                return None
            room = self._room.max_bytes - self._room.largest_journal_bytes // 2
            now = room - self._room.used_bytes
            with_next = (now + self._snapshot - self._staged) // 2
            fair = room // (2 * self._room.num_runs) - self._staged
            return max(0, min(now, with_next, fair))

    def abandon(self) -> None:
        """Record that the files will be deleted, so that no snapshot has to be completed."""
        self.is_abandoned = True

    def _check(self, num_bytes: int) -> None:
        limit = self._room.max_bytes
        if limit is not None and self._room.used_bytes + num_bytes > limit:
            raise NoRoom(self._describe(f", and its next snapshot needs {num_bytes} more"))

    def committed(self) -> None:
        """Record that the next snapshot has replaced the last one."""
        with self._room.lock:
            self._snapshot = self._needed = self._staged
            self._staged = self.reserved_bytes = 0

    def discarded(self) -> None:
        """Record that the files of the next snapshot were deleted. Idempotent."""
        with self._room.lock:
            self._staged = self.reserved_bytes = 0

    def left(self) -> None:
        """Record that this head does not train the run any more; its files stay."""
        with self._room.lock:
            self.give_way, self._staged, self.reserved_bytes = None, 0, 0

    def cleared(self) -> None:
        """Record that journal and snapshot were deleted."""
        with self._room.lock:
            self._journal = self._snapshot = 0
            self.is_leaving = False

    def leave(self) -> None:
        """Let the run give way."""
        assert self.give_way is not None  # noqa: S101 - `make_room` chooses such runs
        reason = self._describe(", the most of the owner with the most")
        self.is_leaving = True
        self.give_way(reason)

    def _describe(self, why: str) -> str:
        return (
            f"no room: the journals and snapshots of this head have {self._room.used_bytes} bytes,"
            f" of which {self.num_bytes} are this run's{why}; the limit is {self._room.max_bytes}"
            " (durability.max_disk_bytes; on Kubernetes a share of head.resources.scratch):"
            " raise it, or train fewer models"
        )


def num_bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder. Blocks."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
