"""An in-memory cache of the objects in the operator's namespace; no I/O.

Objects arrive from three sources: watch events, responses to the operator's own writes, and full
lists. The newest resource version wins, so that a late event never hides the operator's own write.
A full list also removes objects that were deleted while no watch was active.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.children.secret_marker import has_secret
from tinkercloud_operator.decide import parsing, start_order
from tinkercloud_operator.decide.session_index import SessionIndex, age, is_live
from tinkercloud_operator.spec.quantities import parse_time
from tinkercloud_operator.spec.snapshot import ChildKey, Manifest, Node, Observed, Pod, SaveKey

Metadata = Mapping[str, Any]
K = TypeVar("K")

CHILD_KINDS = (
    "RayCluster",
    "Service",
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ResourceClaimTemplate",
)

_PLACING = frozenset({"TrainingSession", "RayCluster", "Pod"})
"""Kinds that determine whether a session's pods are scheduled."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Inputs of a snapshot that are not watched objects."""

    has_kuberay: bool
    has_device_claims: bool
    starts_in_order: bool
    nodes: tuple[Node, ...] | None
    apply_error: str | None
    completed_saves: Mapping[SaveKey, str | None]
    pending_saves: frozenset[SaveKey]
    now: datetime
    kuberay_gap: str | None = None
    own_gap: str | None = None
    cordoned: frozenset[str] = frozenset()


