"""The tenants of owners, and which of their limits are sent to session heads."""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from tinkercloud_crds.quota_fields import Tenant, tenant_of
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.wire import routes


class Tenants:
    """The current tenants. They may change at any time. Belongs to one event loop."""

    def __init__(self, current: Callable[[], Sequence[Tenant]] = tuple) -> None:
        """Create it.

        Args:
            current: returns all tenants, oldest first; the same object while nothing changes.
        """
        self._current = current
        self._known: Sequence[Tenant] = ()
        self._by_owner: dict[str, Tenant | None] = {}
        self._headers: dict[str, Mapping[str, str]] = {}

    def all(self) -> Sequence[Tenant]:
        """Return all tenants, oldest first."""
        current = self._current()
        if current is not self._known:
            self._known = current
            self._by_owner.clear()
            self._headers.clear()
        return current

    def of(self, owner: str) -> Tenant | None:
        """Return the tenant of an owner; None if it has none."""
        tenants = self.all()
        if owner not in self._by_owner:
            self._by_owner[owner] = tenant_of(owner, tenants)
        return self._by_owner[owner]

    def headers(self, owner: str) -> Mapping[str, str]:
        """Return the header with the limits of an owner; without a tenant it has none."""
        tenant = self.of(owner)
        if owner not in self._headers:
            limits = OwnerLimits(owner=owner)
            if tenant is not None:
                limits = OwnerLimits(
                    owner=owner,
                    tenant=tenant.name,
                    tokens_per_minute=tenant.spec.limits.tokens_per_minute,
                    weight=tenant.spec.weight,
                )
            content = limits.model_dump_json(exclude_none=True)
            self._headers[owner] = {routes.OWNER_LIMITS_HEADER: quote(content)}
        return self._headers[owner]
