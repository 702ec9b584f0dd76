"""Makes the runs of a local server wait for the limits of their tenant.

On Kubernetes the operator does this, for sessions from all sources.
"""

import asyncio
import contextlib
from datetime import timedelta

import structlog

from tinkercloud_api.catalog.admission import RunQuotas
from tinkercloud_api.catalog.tables import now
from tinkercloud_api.tenants import Tenants
from tinkercloud_crds.quotas import Tenant, usage
from tinkercloud_crds.tenant import TenantUsage

log = structlog.get_logger(__name__)

_RECHECK_SECONDS = 5.0
"""How long a run may wait after another has ended on another replica, which notifies nobody, or
after a client has become inactive."""


class RunAdmission:
    """The runs of this process that wait for a limit. Belongs to one event loop."""

    def __init__(self, quotas: RunQuotas, tenants: Tenants, inactivity: timedelta) -> None:
        """Create it.

        Args:
            quotas: the catalog, which all replicas share.
            tenants: the tenants whose runs wait here.
            inactivity: inactivity of a client after which its models do not count.
        """
        self._quotas = quotas
        self._tenants = tenants
        self._inactivity = inactivity
        self._messages: dict[str, str] = {}
        """Why each waiting run waits, by id."""
        self._freed = asyncio.Event()
        """Set, and replaced, when a run has ended."""

    async def wait(self, run_id: str) -> None:
        """Wait until the limits allow a run to start, or until it is deleted."""
        try:
            while tenants := self._tenants.all():
                freed = self._freed
                message = await self._quotas.admit(run_id, tenants, now() - self._inactivity)
                if message is None:
                    return
                if run_id not in self._messages:
                    log.info("training run waits for a quota", run_id=run_id, reason=message)
                self._messages[run_id] = message
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(freed.wait(), _RECHECK_SECONDS)
        finally:
            self._messages.pop(run_id, None)

    def why_waiting(self, run_id: str) -> str | None:
        """Return which limit a run waits for; None if it waits for none."""
        return self._messages.get(run_id)

    def wake(self) -> None:
        """Check the waiting runs again, because others have ended."""
        self._freed.set()
        self._freed = asyncio.Event()

    async def usage(self, tenant: Tenant) -> TenantUsage:
        """Return what the runs of a tenant use."""
        since = now() - self._inactivity
        return usage(await self._quotas.claimants(tenant, self._tenants.all(), since))
