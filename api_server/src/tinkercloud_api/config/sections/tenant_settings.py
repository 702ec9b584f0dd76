"""Settings of the tenants of a local server: the fields of the Tenant resource, and no others."""

from pydantic import ConfigDict

from tinkercloud_crds.tenant import TenantLimits, TenantSpec


class TenantLimitSettings(TenantLimits):
    """Limits of all owners of a tenant together."""

    model_config = ConfigDict(extra="forbid")


class TenantSettings(TenantSpec):
    """Owners that share one quota, with the fields of a Tenant on Kubernetes."""

    model_config = ConfigDict(extra="forbid")

    limits: TenantLimitSettings = TenantLimitSettings()
    """Limits of all owners of the tenant together."""
