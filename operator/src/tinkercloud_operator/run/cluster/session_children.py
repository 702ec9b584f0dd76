"""The children of sessions that the operator has observed, by session; no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Change, Manifest
from tinkercloud_operator.children.secret_marker import has_secret
from tinkercloud_operator.decide.pods.deadlines import ending_head
from tinkercloud_operator.decide.pods.session_pods import failed_pod, pods_of
from tinkercloud_operator.decide.read import parsing, pod_problems
from tinkercloud_operator.spec.observed import ChildKey, Children, Pod, ProgramPod, SessionPods

Metadata = Mapping[str, Any]

CHILD_KINDS = (
    "RayCluster",
    "Service",
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ResourceClaimTemplate",
    "Job",
)
PROGRAM_POD = "ProgramPod"
"""Pods of programs, which are kept apart from the session's own pods."""


@dataclass(slots=True)
class SessionChildren:
    """The children of each session, and its last pod that has failed."""

    _by_session: dict[str, dict[ChildKey, Manifest]] = field(default_factory=dict)
    failures: dict[str, Manifest] = field(default_factory=dict)
    """By session: its last failed pod, which may be gone."""

    def of(self, session: str) -> dict[ChildKey, Manifest]:
        """Return the children of a session, and of earlier ones with its name."""
        return self._by_session.get(session, {})

    def observed(self, session: str, uid: str) -> tuple[Children, SessionPods]:
        """Return the children and the pods of a session, as decisions read them."""
        everything = self.of(session)
        children = _of_session(everything, uid)
        return Children(
            own=_without_pods(children),
            predecessors={key: each for key, each in everything.items() if key not in children},
            has_secret=has_secret(session, children),
        ), SessionPods(
            required=pods_of(children, are_scaled=False),
            scaled=pods_of(children, are_scaled=True),
            of_program=_program_pods(children),
            failed=failed_pod(self.failures.get(session), children),
        )

    def required_pods(self, session: str) -> tuple[Pod, ...]:
        """Return the pods without which a session does not run."""
        return pods_of(self.of(session), are_scaled=False)

    def has_only_ready_pods(self, name: str) -> bool:
        """Whether a session has pods, and all of them are Ready."""
        children = self.of(name)
        pods = [parsing.pod(item) for key, item in children.items() if key.kind == "Pod"]
        return bool(pods) and all(pod.is_ready for pod in pods)

    def cluster_of(self, name: str) -> Manifest | None:
        """Return the RayCluster of a session, if it has one of its own."""
        return self.of(name).get(ChildKey("RayCluster", name))

    def has_cluster(self, name: str) -> bool:
        """Whether a session has a RayCluster of its own."""
        return self.cluster_of(name) is not None

    def ending_head(self, gone: str, now: datetime) -> Pod | None:
        """Return the running head of a session that is gone; its RayCluster may be known still.

        A head without a RayCluster as its owner was orphaned: nothing deletes it.
        """
        pods = pods_of(_without_orphans(self.of(gone)), are_scaled=False)
        return ending_head((replace(pod, is_terminating=True) for pod in pods), now)

    def with_pods_on(self, nodes: frozenset[str]) -> list[str]:
        """Return the sessions that have pods on some nodes."""
        return [
            session
            for session, children in self._by_session.items()
            if any(
                key.kind == "Pod" and item["spec"].get("nodeName") in nodes
                for key, item in children.items()
            )
        ]

    def index(self, kind: str, manifest: Manifest, change: Change[Manifest]) -> set[str]:
        """Update the children of the sessions affected; return the one that lost a child, if any.

        A child changes its session when somebody edits its owners or labels.
        """
        key = ChildKey(kind, change.name)
        session = session_of(kind, manifest["metadata"])
        before = session
        if change.before is not None:
            before = session_of(kind, change.before["metadata"])
            self._remove_child(before, key)
        if change.after is not None:
            self._by_session.setdefault(session, {})[key] = change.after
        return {before} if before != session else set()

    def _remove_child(self, session: str, key: ChildKey) -> None:
        children = self.of(session)
        children.pop(key, None)
        if not children:
            self._by_session.pop(session, None)

    def remember(self, session: str, pod: Manifest) -> None:
        """Remember a session's pod that has failed, until another is ready in its place."""
        last = self.failures.get(session)
        # Of one that is deleted at once, its deletion alone may be seen.
        if pod_problems.has_failed(pod):
            self.failures[session] = parsing.slim("Pod", pod)
        elif last is not None and parsing.replaces(pod, last):
            del self.failures[session]


def _of_session(children: Mapping[ChildKey, Manifest], uid: str) -> dict[ChildKey, Manifest]:
    """Return the children that do not belong to an earlier session with the same name."""
    return {key: item for key, item in children.items() if _session_uid(item) in {uid, None}}


def _without_pods(children: Mapping[ChildKey, Manifest]) -> dict[ChildKey, Manifest]:
    """Return the children that are not pods."""
    kinds = {"Pod", PROGRAM_POD}
    return {key: item for key, item in children.items() if key.kind not in kinds}


def _without_orphans(children: Mapping[ChildKey, Manifest]) -> dict[ChildKey, Manifest]:
    """Return the children without pods that no RayCluster owns."""
    return {
        key: item
        for key, item in children.items()
        if key.kind != "Pod"
        or any(each["kind"] == "RayCluster" for each in item["metadata"].get("ownerReferences", []))
    }


def _program_pods(children: Mapping[ChildKey, Manifest]) -> tuple[ProgramPod, ...]:
    return tuple(
        parsing.program_pod(item) for key, item in children.items() if key.kind == PROGRAM_POD
    )


def session_of(kind: str, metadata: Metadata) -> str:
    """Return the session that an object is, or belongs to.

    Owner references take precedence, as labels are easier to edit; pods are owned by their
    RayCluster.
    """
    if kind == "TrainingSession":
        return str(metadata["name"])
    for owner in metadata.get("ownerReferences", []):
        if owner["kind"] == "TrainingSession":
            return str(owner["name"])
    found = metadata.get("labels", {})
    of_program = found.get(labels.PROGRAM_LABEL, "")
    return str(of_program if kind == PROGRAM_POD else found.get(labels.SESSION_LABEL, ""))


def _session_uid(child: Manifest) -> str | None:
    """Return the uid of the session that owns a child; None for pods, owned by the RayCluster."""
    owners = child["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner["kind"] == "TrainingSession"), None)
