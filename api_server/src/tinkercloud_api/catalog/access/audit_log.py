"""The audit log: who asked for which change, when, and with which outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update

from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import AuditEntry

MAX_ENTRIES_PER_OWNER = 100_000
"""Entries that are kept for one owner, so that a flood of requests removes only its own."""
_MAX_FORGOTTEN = 10_000
"""Limit of entries that one housekeeping round deletes."""


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which entries to return."""

    owner: str | None
    """None means all owners."""
    since: datetime
    until: datetime
    event_prefix: str = ""
    """Start of the events' names; empty for all."""


class AuditLog(Statements):
    """Records requests before they run, and their outcome."""

    async def begin(
        self, owner: str, key_id: int | None, event: str, details: dict[str, Any]
    ) -> int:
        """Record a request that is about to run; return the number of the entry.

        Raises:
            Unavailable: the database does not respond; the request must not run.
        """
        entry = AuditEntry(owner=owner, key_id=key_id, event=event, details=details)
        async with self._writing() as db:
            db.add(entry)
        return entry.id

    async def finish(self, entry_id: int, details: dict[str, Any]) -> None:
        """Record the outcome of a request, in its details."""
        changed = update(AuditEntry).where(AuditEntry.id == entry_id).values(details=details)
        await self._change(changed)

    async def entries(self, query: AuditQuery, page: Page) -> Sequence[AuditEntry]:
        """Return entries, the earliest first."""
        selected = select(AuditEntry).where(AuditEntry.at >= query.since)
        selected = selected.where(AuditEntry.at < query.until)
        if query.owner is not None:
            selected = selected.where(AuditEntry.owner == query.owner)
        if query.event_prefix:
            selected = selected.where(
                AuditEntry.event.startswith(query.event_prefix, autoescape=True)
            )
        ordered = selected.order_by(AuditEntry.at, AuditEntry.id)
        return await self._all(ordered.offset(page.offset).limit(page.limit))

    async def forget(self, before: datetime) -> None:
        """Delete some of the entries that are older than a time, the earliest first."""
        old = select(AuditEntry.id).where(AuditEntry.at < before)
        some = old.order_by(AuditEntry.at).limit(_MAX_FORGOTTEN)
        await self._change(delete(AuditEntry).where(AuditEntry.id.in_(some)))

    async def forget_surplus(self, kept: int = MAX_ENTRIES_PER_OWNER) -> None:
        """Delete the earliest entries of owners that have more than `kept`."""
        surplus = select(AuditEntry.owner).group_by(AuditEntry.owner).having(func.count() > kept)
        async with self._reading() as db:
            owners = (await db.scalars(surplus)).all()
        for owner in owners:
            own = select(AuditEntry.id).where(AuditEntry.owner == owner)
            last = own.order_by(AuditEntry.id.desc()).offset(kept).limit(1).scalar_subquery()
            await self._change(
                delete(AuditEntry).where(AuditEntry.owner == owner, AuditEntry.id <= last)
            )
