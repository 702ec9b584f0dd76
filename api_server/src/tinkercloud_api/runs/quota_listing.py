"""What users are shown about the limits of their tenant."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.checkpoints.storage_quota import StorageQuota
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantUsage
from tinkercloud_protocol.responses.listings import Quota, QuotaLimit


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of owners, and what is used of them."""

    tenants: Tenants
    usage_of: Callable[[Tenant], Awaitable[TenantUsage]]
    """Returns what the sessions of a tenant use."""
    storage: StorageQuota

    async def of(self, owner: str) -> Quota | None:
        """Return the limits of an owner's tenant and their use; None if it has no tenant."""
        tenant = self.tenants.of(owner)
        if tenant is None:
            return None
        return await self._of_tenant(tenant, await self.storage.used(tenant))

    async def of_all(self) -> list[Quota]:
        """Return the limits of all tenants and their use."""
        stored = await self.storage.used_by_tenant()
        calls = [self._of_tenant(each, stored.get(each.name, 0)) for each in self.tenants.all()]
        return await asyncio.gather(*calls)

    async def _of_tenant(self, tenant: Tenant, stored_bytes: int) -> Quota:
        limits = tenant.spec.limits
        used = await self.usage_of(tenant)
        return Quota(
            tenant=tenant.name,
            waiting=used.waiting,
            limits=[
                QuotaLimit(name="sessions", limit=limits.sessions, used=used.sessions),
                QuotaLimit(
                    name="dedicatedGpus", limit=limits.dedicated_gpus, used=used.dedicated_gpus
                ),
                QuotaLimit(name="models", limit=limits.models, used=used.models),
                QuotaLimit(name="tokensPerMinute", limit=limits.tokens_per_minute, used=None),
                QuotaLimit(name="storageBytes", limit=limits.storage_bytes, used=stored_bytes),
            ],
        )
