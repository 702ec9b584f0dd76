"""The Tenants of a namespace, kept up to date by a watch."""

from dataclasses import dataclass

from pydantic import ValidationError

from tinkercloud_crds.quota_fields import Age, Tenant
from tinkercloud_crds.tenant import TenantSpec, TenantStatus, TenantUsage
from tinkercloud_kube.client import Client
from tinkercloud_kube.informer import Informer
from tinkercloud_kube.objects import Manifest


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: Tenant
    age: Age
    used: TenantUsage


class KnownTenants:
    """The Tenants. Without the definition, or permission to list them, there are none."""

    def __init__(self, api: Client) -> None:
        self._informer = Informer(api, "Tenant", _read)
        self._sorted: tuple[Tenant, ...] = ()

    async def run(self) -> None:
        """Watch, forever."""
        await self._informer.run()

    def all(self) -> tuple[Tenant, ...]:
        """Return all Tenants, oldest first; the same tuple while no specification changes."""
        known = sorted(self._informer.objects(), key=lambda each: each.age)
        found = tuple(each.tenant for each in known)
        if found != self._sorted:
            self._sorted = found
        return self._sorted

    def usage(self, name: str) -> TenantUsage:
        """Return what a Tenant uses, as the operator has last written it."""
        known = self._informer.get(name)
        return known.used if known is not None else TenantUsage()


def _read(manifest: Manifest) -> _Known | None:
    """Read a Tenant; None if this version of the server cannot read it."""
    metadata = manifest["metadata"]
    try:
        spec = TenantSpec.model_validate(manifest["spec"])
        status = TenantStatus.model_validate(manifest.get("status", {}))
    except ValidationError:
        return None
    age = (metadata["creationTimestamp"], metadata["name"])
    return _Known(Tenant(metadata["name"], spec), age, status.used)
