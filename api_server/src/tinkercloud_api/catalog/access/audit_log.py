"""The audit log: who asked for which change, when, and with which outcome.

Rows are only added: one before a request runs, one with its outcome. Each has a hash of its content
and of the row before (`audit_chain`). Retention replaces rows by one that continues the chain.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, Select, delete, func, select, true, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import aliased

from tinkercloud_api.catalog.access import audit_chain
from tinkercloud_api.catalog.access.audit_chain import ChainCheck, Mark, Verdict
from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import AuditChain, AuditEntry, now
from tinkercloud_api.config.readable import moment

SERVER = "server:"
"""Owner of what the server does by itself."""
RESTORE = "backup_restore"
"""Event of a restore of the whole catalog, written to the restored one."""
RESTORED = "backup of "
"""Start of the object of that event that says when the backup was made."""
MAX_ENTRIES_PER_OWNER = 200_000
"""Rows that are kept for one owner, so that a flood of requests removes only its own."""
_MAX_FORGOTTEN = 10_000
"""Limit of old rows that one housekeeping round removes."""
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which entries to return."""

    owner: str | None
    """None means all owners."""
    since: datetime
    until: datetime
    event_prefix: str = ""
    """Start of the events' names; empty for all."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry, with its outcome if there is one."""

    entry: AuditEntry
    outcome: dict[str, Any]