@dataclass(slots=True)
class Watched:
    """The objects of one namespace. Every method that takes objects returns whom they concern."""

    sessions: dict[str, Manifest] = field(default_factory=dict)
    """By name."""
    base_models: dict[str, Manifest] = field(default_factory=dict)
    """By name."""
    _owners: SessionIndex = field(default_factory=SessionIndex)
    _children: dict[str, dict[ChildKey, Manifest]] = field(default_factory=dict)
    """By session."""
    _failures: dict[str, Manifest] = field(default_factory=dict)
    """By session: its last pod that has failed, which may be gone."""
    _turns: start_order.StartOrder = field(default_factory=start_order.StartOrder)
    _gone: dict[tuple[str, str], int] = field(default_factory=dict)
    """Resource versions of deleted objects, by kind and uid, until the next list."""

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool = False) -> set[str]:
        """Take note of one object; return the sessions to look at."""
        metadata = manifest["metadata"]
        version, known = _version(manifest), self._find(kind, metadata)
        if self._gone.get((kind, metadata["uid"]), 0) >= version:
            return set()
        if known is not None:
            is_another = known["metadata"]["uid"] != metadata["uid"]
            if is_another if is_gone else _version(known) >= version:
                return set()
        if is_gone:
            self._gone[kind, metadata["uid"]] = version
        turns = self._put(kind, manifest, is_gone=is_gone)
        return self._concerned(kind, manifest) | turns

    def replace(self, kind: str, manifests: Iterable[Manifest], version: int) -> set[str]:
        """Take note of all objects of a kind there were; return the sessions to look at.

        Args:
            kind: of the objects.
            manifests: all of them.
            version: resource version of that moment; what is known to be later is kept.
        """
        concerned: set[str] = set()
        present = set()
        for manifest in manifests:
            present.add(manifest["metadata"]["uid"])
            concerned |= self.note(kind, manifest)
        vanished = [
            item
            for item in self._all(kind)
            if _uid(item) not in present and _version(item) <= version
        ]
        for manifest in vanished:
            concerned |= self._put(kind, manifest, is_gone=True)
            concerned |= self._concerned(kind, manifest)
        self._gone = {
            key: gone_at
            for key, gone_at in self._gone.items()
            if key[0] != kind or gone_at > version
        }
        return concerned

    def observed(self, name: str, surroundings: Surroundings) -> Observed | None:
        """Return what is known of a session; None if it does not exist, or can't be read."""
        manifest = self.sessions.get(name)
        if manifest is None:
            return None
        metadata = manifest["metadata"]
        annotations = metadata.get("annotations", {})
        try:
            spec = TrainingSessionSpec.model_validate(manifest.get("spec", {}))
            status = parsing.session_status(manifest)
        except ValidationError:
            return None
        everything = self._children.get(name, {})
        children = {
            key: item
            for key, item in everything.items()
            if _session_uid(item) in {metadata["uid"], None}
        }
        offering = self.offering(spec.base_model)
        base_model = parsing.base_model(offering) if offering is not None else None
        return Observed(
            name=name,
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            deleted=parse_time(metadata.get("deletionTimestamp")),
            has_finalizer=labels.FINALIZER in metadata.get("finalizers", []),
            is_declared=spec.model_id is None and labels.CREATED_FOR not in annotations,
            spec=spec,
            status=status,
            last_activity=parsing.last_activity(manifest),
            base_model=base_model,
            sessions_of_owner=self._older_siblings(manifest, base_model),
            start_order_message=self._turn(manifest) if surroundings.starts_in_order else None,
            children={key: item for key, item in children.items() if key.kind != "Pod"},
            pods=_pods(children),
            failed=_failed(self._failures.get(name), children),
            predecessors={key: item for key, item in everything.items() if key not in children},
            has_secret=has_secret(name, children),
            has_kuberay=surroundings.has_kuberay,
            has_device_claims=surroundings.has_device_claims,
            nodes=surroundings.nodes,
            apply_error=surroundings.apply_error,
            completed_saves=surroundings.completed_saves,
            pending_saves=surroundings.pending_saves,
            now=surroundings.now,
            kuberay_gap=surroundings.kuberay_gap,
            own_gap=surroundings.own_gap,
            cordoned=surroundings.cordoned,
        )

    def has_only_ready_pods(self, name: str) -> bool:
        """Whether a session has pods, and all of them are Ready."""
        children = self._children.get(name, {})
        pods = [parsing.pod(item) for key, item in children.items() if key.kind == "Pod"]
        return bool(pods) and all(pod.is_ready for pod in pods)

    def sessions_of(self, model_name: str) -> list[Manifest]:
        """Return the sessions of a base model."""
        return list(self._owners.of_model(model_name))

    def with_pods_on(self, nodes: frozenset[str]) -> list[str]:
        """Return the sessions that have pods on some nodes."""
        return [
            session
            for session, children in self._children.items()
            if any(
                key.kind == "Pod" and item["spec"].get("nodeName") in nodes
                for key, item in children.items()
            )
        ]

    def offering(self, model_name: str) -> Manifest | None:
        """Return the BaseModel of a model name: the oldest, if there are several."""
        found = [
            item
            for item in self.base_models.values()
            if item["spec"].get("modelName") == model_name
        ]
        return min(found, key=age, default=None)

    def _older_siblings(self, manifest: Manifest, base_model: BaseModelSpec | None) -> int:
        """Return how many live sessions its owner has that came first."""
        if base_model is None or base_model.limits.max_sessions_per_owner is None:
            return 0
        return self._owners.older(manifest)

    def _turn(self, session: Manifest) -> str | None:
        """Return why older sessions have their pods first, if any compete with this one."""
        name = session["metadata"]["name"]
        if ChildKey("RayCluster", name) in self._children.get(name, {}):
            return None
        return self._turns.admit(session, self.offering)

    def _concerned(self, kind: str, manifest: Manifest) -> set[str]:
        if kind == "BaseModel":
            model_name = manifest["spec"].get("modelName", "")
            return {item["metadata"]["name"] for item in self.sessions_of(model_name)}
        session = _session_of(kind, manifest["metadata"])
        concerned = {session} if session in self.sessions else set()
        known = self.sessions.get(session)
        if kind == "TrainingSession" and (known is None or not is_live(known)):
            # They may have been waiting for this one to end.
            concerned |= self._owners.siblings(manifest)
        return concerned

    def _find(self, kind: str, metadata: Metadata) -> Manifest | None:
        name = metadata["name"]
        if kind == "TrainingSession":
            return self.sessions.get(name)
        if kind == "BaseModel":
            return self.base_models.get(name)
        return self._children.get(_session_of(kind, metadata), {}).get(ChildKey(kind, name))

    def _put(self, kind: str, manifest: Manifest, *, is_gone: bool) -> set[str]:
        """Keep an object, or forget it; return the sessions whose turn may have come."""
        metadata = manifest["metadata"]
        name, session = metadata["name"], _session_of(kind, metadata)
        kept = None if is_gone else parsing.interned(parsing.slim(kind, manifest))
        if kind == "TrainingSession":
            known = self.sessions.get(name)
            if known is not None:
                self._owners.remove(known)
            if kept is not None:
                self._owners.put(kept)
            _set(self.sessions, name, kept)
            if is_gone:
                self._failures.pop(name, None)
        elif kind == "BaseModel":
            _set(self.base_models, name, kept)
        else:
            children = self._children.setdefault(session, {})
            _set(children, ChildKey(kind, name), kept)
            if not children:
                del self._children[session]
            if kind == "Pod" and session in self.sessions:
                self._remember(session, manifest)
        if kind not in _PLACING:
            return set()
        own = self._children.get(session, {})
        has_stopped_waiting = self._turns.note(session, self.sessions.get(session), own)
        return self._turns.next() if has_stopped_waiting else set()

    def _remember(self, session: str, pod: Manifest) -> None:
        """Remember a session's pod that has failed, until another is ready in its place."""
        last = self._failures.get(session)
        # Of one that is deleted at once, its deletion alone may be seen.
        if parsing.has_failed(pod):
            self._failures[session] = parsing.slim("Pod", pod)
        elif last is not None and parsing.replaces(pod, last):
            del self._failures[session]

    def _all(self, kind: str) -> list[Manifest]:
        if kind == "TrainingSession":
            return list(self.sessions.values())
        if kind == "BaseModel":
            return list(self.base_models.values())
        return [
            item
            for children in self._children.values()
            for key, item in children.items()
            if key.kind == kind
        ]


