"""Tenant: the owners that share one quota, and its limits. A local server reads the same fields.

`quotas` has the rules: what counts towards a limit, and which of several waiting runs is next.
"""

from typing import Annotated

from pydantic import Field

from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.pods.placement import ObjectName
from tinkercloud_crds.structural import Part

_MAX_COUNT = 1_000_000
_MAX_BYTES = 1 << 53

OwnerPattern = Annotated[str, Field(min_length=1, max_length=128)]
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Amount = Annotated[int, Field(ge=0, le=_MAX_BYTES)]


class TenantLimits(Part):
    """Limits of all owners of a tenant together. A limit that is unset does not exist."""

    sessions: Count | None = None
    """Maximum number of sessions that have started and not ended, in pools or with their own pods,
    suspended ones included. On a local server every model is one."""
    dedicated_gpus: Count | None = None
    """Maximum number of GPUs that the tenant's sessions with their own pods request together.
    Suspended sessions have no pods and count 0."""
    models: Count | None = None
    """Maximum number of models in pools, or on a local server."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=_MAX_BYTES)] | None = None
    """Maximum number of tokens per minute that a head computes for each owner of the tenant:
    trained, prefilled and sampled. Unused tokens of one minute may be used at once."""
    storage_bytes: Amount | None = None
    """Maximum total size of the checkpoints of the tenant's owners, in bytes. At the limit,
    checkpoints with new names are rejected; running models are not affected."""


class TenantSpec(Part):
    """Owners that share one quota, and its limits."""

    owners: Annotated[list[OwnerPattern], Field(min_length=1, max_length=256)]
    """Owners of API keys that belong to the tenant. `*` stands for any characters, such as in
    `team-a-*`. An owner that several Tenants match belongs to the one with the longest matching
    entry; of equally long ones, to the oldest Tenant."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Scheduling weight of each owner in this tenant when requests compete for a shared head."""
    limits: TenantLimits = TenantLimits()
    """Limits of all owners of the tenant together."""
    allowed_queues: Annotated[list[ObjectName], Field(max_length=64)] | None = None
    """LocalQueues that sessions of the tenant may use. If unset, all that the BaseModel allows."""
    allowed_priority_classes: Annotated[list[ObjectName], Field(max_length=64)] | None = None
    """PriorityClasses that sessions of the tenant may use. If unset, all that the BaseModel
    allows."""


class TenantUsage(Part):
    """What a tenant uses of its limits."""

    sessions: Count = 0
    """Number of sessions that have started and not ended."""
    dedicated_gpus: Count = 0
    """Number of GPUs of sessions with their own pods."""
    models: Count = 0
    """Number of models in pools."""
    waiting: Count = 0
    """Number of sessions that wait because of a limit."""


Summary = Annotated[str, Field(max_length=32)]


class TenantStatus(Part):
    """Most recently observed status. Set by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status is based on."""
    conditions: Conditions
    """The condition Ready: False with reason QuotaExceeded while sessions wait for a limit."""
    used: TenantUsage = TenantUsage()
    """What the tenant uses of its limits."""
    session_summary: Summary = ""
    """Used and allowed sessions, such as `3/4`, for `kubectl get`."""
    gpu_summary: Summary = ""
    """Used and allowed GPUs, such as `8/16`, for `kubectl get`."""
    model_summary: Summary = ""
    """Used and allowed models, such as `5/-` without a limit, for `kubectl get`."""
