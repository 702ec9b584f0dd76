"""The limit of the checkpoints of all owners of a tenant together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Checkpoint
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_protocol.wire.errors import InvalidRequest

_EVERY_OWNER = Page(0, 1 << 31)


@dataclass(frozen=True, slots=True)
class StorageQuota:
    """Compares what is stored with the limits of tenants."""

    catalog: Catalog
    tenants: Tenants

    def is_limited(self, owner: str) -> bool:
        """Whether the owner's tenant has a limit."""
        tenant = self.tenants.of(owner)
        return tenant is not None and tenant.spec.limits.storage_bytes is not None

    async def pending(self, owner: str) -> list[Checkpoint]:
        """Return the pending checkpoints that count towards the limits of an owner."""
        if not self.is_limited(owner):
            return list(await self.catalog.unindexed_checkpoints(Visibility(owner)))
        tenant = self.tenants.of(owner)
        rows = await self.catalog.unindexed_checkpoints(EVERYTHING)
        return [row for row in rows if self.tenants.of(row.owner) == tenant]

    async def used(self, tenant: Tenant) -> int:
        """Return the bytes of the checkpoints of all owners of a tenant."""
        return (await self.used_by_tenant()).get(tenant.name, 0)

    async def used_by_tenant(self) -> Mapping[str, int]:
        """Return the bytes of the checkpoints of all owners of each tenant, by its name."""
        used = Counter[str]()
        for each in await self.catalog.storage(None, _EVERY_OWNER):
            if (tenant := self.tenants.of(each.owner)) is not None:
                used[tenant.name] += each.size_bytes
        return used

    async def check(self, owner: str, size_bytes: int) -> None:
        """Check that the owner's tenant may store some more bytes.

        Raises:
            InvalidRequest: the limit would be exceeded.
        """
        tenant = self.tenants.of(owner)
        limit = tenant.spec.limits.storage_bytes if tenant is not None else None
        if tenant is None or limit is None:
            return
        used = await self.used(tenant)
        if used + size_bytes > limit:
            raise InvalidRequest(
                f"the checkpoints of tenant {tenant.name!r} use {used} of {limit} bytes"
                f" (its limit storage_bytes), and this needs at least {size_bytes} more; delete"
                " some, let some expire, or ask an administrator to raise the limit. Training"
                " continues, and automatic checkpoints are still saved"
            )
