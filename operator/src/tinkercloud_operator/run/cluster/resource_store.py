"""Everything the operator has observed in the cluster, kept in memory; no I/O.

Objects arrive from three sides: watch events, answers to the operator's own writes, and complete
lists. `tinkercloud_kube.objects` decides which state of an object counts; this module keeps the
indexes by session.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import CORDON, BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, find
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_kube.objects import Change, Manifest, Objects
from tinkercloud_operator.decide.pods.disruptions import taints_to_leave
from tinkercloud_operator.decide.pool.pool_facts import is_cluster, taken_by
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.read.session_facts import age, is_live
from tinkercloud_operator.decide.session.status import head_url
from tinkercloud_operator.decide.tenancy.tenant_choices import choices_of_tenant
from tinkercloud_operator.run.cluster.session_children import (
    CHILD_KINDS,
    PROGRAM_POD,
    SessionChildren,
    session_of,
)
from tinkercloud_operator.run.tenancy.session_index import SessionIndex
from tinkercloud_operator.run.tenancy.start_order import StartOrder
from tinkercloud_operator.run.tenancy.tenant_quotas import TenantQuotas
from tinkercloud_operator.spec.observed import (
    Answers,
    Observed,
    OwnerLimits,
    Platform,
    Pod,
    PoolCluster,
    PoolPlace,
)
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve

Metadata = Mapping[str, Any]

_PLACING = frozenset({"TrainingSession", "RayCluster", "Pod"})
"""Kinds that determine whether a session's pods are scheduled."""


def _kept(kind: str, manifest: Manifest) -> Manifest:
    interned: Manifest = parsing.interned(parsing.slim(kind, manifest))
    return interned


def _objects_of(kind: str) -> Objects[Manifest]:
    return Objects(partial(_kept, "Pod" if kind == PROGRAM_POD else kind))


