"""Which sessions wait because of the limits of their owner's Tenant; no I/O.

`decide.tenancy.quota_claims` says what each session holds and waits for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import ValidationError

from tinkercloud_crds.quota_fields import Claimant, Tenant, tenant_of, waiting_message
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read.session_facts import age, is_live
from tinkercloud_operator.decide.tenancy.quota_claims import (
    Offering,
    claimant,
    gives_back,
    is_idle,
    wants,
    was_rejected,
)


@dataclass(slots=True)
class TenantQuotas:
    """The Tenants of a namespace and the sessions of their owners. Belongs to one event loop."""

    _tenants: list[Tenant] = field(default_factory=list)
    """Oldest first."""
    _tenant_of: dict[str, Tenant | None] = field(default_factory=dict)
    """By owner; a cache."""
    _claimants: dict[str, dict[str, Claimant]] = field(default_factory=dict)
    """By owner, then by the session's name."""
    _admitted: set[str] = field(default_factory=set)
    """Sessions that may start, but whose status or RayCluster may not show it yet."""

    def replace_tenants(self, manifests: Iterable[Manifest]) -> set[str]:
        """Record all Tenants; return the sessions that may now start."""
        self._tenants = [
            tenant for each in sorted(manifests, key=age) if (tenant := _read(each)) is not None
        ]
        self._tenant_of.clear()
        return {
            name
            for of_owner in self._claimants.values()
            for name, claimant in of_owner.items()
            if claimant.waits
        }

    def tenant(self, owner: str) -> Tenant | None:
        """Return the tenant of an owner."""
        if owner not in self._tenant_of:
            self._tenant_of[owner] = tenant_of(owner, self._tenants)
        return self._tenant_of[owner]

    def claimants(self, tenant: Tenant) -> list[Claimant]:
        """Return the sessions of a tenant that have not ended."""
        return [
            claimant
            for owner, of_owner in self._claimants.items()
            if self.tenant(owner) == tenant
            for claimant in of_owner.values()
        ]

    def note(self, session: Manifest, offering: Offering, *, has_cluster: bool) -> set[str]:
        """Record a session that exists; return the sessions that may now start."""
        before = self._of(session)
        is_over = "deletionTimestamp" in session["metadata"] or session["spec"].get("suspend")
        is_placed = has_cluster or bool(session["spec"].get("poolCluster"))
        if is_over or is_placed or not is_live(session):
            self._admitted.discard(session["metadata"]["name"])
        after = self._put(session, offering, has_cluster=has_cluster)
        return self._waiting(session) if gives_back(before, after) else set()

    def forget(self, session: Manifest) -> set[str]:
        """Remove a session that is gone; return the sessions that may now start."""
        name, owner = session["metadata"]["name"], _owner(session)
        self._admitted.discard(name)
        of_owner = self._claimants.get(owner, {})
        known = of_owner.pop(name, None)
        if not of_owner:
            self._claimants.pop(owner, None)
        return self._waiting(session) if known is not None else set()

    def reject(self, session: Manifest, offering: Offering, *, has_cluster: bool) -> None:
        """Record that a session is rejected now, so that nothing is reserved for it."""
        self._admitted.discard(session["metadata"]["name"])
        self._put(session, offering, has_cluster=has_cluster)

    def admit(self, session: Manifest, offering: Offering, *, has_cluster: bool) -> None:
        """Reserve what a session needs, if it waits for it and its tenant's limits allow it."""
        tenant = self.tenant(_owner(session))
        if tenant is None:
            return
        self._put(session, offering, has_cluster=has_cluster)
        own = self._accepted(session, offering, has_cluster=has_cluster)
        if own is None or not own.waits or is_idle(session):
            return
        if self._shortage(tenant, own) is None:
            self._admitted.add(own.name)
            self._put(session, offering, has_cluster=has_cluster)

    def waiting_message(
        self, session: Manifest, offering: Offering, *, has_cluster: bool
    ) -> str | None:
        """Return why a session waits for its tenant's limits; None if they allow it to start.

        Args:
            session: a session whose specification is accepted now, even if its status still says
                that it was rejected.
            offering: returns the active BaseModel of a model name, if there is one.
            has_cluster: whether its RayCluster exists.
        """
        tenant = self.tenant(_owner(session))
        if tenant is None:
            return None
        own = self._accepted(session, offering, has_cluster=has_cluster)
        return self._shortage(tenant, own) if own is not None and own.waits else None

    def _accepted(
        self, session: Manifest, offering: Offering, *, has_cluster: bool
    ) -> Claimant | None:
        """Return what a session whose specification is accepted holds and waits for."""
        return claimant(
            session,
            wants(session, offering),
            has_cluster=has_cluster,
            is_admitted=session["metadata"]["name"] in self._admitted,
            is_rejected=False,
        )

    def _shortage(self, tenant: Tenant, own: Claimant) -> str | None:
        others = [each for each in self.claimants(tenant) if each.name != own.name]
        return waiting_message(tenant, own, others)

    def _put(self, session: Manifest, offering: Offering, *, has_cluster: bool) -> Claimant | None:
        name, owner = session["metadata"]["name"], _owner(session)
        found = claimant(
            session,
            wants(session, offering),
            has_cluster=has_cluster,
            is_admitted=name in self._admitted,
            is_rejected=was_rejected(session),
        )
        if found is None:
            self._claimants.get(owner, {}).pop(name, None)
        else:
            self._claimants.setdefault(owner, {})[name] = found
        return found

    def _of(self, session: Manifest) -> Claimant | None:
        return self._claimants.get(_owner(session), {}).get(session["metadata"]["name"])

    def _waiting(self, session: Manifest) -> set[str]:
        """Return the other waiting sessions of a session's tenant."""
        tenant = self.tenant(_owner(session))
        if tenant is None:
            return set()
        waiting = {each.name for each in self.claimants(tenant) if each.waits}
        return waiting - {session["metadata"]["name"]}


def _read(manifest: Manifest) -> Tenant | None:
    """Read a Tenant; None if this version of the operator cannot read it."""
    try:
        spec = TenantSpec.model_validate(manifest["spec"])
    except ValidationError:
        return None
    return Tenant(manifest["metadata"]["name"], spec)


def _owner(session: Manifest) -> str:
    return str(session["spec"].get("owner", ""))