def _pods(children: Mapping[ChildKey, Manifest]) -> tuple[Pod, ...]:
    """Return a session's pods; those whose RayCluster is deleted count as terminating."""
    owner = next(
        (
            _uid(item)
            for key, item in children.items()
            if key.kind == "RayCluster" and "deletionTimestamp" not in item["metadata"]
        ),
        None,
    )
    pods = [item for key, item in children.items() if key.kind == "Pod"]
    return tuple(
        replace(parsing.pod(item), is_terminating=True)
        if _ray_cluster_of(item) not in {owner, None}
        else parsing.pod(item)
        for item in pods
    )


def _failed(last: Manifest | None, children: Mapping[ChildKey, Manifest]) -> Pod | None:
    """Return the session's last failed pod, if its RayCluster exists."""
    clusters = {_uid(item) for key, item in children.items() if key.kind == "RayCluster"}
    return parsing.pod(last) if last is not None and _ray_cluster_of(last) in clusters else None


def _ray_cluster_of(pod: Manifest) -> str | None:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner["kind"] == "RayCluster"), None)


def _set(store: dict[K, Manifest], key: K, manifest: Manifest | None) -> None:
    if manifest is None:
        store.pop(key, None)
    else:
        store[key] = manifest


def _session_of(kind: str, metadata: Metadata) -> str:
    """Return the session that an object is, or belongs to.

    Owner references take precedence, as labels are easier to edit; pods are owned by their
    RayCluster.
    """
    if kind == "TrainingSession":
        return str(metadata["name"])
    for owner in metadata.get("ownerReferences", []):
        if owner["kind"] == "TrainingSession":
            return str(owner["name"])
    return str(metadata.get("labels", {}).get(labels.SESSION_LABEL, ""))


def _session_uid(child: Manifest) -> str | None:
    """Return the uid of the session that owns a child; None for pods, owned by the RayCluster."""
    owners = child["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner["kind"] == "TrainingSession"), None)


def _version(manifest: Manifest) -> int:
    """Return a resource version; they are increasing numbers (KEP-5504)."""
    return int(manifest["metadata"]["resourceVersion"])


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"]["uid"])
