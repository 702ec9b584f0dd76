"""Emptying a node: asks the sessions with pods on it to leave, and follows them until they have.

The operator does the work: it suspends each session and resumes it on other nodes. This module
marks the sessions, with the credentials of the administrator who calls it, and reads their status.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import CORDON
from tinkercloud_crds.conditions import ConditionType
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import NotFound
from tinkercloud_kube.informer import Informer
from tinkercloud_kube.objects import Manifest

_LEFT = "has left the node"


class CannotDrain(Exception):
    """A node that cannot be drained; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one session."""

    session: str
    state: str
    """A short description."""
    has_left: bool = False
    """Whether none of its pods is left on the node."""


@dataclass(frozen=True, slots=True)
class _Pod:
    """A session's pod on the node."""

    session: str
    stays: bool
    """Whether it tolerates cordons, so that the operator leaves it where it is."""
    is_terminating: bool


async def cordon(cluster: Client, node: str) -> None:
    """Keep new pods off a node.

    Raises:
        CannotDrain: the node does not exist.
        KubernetesError: the request failed.
    """
    try:
        await cluster.merge(ObjectRef("Node", node), {"spec": {"unschedulable": True}})
    except NotFound:
        raise _unknown(node) from None


async def drain(cluster: Client, node: str) -> AsyncIterator[Progress]:
    """Ask all sessions with pods on a cordoned node to leave it, and yield how they proceed.

    Ends when no session has a pod on the node. Repeating it, also after an interruption, continues
    where it was.

    Args:
        cluster: a client of the sessions' namespace.
        node: name of the node.

    Raises:
        CannotDrain: the node does not exist, takes new pods, or has pods that tolerate cordons.
        KubernetesError: a request failed.
    """
    await _check_cordoned(cluster, node)
    pods = Informer(cluster, "Pod", partial(_pod_on, node))
    sessions = Informer(cluster, "TrainingSession", lambda manifest: manifest)
    # Checks permission to list: an informer would retry a 403 forever.
    for kind in ("Pod", "TrainingSession"):
        async for _ in cluster.pages(kind):
            break
    following = [asyncio.create_task(each.run()) for each in (pods, sessions)]
    try:
        await pods.is_filled.wait()
        await sessions.is_filled.wait()
        async for progress in _follow(cluster, node, pods, sessions):
            yield progress
    finally:
        await _end(following)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    cluster: Client, node: str, pods: Informer[_Pod], sessions: Informer[Manifest]
) -> AsyncIterator[Progress]:
    reported: dict[str, str] = {}
    # An interrupted drain has asked some already, which may have left.
    asked = {session["metadata"]["name"] for session in sessions.objects() if _asked(session, node)}
    async with _changes(pods, sessions) as changed:
        while True:
            changed.clear()
            on_node = _by_session(pods.objects())
            for name in sorted(on_node.keys() - asked):
                await _mark(cluster, name, node)
                asked.add(name)
            for name in sorted(asked):
                has_left = name not in on_node
                state = _LEFT if has_left else _state(sessions.get(name), on_node[name])
                if reported.get(name) == state:
                    continue
                reported[name] = state
                if has_left:
                    await _mark(cluster, name, None)
                yield Progress(name, state, has_left)
            if not on_node:
                return
            _check_tolerations(on_node)
            await changed.wait()


@asynccontextmanager
async def _changes(*informers: Informer[Any]) -> AsyncIterator[asyncio.Event]:
    """Provide an event that is set at every change of some informers' objects."""
    changed = asyncio.Event()

    async def note(informer: Informer[Any]) -> None:
        while True:
            await informer.any_change()
            changed.set()

    # A task group would wrap the errors of the block.
    notes = [asyncio.create_task(note(each)) for each in informers]
    try:
        # Changes count from the moment at which the tasks wait.
        await asyncio.sleep(0)
        yield changed
    finally:
        await _end(notes)


def _by_session(pods: Iterable[_Pod]) -> dict[str, list[_Pod]]:
    found: dict[str, list[_Pod]] = {}
    for pod in pods:
        found.setdefault(pod.session, []).append(pod)
    return found


def _check_tolerations(on_node: Mapping[str, Sequence[_Pod]]) -> None:
    """Check that the operator will move at least one of the sessions.

    Raises:
        CannotDrain: it will not.
    """
    if any(not pod.stays for pods in on_node.values() for pod in pods):
        return
    raise CannotDrain(
        f"the pods of {', '.join(sorted(on_node))} tolerate cordons, so the operator leaves them on"
        " the node; suspend these sessions, or remove the tolerations from `placement.tolerations`"
        " of their BaseModels"
    )


def _asked(session: Manifest, node: str) -> bool:
    asked: str | None = session["metadata"].get("annotations", {}).get(labels.LEAVE_NODE)
    return asked == node


async def _check_cordoned(cluster: Client, node: str) -> None:
    try:
        found = await cluster.get(ObjectRef("Node", node))
    except NotFound:
        raise _unknown(node) from None
    if not found.get("spec", {}).get("unschedulable"):
        raise CannotDrain(
            f"node {node} takes new pods, so the sessions would return to it; pass --cordon, or run"
            f" `kubectl cordon {node}` first"
        )


async def _mark(cluster: Client, session: str, node: str | None) -> None:
    """Set the node that a session is to leave, or remove it."""
    patch = {"metadata": {"annotations": {labels.LEAVE_NODE: node}}}
    # A session that has been deleted needs no mark.
    with suppress(NotFound):
        await cluster.merge(ObjectRef("TrainingSession", session), patch)


def _pod_on(node: str, manifest: Manifest) -> _Pod | None:
    """Return a session's pod if it is on a node and has not ended."""
    metadata, spec = manifest["metadata"], manifest.get("spec", {})
    session = metadata.get("labels", {}).get(labels.SESSION_LABEL)
    is_own = labels.COMPONENT_LABEL in metadata.get("labels", {})
    has_ended = manifest.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    if not is_own or session is None or spec.get("nodeName") != node or has_ended:
        return None
    is_terminating = "deletionTimestamp" in metadata
    stays = not is_terminating and _tolerates_cordons(spec.get("tolerations", []))
    return _Pod(session, stays, is_terminating)


def _tolerates_cordons(tolerations: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        each.get("key") in {None, "", CORDON} and each.get("effect") in {None, "", "NoSchedule"}
        for each in tolerations
    )


def _state(session: Manifest | None, pods: Sequence[_Pod]) -> str:
    """Return what a session with pods on the node does."""
    if session is None or all(pod.is_terminating for pod in pods):
        return "its pods are terminating"
    found = session.get("status", {}).get("conditions", [])
    conditions = {condition["type"]: condition for condition in found}
    stalled = conditions.get(ConditionType.STALLED, {})
    if stalled.get("status") == "True":
        return f"{stalled['reason']}: {stalled.get('message', '')}"
    is_stopping = conditions.get(ConditionType.SUSPENDED, {}).get("status") == "Unknown"
    return "saving its state" if is_stopping else "asked to leave"


def _unknown(node: str) -> CannotDrain:
    return CannotDrain(f"there is no node {node}; see `kubectl get nodes`")