class AuditLog(Statements):
    """Records requests before they run, and their outcome."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Open the log in a catalog's database. Belongs to one event loop."""
        super().__init__(engine)
        self._turn = asyncio.Lock()
        self._gathered: list[AuditEntry] = []
        self._gathering: asyncio.Task[None] | None = None

    async def begin(
        self, owner: str, key_id: int | None, event: str, details: dict[str, Any]
    ) -> AuditEntry:
        """Record a request that is about to run.

        Raises:
            Unavailable: the database does not respond; the request must not run.
        """
        entry = AuditEntry(owner=owner, key_id=key_id, event=event, details=details)
        await self._append(entry)
        return entry

    async def finish(self, entry: AuditEntry, outcome: dict[str, Any]) -> None:
        """Record the outcome of a request, which replaces details of the same name.

        Raises:
            Unavailable: the database does not respond; the entry stays without an outcome.
        """
        await self._append(
            AuditEntry(
                owner=entry.owner,
                key_id=entry.key_id,
                event=entry.event,
                details=outcome,
                outcome_of=entry.id,
            )
        )

    async def _append(self, entry: AuditEntry) -> None:
        """Write a row, in one transaction with those that other requests write meanwhile."""
        self._gathered.append(entry)
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._write_gathered())
        await asyncio.shield(self._gathering)

    async def _write_gathered(self) -> None:
        async with self._turn:
            entries, self._gathered, self._gathering = self._gathered, [], None
            async with self._writing() as db:
                await _add(db, entries)

    async def entries(self, query: AuditQuery, page: Page) -> Sequence[Recorded]:
        """Return entries, the earliest first."""
        outcome = aliased(AuditEntry)
        selected = (
            select(AuditEntry, outcome.details)
            .join(outcome, outcome.outcome_of == AuditEntry.id, isouter=True)
            .where(AuditEntry.outcome_of.is_(None), AuditEntry.event != audit_chain.REMOVED)
            .where(AuditEntry.at >= query.since, AuditEntry.at < query.until)
        )
        if query.owner is not None:
            selected = selected.where(AuditEntry.owner == query.owner)
        if query.event_prefix:
            selected = selected.where(
                AuditEntry.event.startswith(query.event_prefix, autoescape=True)
            )
        ordered = selected.order_by(AuditEntry.id).offset(page.offset).limit(page.limit)
        async with self._reading() as db:
            rows = (await db.execute(ordered)).all()
        return [Recorded(entry, found or {}) for entry, found in rows]

    async def latest(self, event: str) -> AuditEntry | None:
        """Return the latest entry of an event."""
        query = select(AuditEntry).where(AuditEntry.event == event)
        return await self._one(query.order_by(AuditEntry.id.desc()).limit(1))

    async def restored_backup(self) -> str:
        """Return the backup from which the catalog was restored last; empty if there is none."""
        entry = await self.latest(RESTORE)
        objects = entry.details.get("objects", []) if entry is not None else []
        return next((each for each in objects if each.startswith(RESTORED)), "")

    async def export(self, write: Callable[[AuditEntry], object]) -> None:
        """Call a function with each row, outcomes and stand-ins of removed ones too, in order."""
        query = select(AuditEntry).order_by(AuditEntry.id)
        async with self._reading() as db:
            found = await db.stream_scalars(query.execution_options(yield_per=_BATCH))
            async for entry in found:
                write(entry)

    async def verify(self, mark: Mark | None = None) -> Verdict:
        """Check that no row was changed, inserted or removed.

        Args:
            mark: a row that must be in the log.
        """
        check = ChainCheck(mark)
        # One statement: rows that are added or removed meanwhile do not count as faults.
        end = select(AuditChain.number, AuditChain.hash, AuditEntry)
        query = end.join_from(AuditChain, AuditEntry, true(), isouter=True).order_by(AuditEntry.id)
        newest = Mark(0, "")
        async with self._reading() as db:
            found = await db.stream(query.execution_options(yield_per=_BATCH))
            async for number, digest, entry in found:
                newest = Mark(number, digest)
                if entry is not None:
                    check.add(entry)
        return check.finish(newest)

    async def forget(self, before: datetime) -> None:
        """Remove some of the rows that are older than a time, the earliest first."""
        old = select(AuditEntry.id).where(
            AuditEntry.at < before, AuditEntry.event != audit_chain.REMOVED
        )
        some = (await self._numbers(old.order_by(AuditEntry.id).limit(_MAX_FORGOTTEN)))[-1:]
        for last in some:
            is_old = AuditEntry.at < before
            await self._remove(last, is_old, f"older than {moment(before)}")

    async def forget_surplus(self, kept: int = MAX_ENTRIES_PER_OWNER) -> None:
        """Trim the log of each owner that has more than `kept` rows to its newest `0.9 * kept`."""
        surplus = select(AuditEntry.owner).where(AuditEntry.owner.not_in([SERVER, ""]))
        surplus = surplus.group_by(AuditEntry.owner).having(func.count() > kept)
        async with self._reading() as db:
            owners = (await db.scalars(surplus)).all()
        for owner in owners:
            is_own = AuditEntry.owner == owner
            own = select(AuditEntry.id).where(is_own).order_by(AuditEntry.id.desc())
            for last in await self._numbers(own.offset(kept - kept // 10).limit(1)):
                await self._remove(last, is_own, f"more than {kept} rows of {owner}")

    async def _numbers(self, query: Select[int]) -> Sequence[int]:
        async with self._reading() as db:
            return (await db.scalars(query)).all()

    async def _remove(self, last: int, which: ColumnElement[bool], why: str) -> None:
        """Remove rows up to a number, and record that in the log."""
        emptied = update(AuditEntry).where(
            which, AuditEntry.id <= last, AuditEntry.event != audit_chain.REMOVED
        )
        following = aliased(AuditEntry)
        next_event = (
            select(following.event)
            .where(following.id > AuditEntry.id)
            .order_by(following.id)
            .limit(1)
            .correlate(AuditEntry)
            .scalar_subquery()
        )
        is_continued = next_event == audit_chain.REMOVED
        joined = delete(AuditEntry).where(AuditEntry.event == audit_chain.REMOVED, is_continued)
        unsynchronized = {"synchronize_session": False}
        async with self._writing() as db:
            await _lock(db, 0)
            earlier = await _removed_in_all(db)
            result = await db.execute(
                emptied.values(
                    owner="", key_id=None, event=audit_chain.REMOVED, details={}, outcome_of=None
                ),
                execution_options=unsynchronized,
            )
            removed = result.rowcount if isinstance(result, CursorResult) else 0
            await db.execute(joined, execution_options=unsynchronized)
            if removed:
                reason = f"removed {removed} rows up to {last}: {why}"
                await _add(db, [_removal(reason, removed + earlier)])


async def _lock(db: AsyncSession, added: int) -> Mark:
    """Return the newest row after `added` numbers were reserved; others wait for this transaction.

    It is the first statement of a transaction, because SQLite lets only that wait for others.
    """
    reserved = update(AuditChain).values(number=AuditChain.number + added)
    row = (await db.execute(reserved.returning(AuditChain.number, AuditChain.hash))).one()
    return Mark(row.number - added, row.hash)


async def _add(db: AsyncSession, entries: Sequence[AuditEntry]) -> None:
    """Add rows to the end of the chain."""
    newest = await _lock(db, len(entries))
    for number, entry in enumerate(entries, start=newest.number + 1):
        entry.id, entry.at = number, now()
        entry.hash = audit_chain.link_entry(newest.hash, entry)
        newest = Mark(number, entry.hash)
    db.add_all(entries)
    await db.execute(update(AuditChain).values(hash=newest.hash))


async def _removed_in_all(db: AsyncSession) -> int:
    query = select(AuditEntry.details).where(AuditEntry.event == audit_chain.RETENTION)
    details = await db.scalar(query.order_by(AuditEntry.id.desc()).limit(1)) or {}
    return int(details.get(audit_chain.REMOVED_IN_ALL, 0))


def _removal(reason: str, removed_in_all: int) -> AuditEntry:
    details = {
        "method": "SERVER",
        "path": reason,
        "status": "done",
        audit_chain.REMOVED_IN_ALL: removed_in_all,
    }
    return AuditEntry(owner=SERVER, key_id=None, event=audit_chain.RETENTION, details=details)
