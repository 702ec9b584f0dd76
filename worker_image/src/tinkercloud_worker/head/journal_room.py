"""The room on the disk that the journals and snapshots of all runs of a head share.

Kubernetes evicts a pod that uses more than its scratch volume, which would end every run of the
head. So the run that takes the most gives way before that: it trains on without a journal.
"""

from collections.abc import Callable
from pathlib import Path

from tinkercloud_protocol.errors import WireError


class NoRoom(WireError):
    """A snapshot has no room on the disk."""


class JournalRoom:
    """Counts what the runs of a head have on the disk. Belongs to one event loop."""

    def __init__(self, max_bytes: int | None) -> None:
        """Start without runs.

        Args:
            max_bytes: for all journals and snapshots together; None if only the disk is a limit.
        """
        self.max_bytes = max_bytes
        self._shares: dict[str, RoomShare] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all journals and snapshots."""
        return sum(share.num_bytes for share in self._shares.values())

    def share(
        self, name: str, owner: str, give_way: Callable[[str], None] | None = None
    ) -> "RoomShare":
        """Return the share of a run, which replaces an earlier one of it.

        Args:
            name: id of the run.
            owner: owner of the run.
            give_way: deletes the run's files, and is given the reason. None if no head trains it.
        """
        share = self._shares[name] = RoomShare(self, owner, give_way)
        return share

    def remove(self, name: str) -> None:
        """Forget a run whose files were deleted. Idempotent."""
        self._shares.pop(name, None)

    def make_room(self) -> None:
        """Let runs give way until there is no more on the disk than allowed.

        The first is the largest one of the owner with the most.
        """
        while self.max_bytes is not None and self.used_bytes > self.max_bytes:
            shares = [each for each in self._shares.values() if each.give_way and each.num_bytes]
            totals: dict[str, int] = {}
            for each in shares:
                totals[each.owner] = totals.get(each.owner, 0) + each.num_bytes
            if not shares:
                return
            max(shares, key=lambda each: (totals[each.owner], each.num_bytes)).clear()


class RoomShare:
    """What one run has on the disk. Belongs to one event loop."""

    def __init__(
        self, room: JournalRoom, owner: str, give_way: Callable[[str], None] | None
    ) -> None:
        """Start empty; see `JournalRoom.share`."""
        self._room = room
        self.owner = owner
        self.give_way = give_way
        self._journal = self._snapshot = self._staged = 0
        self._needed = 0
        """Size of the last snapshot that was complete, or had no room, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the journal, the snapshot, and the next snapshot as far as it is written."""
        return self._journal + self._snapshot + self._staged

    def found(self, journal_bytes: int, snapshot_bytes: int) -> None:
        """Record what an earlier head has left on the disk."""
        self._journal, self._snapshot = journal_bytes, snapshot_bytes
        self._needed = snapshot_bytes

    def set_journal(self, num_bytes: int) -> None:
        """Record the size of the journal. If it exceeds the room, the largest run gives way."""
        grows, self._journal = num_bytes > self._journal, num_bytes
        if grows:
            self._room.make_room()

    def check_snapshot(self, freed_bytes: int) -> None:
        """Check that a snapshot as large as the last one has room.

        Args:
            freed_bytes: bytes on the disk that are deleted before it is written.

        Raises:
            NoRoom: it does not.
        """
        self._check(self._needed - freed_bytes)

    def stage(self, num_bytes: int) -> None:
        """Count a file of the next snapshot before it is written.

        Raises:
            NoRoom: there is no room for it.
        """
        self._needed = max(self._needed, self._staged + num_bytes)
        self._check(num_bytes)
        self._staged += num_bytes

    def _check(self, num_bytes: int) -> None:
        limit = self._room.max_bytes
        if limit is not None and self._room.used_bytes + num_bytes > limit:
            raise NoRoom(self._describe(f", and its next snapshot needs {num_bytes} more"))

    def committed(self) -> None:
        """Record that the next snapshot has replaced the last one."""
        self._snapshot = self._needed = self._staged
        self._staged = 0

    def discarded(self) -> None:
        """Record that the files of the next snapshot were deleted."""
        self._staged = 0

    def cleared(self) -> None:
        """Record that journal and snapshot were deleted, or will be within a moment."""
        self._journal = self._snapshot = 0

    def clear(self) -> None:
        """Delete the run's files, except those of a snapshot that is being written."""
        assert self.give_way is not None  # noqa: S101 - `make_room` chooses such runs
        reason = self._describe(", the most of all owners and their runs")
        self.cleared()
        self.give_way(reason)

    def _describe(self, why: str) -> str:
        return (
            f"the journals and snapshots of this head have {self._room.used_bytes} bytes, of which"
            f" {self.num_bytes} are this run's{why}; the limit is {self._room.max_bytes}"
            " (durability.max_disk_bytes; on Kubernetes a share of head.resources.scratch):"
            " raise it, or train fewer models"
        )


def num_bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder. Blocks."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
