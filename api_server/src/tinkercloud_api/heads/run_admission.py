"""Makes the runs of a local server wait for the limits of their tenant.

On Kubernetes the operator does this, for sessions from all sources.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog

from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.catalog.runs.admission import RunQuotas, Waiting
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_crds.quota_fields import Tenant, usage, waiting_message
from tinkercloud_crds.tenant import TenantUsage

log = structlog.get_logger(__name__)

_LONGEST_WAIT_SECONDS = 60.0
"""After this time a waiting run is checked again, although no run is known to have ended."""


class RunAdmission:
    """The runs of this process that wait for a limit. Belongs to one event loop."""

    def __init__(
        self,
        quotas: RunQuotas,
        tenants: Tenants,
        inactivity: timedelta,
        write_activity: Callable[[], Awaitable[None]],
    ) -> None:
        """Create it.

        Args:
            quotas: the catalog, which all replicas share.
            tenants: the tenants whose runs wait here.
            inactivity: inactivity of a client after which its models do not count.
            write_activity: writes what is known of the activity of clients to the catalog.
        """
        self._quotas = quotas
        self._tenants = tenants
        self._inactivity = inactivity
        self._write_activity = write_activity
        self._messages: dict[str, str] = {}
        """Why each waiting run waits, by id."""
        self._freed = asyncio.Event()
        """Set, and replaced, when a run has ended."""
        self._waits = asyncio.Event()
        """Set while a run waits."""

    async def wait(self, run_id: str) -> None:
        """Wait until the limits allow a run to start, or until it is deleted."""
        try:
            while tenants := self._tenants.all():
                freed = self._freed
                found = await self._quotas.admit(run_id, tenants, now() - self._inactivity)
                if found is None:
                    return
                if run_id not in self._messages:
                    log.info("training run waits for a quota", run_id=run_id, reason=found.message)
                self._messages[run_id] = found.message
                self._waits.set()
                await self._until_freed(freed, found)
        finally:
            self._messages.pop(run_id, None)
            if not self._messages:
                self._waits.clear()

    async def _until_freed(self, freed: asyncio.Event, found: Waiting) -> None:
        """Wait until a run may have ended, or the next client may have become inactive."""
        seconds = _LONGEST_WAIT_SECONDS
        if found.oldest_use is not None:
            silent = found.oldest_use + self._inactivity
            seconds = min(seconds, (silent - now()).total_seconds())
        try:
            await asyncio.wait_for(freed.wait(), seconds)
        except TimeoutError:
            # The client may have been heard since.
            await self._write_activity()

    async def follow(self) -> None:
        """Check the waiting runs when others end on other servers, until cancelled."""
        if self._tenants.all():
            await self._quotas.follow_ends(self.wake, self._waits)

    def why_waiting(self, run_id: str) -> str | None:
        """Return which limit a run waits for; None if it waits for none."""
        return self._messages.get(run_id)

    async def limit_of(self, run_id: str, owner: str) -> str | None:
        """Return which limit a run would wait for; None if it may start. This admits nothing."""
        if (tenant := self._tenants.of(owner)) is None:
            return None
        tenants, since = self._tenants.all(), now() - self._inactivity
        found = await self._quotas.claimants(tenant, tenants, since, run_id)
        claimants = {each.name: each for each in found}
        own = claimants.pop(run_id, None)
        if own is None or not own.waits:
            return None
        return waiting_message(tenant, own, claimants.values())

    def wake(self) -> None:
        """Check the waiting runs again, because others have ended."""
        self._freed.set()
        self._freed = asyncio.Event()

    async def usage(self, tenant: Tenant) -> TenantUsage:
        """Return what the runs of a tenant use."""
        since = now() - self._inactivity
        return usage(await self._quotas.claimants(tenant, self._tenants.all(), since))
