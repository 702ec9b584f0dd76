"""The chain of the audit log: every row has a hash of its content and of the row before.

To change, remove or insert a row unnoticed, all later hashes have to be computed again, and a hash
that was noted elsewhere can't be.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tinkercloud_api.catalog.schema.tables import AuditEntry

REMOVED = "removed"
"""Event of a row that stands for one or more removed rows, up to its own number. It has the hash of
the last of them, from which the chain continues."""
RETENTION = "audit_remove"
"""Event of the entry that records how many rows were removed."""
REMOVED_IN_ALL = "removed_in_all"
"""Its detail: the number of rows that were ever removed."""
_MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the chain that was noted elsewhere."""

    number: int
    hash: str


@dataclass(slots=True)
class Verdict:
    """What a check of the chain has found."""

    entries: int = 0
    """Rows whose content was checked."""
    removed: int = 0
    """Rows that were removed."""
    newest: Mark = field(default_factory=lambda: Mark(0, ""))
    """The last row that was checked."""
    faults: list[str] = field(default_factory=list)
    """Where the chain is broken, in sentences; at most 20."""


def link(
    previous: str,
    number: int,
    at: datetime,
    row: Mapping[str, Any],
) -> str:
    """Return the hash of a row, in hexadecimal.

    Args:
        previous: the hash of the row before; empty for the first one.
        number: the number of the row.
        at: when it was written.
        row: its columns `owner`, `key_id`, `event`, `details` and `outcome_of`.
    """
    content = {
        "number": number,
        "at": at.astimezone(UTC).isoformat(timespec="microseconds"),
        **{name: row[name] for name in ("owner", "key_id", "event", "details", "outcome_of")},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def link_entry(previous: str, entry: AuditEntry) -> str:
    """Return the hash of a row of the table."""
    columns = {
        "owner": entry.owner,
        "key_id": entry.key_id,
        "event": entry.event,
        "details": entry.details,
        "outcome_of": entry.outcome_of,
    }
    return link(previous, entry.id, entry.at, columns)


class ChainCheck:
    """Checks the rows of a log, which are added in their order."""

    def __init__(self, mark: Mark | None) -> None:
        """Begin before the first row.

        Args:
            mark: a row that must be in the log.
        """
        self._mark = mark
        self._recorded = 0
        self.verdict = Verdict()

    def add(self, entry: AuditEntry) -> None:
        """Check the next row."""
        verdict, last = self.verdict, self.verdict.newest
        if entry.id <= last.number:
            self._fault(f"entry {entry.id} comes after entry {last.number}: it was inserted")
            return
        if entry.event == REMOVED:
            verdict.removed += entry.id - last.number
        else:
            verdict.entries += 1
            if entry.id != last.number + 1:
                missing = f"entries {last.number + 1} to {entry.id - 1}"
                self._fault(f"{missing} are missing: they were deleted without a trace")
            elif link_entry(last.hash, entry) != entry.hash:
                self._fault(
                    f"entry {entry.id} ({entry.event} of {entry.owner}) was inserted, or is not as"
                    " it was written"
                )
            if entry.event == RETENTION:
                self._read_removal(entry)
        verdict.newest = Mark(entry.id, entry.hash)
        self._compare(last.number)

    def finish(self, newest: Mark) -> Verdict:
        """Return the verdict.

        Args:
            newest: the last row, as the catalog records it apart from the rows.
        """
        verdict, last = self.verdict, self.verdict.newest
        if newest.number > last.number:
            self._fault(f"entries {last.number + 1} to {newest.number}, the newest, are missing")
        elif newest != last:
            self._fault(f"entry {last.number}, the newest, is not the one that was written last")
        if verdict.removed != self._recorded:
            self._fault(
                f"{verdict.removed} entries were removed, but the log records the removal of"
                f" {self._recorded}"
            )
        if self._mark is not None and self._mark.number > last.number:
            self._fault(f"entry {self._mark.number} is not in the log, which ends before it")
        return verdict

    def _read_removal(self, entry: AuditEntry) -> None:
        number = entry.details.get(REMOVED_IN_ALL, 0)
        if isinstance(number, int):
            self._recorded = number
        else:
            self._fault(f"entry {entry.id}: {REMOVED_IN_ALL} is {number!r}; expected a number")

    def _compare(self, previous: int) -> None:
        """Compare the newest row, and removed ones that it stands for, with the mark."""
        newest, mark = self.verdict.newest, self._mark
        if mark is None or not previous < mark.number <= newest.number:
            return
        if mark.number < newest.number:
            self._fault(f"entry {mark.number} was removed, so its hash can't be compared")
        elif mark.hash != newest.hash:
            self._fault(f"entry {mark.number} has the hash {newest.hash}, not {mark.hash}")

    def _fault(self, sentence: str) -> None:
        if len(self.verdict.faults) < _MAX_FAULTS:
            self.verdict.faults.append(sentence)