@dataclass(slots=True)
class Watched:
    """The objects of one namespace. Methods that take objects return the sessions affected."""

    starts_in_order: bool = True
    """Whether sessions that compete for devices start one after the other."""
    sessions: Objects[Manifest] = field(default_factory=partial(_objects_of, "TrainingSession"))
    """By name."""
    base_models: Objects[Manifest] = field(default_factory=partial(_objects_of, "BaseModel"))
    """By name."""
    tenants: Objects[Manifest] = field(default_factory=partial(_objects_of, "Tenant"))
    """By name."""
    quotas: TenantQuotas = field(default_factory=TenantQuotas)
    _child_objects: dict[str, Objects[Manifest]] = field(
        default_factory=lambda: {
            kind: _objects_of(kind) for kind in ("Pod", PROGRAM_POD, *CHILD_KINDS)
        }
    )
    """By kind."""
    children: SessionChildren = field(default_factory=SessionChildren)
    _owners: SessionIndex = field(default_factory=SessionIndex)
    _turns: StartOrder = field(default_factory=StartOrder)

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool = False) -> set[str]:
        """Note the state of one object; return the sessions to reconcile."""
        if kind == "Pod" and parsing.is_of_program(manifest):
            kind = PROGRAM_POD
        change = self._objects(kind).note(manifest, is_gone=is_gone)
        return set() if change is None else self._apply(kind, manifest, change)

    def replace(self, kind: str, manifests: Iterable[Manifest], version: int) -> set[str]:
        """Note a complete list of a kind; return the sessions to reconcile.

        Args:
            kind: of the objects.
            manifests: all objects of the kind at one moment.
            version: resource version of that moment; objects known to be newer are kept.
        """
        if kind == "Pod":
            listed = list(manifests)
            of_programs = [each for each in listed if parsing.is_of_program(each)]
            own = [each for each in listed if not parsing.is_of_program(each)]
            return self._replace(kind, own, version) | self._replace(
                PROGRAM_POD, of_programs, version
            )
        return self._replace(kind, manifests, version)

    def _replace(self, kind: str, manifests: Iterable[Manifest], version: int) -> set[str]:
        affected: set[str] = set()
        for change in self._objects(kind).replace(manifests, version):
            manifest = change.after if change.after is not None else change.before
            if manifest is not None:
                affected |= self._apply(kind, manifest, change)
        return affected

    def admit(self, name: str) -> None:
        """Reserve what a session needs to start: its tenant's quota, and its turn.

        A session that has to wait, or that is rejected now, reserves nothing. Nothing else here
        reserves anything: all other methods read, or note what exists.
        """
        session = self.sessions.get(name)
        if session is None or parsing.session_object(session) is None:
            return
        has_cluster = self.children.has_cluster(name)
        if self.resolved(session) is None:
            self.quotas.reject(session, self.offering, has_cluster=has_cluster)
        else:
            self.quotas.admit(session, self.offering, has_cluster=has_cluster)
        if self._is_ordered(session) and self._quota_message(session) is None:
            self._turns.admit(session, self.offering)

    def observed(
        self, name: str, *, pool: PoolPlace, platform: Platform, answers: Answers, now: datetime
    ) -> Observed | None:
        """Return what is known of a session; None if it does not exist, or can't be read.

        Args:
            name: of the session.
            pool: its place on a cluster that other sessions may use.
            platform: what the Kubernetes cluster offers.
            answers: the answers to earlier requests for this session.
            now: the current time.
        """
        manifest = self.sessions.get(name)
        session = parsing.session_object(manifest) if manifest is not None else None
        if manifest is None or session is None:
            return None
        children, pods = self.children.observed(name, session.uid)
        base_model = self._base_model(session.spec.base_model)
        return Observed(
            session=session,
            base_model=base_model,
            limits=self._limits(manifest, session.spec.owner, base_model),
            children=children,
            pods=pods,
            pool=pool,
            platform=platform,
            answers=answers,
            now=now,
        )

    def _limits(
        self, session: Manifest, owner: str, base_model: BaseModelSpec | None
    ) -> OwnerLimits:
        quota_message = self._quota_message(session)
        return OwnerLimits(
            sessions_of_owner=self.older_siblings(session, base_model),
            tenant=self._tenant_of(owner),
            quota_message=quota_message,
            start_order_message=self._turn_message(session) if quota_message is None else None,
        )

    def may_start(self, session: Manifest) -> bool:
        """Whether a session has no RayCluster, and its tenant's limits allow it to start."""
        has_cluster = self.children.has_cluster(session["metadata"]["name"])
        return not (has_cluster or self._quota_message(session))

    def pool_cluster(self, session_name: str) -> PoolCluster | None:
        """Return the pool cluster of a session, or its spare, if it has one that exists."""
        session = self.sessions.get(session_name)
        if session is None:
            return None
        name, namespace = session["spec"].get("poolCluster"), session["metadata"]["namespace"]
        manifest = self.sessions.get(name) if name is not None else None
        if name is None or manifest is None or not is_cluster(manifest):
            return None
        is_shared = session["spec"].get("sharing") == "Shared"
        if not is_shared and taken_by(manifest) != session["metadata"]["uid"]:
            return None
        status = parsing.session_status(manifest)
        ready = find(status.conditions, ConditionType.READY)
        is_ready = ready is not None and ready.status == "True"
        is_serving = is_ready and "deletionTimestamp" not in manifest["metadata"]
        return PoolCluster(
            name=name,
            endpoint=head_url(name, namespace) if is_serving else None,
            incarnation=status.incarnation,
            has_pods=self.children.has_cluster(name),
            conditions=status.conditions,
        )

    def ending_heads(self, model_name: str, now: datetime) -> dict[str, Pod]:
        """Return heads that still run, or save, although their cluster was deleted.

        Args:
            model_name: of the sessions that those clusters served.
            now: the current time.

        Returns:
            the heads, by the name of a pool cluster or spare that some session still names.
        """
        named = {each["spec"].get("poolCluster") for each in self.sessions_of(model_name)}
        gone = named - self.sessions.keys() - {None}
        found = {name: self.children.ending_head(str(name), now) for name in gone}
        return {str(name): head for name, head in found.items() if head is not None}

    def pool_sessions_of(self, cluster: Manifest) -> list[str]:
        """Return the sessions that a pool cluster serves."""
        name = cluster["metadata"]["name"]
        return [
            session["metadata"]["name"]
            for session in self.sessions_of(cluster["spec"].get("baseModel", ""))
            if session["spec"].get("poolCluster") == name
        ]

    def sessions_of(self, model_name: str) -> list[Manifest]:
        """Return the sessions of a base model."""
        return list(self._owners.of_model(model_name))

    def must_leave(self, name: str, nodes: frozenset[str]) -> bool:
        """Return whether a session has pods on cordoned nodes that it needs and must leave."""
        session = self.sessions.get(name)
        if session is None or not nodes:
            return False
        found = taints_to_leave(
            self.children.required_pods(name),
            self._base_model(session["spec"].get("baseModel", "")),
            dict.fromkeys(nodes, frozenset({CORDON})),
            session["metadata"].get("annotations", {}).get(labels.LEAVE_NODE),
        )
        return any(True for _ in found)

    def offering(self, model_name: str) -> Manifest | None:
        """Return the BaseModel of a model name: the oldest, if there are several."""
        found = [
            item
            for item in self.base_models.values()
            if item["spec"].get("modelName") == model_name
        ]
        return min(found, key=age, default=None)

    def older_siblings(self, manifest: Manifest, base_model: BaseModelSpec | None) -> int:
        """Return how many live sessions its owner has that came first."""
        if base_model is None or base_model.limits.max_sessions_per_owner is None:
            return 0
        return self._owners.older(manifest)

    def _is_ordered(self, session: Manifest) -> bool:
        """Return whether a session has to wait for its turn to create its pods."""
        return self.starts_in_order and not self.children.has_cluster(session["metadata"]["name"])

    def _turn_message(self, session: Manifest) -> str | None:
        """Return why other sessions have their pods first, if any compete with this one."""
        if not self._is_ordered(session):
            return None
        return self._turns.waiting_message(session, self.offering)

    def _quota_message(self, session: Manifest) -> str | None:
        """Return which limit of its owner's tenant a session waits for, if any."""
        has_cluster = self.children.has_cluster(session["metadata"]["name"])
        message = self.quotas.waiting_message(session, self.offering, has_cluster=has_cluster)
        is_rejected = message is not None and self.resolved(session) is None
        return None if is_rejected else message

    def resolved(self, session: Manifest) -> ResolvedSpec | None:
        """Return what a session would start with now; None if it would be rejected."""
        try:
            spec = TrainingSessionSpec.model_validate(session.get("spec", {}))
        except ValidationError:
            return None
        base_model = self._base_model(spec.base_model)
        found = resolve(spec, base_model, self.older_siblings(session, base_model))
        if isinstance(found, ResolvedSpec):
            found = choices_of_tenant(spec, found, self._tenant_of(spec.owner))
        return found if isinstance(found, ResolvedSpec) else None

    def _base_model(self, model_name: str) -> BaseModelSpec | None:
        offering = self.offering(model_name)
        return parsing.base_model(offering) if offering is not None else None

    def _tenant_of(self, owner: str) -> TenantSpec | None:
        tenant = self.quotas.tenant(owner)
        return tenant.spec if tenant is not None else None

    def _note_quota(self, session: str, change: Change[Manifest] | None = None) -> set[str]:
        """Note what a session uses of its tenant's limits; return those that may now start."""
        known = self.sessions.get(session)
        if known is not None:
            has_cluster = self.children.has_cluster(session)
            return self.quotas.note(known, self.offering, has_cluster=has_cluster)
        if change is not None and change.before is not None:
            return self.quotas.forget(change.before)
        return set()

    def _concerned(self, kind: str, manifest: Manifest) -> set[str]:
        if kind == "BaseModel":
            model_name = manifest["spec"].get("modelName", "")
            return {item["metadata"]["name"] for item in self.sessions_of(model_name)}
        session = session_of(kind, manifest["metadata"])
        concerned = {session} if session in self.sessions else set()
        known = self.sessions.get(session)
        if kind == "TrainingSession" and (known is None or not is_live(known)):
            # They may have been waiting for this one to end.
            concerned |= self._owners.siblings(manifest)
        return concerned

    def own(self, kind: str) -> Objects[Manifest]:
        """Return the known objects of one of our own kinds."""
        known = {"TrainingSession": self.sessions, "Tenant": self.tenants}
        return known.get(kind, self.base_models)

    def _objects(self, kind: str) -> Objects[Manifest]:
        is_child = kind in self._child_objects
        return self._child_objects[kind] if is_child else self.own(kind)

    def _apply(self, kind: str, manifest: Manifest, change: Change[Manifest]) -> set[str]:
        """Update the indexes after a change; return the sessions to reconcile."""
        affected: set[str] = set()
        if kind == "Tenant":
            return self.quotas.replace_tenants(self.tenants.values())
        session = session_of(kind, manifest["metadata"])
        if kind == "TrainingSession":
            self._index_session(change)
            affected = self._note_quota(session, change)
        elif kind != "BaseModel":
            affected = self.children.index(kind, manifest, change) & self.sessions.keys()
        if kind == "Pod" and session in self.sessions:
            self.children.remember(session, manifest)
        if kind == "RayCluster":
            affected |= self._note_quota(session)
        if kind in _PLACING:
            affected |= self._next_turns(session)
        return affected | self._concerned(kind, manifest)

    def _index_session(self, change: Change[Manifest]) -> None:
        if change.before is not None:
            self._owners.remove(change.before)
        if change.after is not None:
            self._owners.put(change.after)
        else:
            self.children.failures.pop(change.name, None)

    def _next_turns(self, session: str) -> set[str]:
        """Return the sessions whose turn to start may have come because of a change to another."""
        own = self.children.of(session)
        is_turn_of_others = self._turns.note(session, self.sessions.get(session), own)
        return self._turns.next(self.offering) if is_turn_of_others else set()
