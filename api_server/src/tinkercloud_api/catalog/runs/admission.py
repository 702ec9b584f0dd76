"""Admits runs of a local server under the limits of their tenant, one replica at a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tinkercloud_api.catalog.runs import run_ends
from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import STORED, Session, TenantTurn, TrainingRun, now
from tinkercloud_crds.quota_fields import Amounts, Claimant, Tenant, tenant_of, waiting_message


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a run waits."""

    message: str
    oldest_use: datetime | None
    """When the client was last active that has been inactive for longest, of the other runs that
    count; None if there is no other run."""


_ONE = Amounts(sessions=1, models=1)
"""What a run needs: on a local server a model is a session."""
_NOTHING = Amounts()


class RunQuotas(Statements):
    """Admission of runs. All replicas have the same tenants."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create it in a catalog's database."""
        super().__init__(engine)
        self._ensure_turn = self._insert_into(TenantTurn).on_conflict_do_nothing()

    async def admit(
        self, run_id: str, tenants: Sequence[Tenant], since: datetime
    ) -> Waiting | None:
        """Admit a run if the limits of its tenant allow it, oldest first.

        Args:
            run_id: the run.
            tenants: all tenants, oldest first.
            since: runs whose client was inactive since then do not count. Their models are not in
                memory.

        Returns:
            Why it waits; None if it has started, may start, or was deleted.
        """
        async with self._writing() as db:
            owner = await db.scalar(select(TrainingRun.owner).where(TrainingRun.id == run_id))
        tenant = tenant_of(owner, tenants) if owner is not None else None
        if tenant is None:
            return None
        async with self._writing() as db:
            await self._take_turn(db, tenant)
            found = await _claimants(db, tenant, tenants, since, run_id)
            own, _ = found.pop(run_id, (None, None))
            if own is None or not own.waits:
                return None
            message = waiting_message(tenant, own, [other for other, _ in found.values()])
            if message is None:
                admitted = update(TrainingRun).where(TrainingRun.id == run_id)
                await db.execute(admitted.values(admitted_at=now()))
                return None
            return Waiting(message, min((used_at for _, used_at in found.values()), default=None))

    async def follow_ends(self, on_end: Callable[[], object], waits: asyncio.Event) -> None:
        """Call `on_end` when any server has deleted runs, until cancelled.

        Args:
            on_end: called without arguments.
            waits: set while a run waits.
        """
        await run_ends.follow(self._engine, on_end, waits)

    async def claimants(
        self,
        tenant: Tenant,
        tenants: Sequence[Tenant],
        since: datetime,
        asking: str | None = None,
    ) -> list[Claimant]:
        """Return the runs of a tenant that count towards its limits, and the one that asks.

        Other arguments are as for `admit`.
        """
        async with self._reading() as db:
            found = await _claimants(db, tenant, tenants, since, asking)
            return [claimant for claimant, _ in found.values()]

    async def _take_turn(self, db: AsyncSession, tenant: Tenant) -> None:
        """Wait until no other replica admits runs of this tenant; the transaction's end releases.

        The first statement writes, so that SQLite too locks before it reads.
        """
        await db.execute(self._ensure_turn, {"tenant": tenant.name})
        turn = select(TenantTurn.tenant).where(TenantTurn.tenant == tenant.name)
        await db.execute(turn.with_for_update())


async def _claimants(
    db: AsyncSession,
    tenant: Tenant,
    tenants: Sequence[Tenant],
    since: datetime,
    asking: str | None = None,
) -> dict[str, tuple[Claimant, datetime]]:
    """Return the runs of a tenant whose clients are active, and the one that asks, by id.

    With each, when its client was last active.
    """
    is_active = or_(
        Session.last_heartbeat_at >= since,
        TrainingRun.last_request_at >= since,
        TrainingRun.id == asking,
    )
    query = (
        select(
            TrainingRun.id,
            TrainingRun.owner,
            TrainingRun.created_at,
            or_(TrainingRun.generation.is_not(None), TrainingRun.admitted_at.is_not(None)),
            Session.last_heartbeat_at,
            TrainingRun.last_request_at,
        )
        .join(Session, Session.id == TrainingRun.session_id)
        .where(TrainingRun.deleted_at.is_(None), is_active)
        .where(TrainingRun.generation.is_distinct_from(STORED))
    )
    found = {}
    for run_id, owner, created_at, has_started, heard_at, used_at in await db.execute(query):
        if tenant_of(owner, tenants) == tenant:
            held, missing = (_ONE, _NOTHING) if has_started else (_NOTHING, _ONE)
            age = (created_at.isoformat(), run_id)
            found[run_id] = Claimant(run_id, age, held, missing), max(heard_at, used_at)
    return found
