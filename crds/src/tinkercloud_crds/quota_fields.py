"""Quota rules: the tenant of an owner, what counts towards a limit, and start order. Pure.

The operator applies them to TrainingSessions, a local API server to the runs of its catalog.

What has started keeps its place, even if a limit is lowered. Those that wait start oldest first: a
younger one may not take what an older one waits for, so that a large session is not starved by
small ones. A session that is larger than the limit itself reserves nothing: it would stop all
others forever.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from tinkercloud_crds.tenant import TenantLimits, TenantSpec, TenantUsage

Age = tuple[str, str]
"""Creation time and name: sorts claimants oldest first; the name breaks ties."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of the resources that a run needs before it may start; fields of `TenantLimits`."""

    sessions: int = 0
    dedicated_gpus: int = 0
    models: int = 0

    def __add__(self, other: "Amounts") -> "Amounts":
        """Return the sums."""
        return Amounts(
            self.sessions + other.sessions,
            self.dedicated_gpus + other.dedicated_gpus,
            self.models + other.models,
        )


_FIELDS = {
    "sessions": ("sessions", "sessions"),
    "dedicated_gpus": ("dedicatedGpus", "GPUs"),
    "models": ("models", "models"),
}
"""By resource: the name of its limit, and what it counts."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A named tenant."""

    name: str
    spec: TenantSpec


@dataclass(frozen=True, slots=True)
class Claimant:
    """A run or session of a tenant."""

    name: str
    age: Age
    held: Amounts
    """What it uses now."""
    missing: Amounts
    """What it waits for; zeros if it waits for nothing."""

    @property
    def waits(self) -> bool:
        """Whether it needs anything that it does not have."""
        return self.missing != Amounts()


def tenant_of(owner: str, tenants: Sequence[Tenant]) -> Tenant | None:
    """Return the tenant of an owner; None if no tenant has it, which means no limits.

    Args:
        owner: owner of an API key.
        tenants: all tenants, oldest first.
    """
    found: tuple[int, Tenant] | None = None
    for tenant in tenants:
        for pattern in tenant.spec.owners:
            length = len(pattern.replace("*", ""))
            # An exact name is longer than every pattern that matches the same owner.
            length += pattern == owner
            if (found is None or length > found[0]) and _matches(pattern, owner):
                found = (length, tenant)
    return found[1] if found is not None else None


def _matches(pattern: str, owner: str) -> bool:
    parts = map(re.escape, pattern.split("*"))
    return re.fullmatch(".*".join(parts), owner, re.DOTALL) is not None


def waiting_message(tenant: Tenant, own: Claimant, others: Iterable[Claimant]) -> str | None:
    """Return why a claimant has to wait; None if it may start.

    Args:
        tenant: its tenant.
        own: the claimant.
        others: all other claimants of the tenant.
    """
    limits = tenant.spec.limits
    used, reserved, position = Amounts(), Amounts(), 1
    for other in others:
        used += other.held
        is_ahead = other.waits and other.age < own.age and _fits(other.missing, limits)
        if is_ahead:
            reserved += other.missing
            position += 1
    for each in fields(Amounts):
        limit, wanted = getattr(limits, each.name), getattr(own.missing, each.name)
        if limit is None or wanted == 0:
            continue
        in_use = getattr(used, each.name) + getattr(own.held, each.name)
        if in_use + getattr(reserved, each.name) + wanted > limit:
            return _message(tenant, _Shortage(each.name, in_use, limit, wanted), position)
    return None


def _fits(missing: Amounts, limits: TenantLimits) -> bool:
    """Return whether unused limits would be sufficient."""
    return all(
        getattr(limits, each.name) is None
        or getattr(missing, each.name) <= getattr(limits, each.name)
        for each in fields(Amounts)
    )


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Which limit is too low for a claimant."""

    resource: str
    used: int
    limit: int
    wanted: int


def _message(tenant: Tenant, short: _Shortage, position: int) -> str:
    field, unit = _FIELDS[short.resource]
    whose = f"tenant {tenant.name!r} uses {short.used} of {short.limit} {unit} (limits.{field})"
    if short.wanted > short.limit:
        return (
            f"{whose}, and this needs {short.wanted}, more than the limit; ask an administrator to"
            " raise it, or delete this one"
        )
    needs = f" and needs {short.wanted}" if short.wanted > 1 else ""
    return (
        f"{whose}; this is number {position} in the tenant's queue{needs}, and starts when others"
        " have ended; end one that you no longer need, or ask an administrator to raise the limit"
    )


def usage(claimants: Iterable[Claimant]) -> TenantUsage:
    """Return what claimants use together."""
    used, waiting = Amounts(), 0
    for claimant in claimants:
        used += claimant.held
        waiting += claimant.waits
    return TenantUsage(
        sessions=used.sessions,
        dedicated_gpus=used.dedicated_gpus,
        models=used.models,
        waiting=waiting,
    )


def summary(used: int, limit: int | None) -> str:
    """Return an amount and its limit, such as `3/4`, or `3/-` without a limit."""
    return f"{used}/{'-' if limit is None else limit}"
