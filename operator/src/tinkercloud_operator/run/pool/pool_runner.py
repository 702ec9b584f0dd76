"""Maintains the pools of BaseModels: their clusters, and the places of sessions on them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from tinkercloud_crds import labels
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import AlreadyExists, KubernetesError, NotFound
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.children.pool_cluster import pool_cluster
from tinkercloud_operator.decide.pods.deadlines import awaited_until
from tinkercloud_operator.decide.pool.head_answers import ASK_AGAIN_SECONDS
from tinkercloud_operator.decide.pool.pool_facts import (
    is_cluster,
    is_in_pool,
    is_of_pool,
    pool_facts,
)
from tinkercloud_operator.decide.pool.pool_model import PoolFacts
from tinkercloud_operator.decide.pool.pool_moves import is_emptied
from tinkercloud_operator.decide.pool.slots_plan import PoolPlan, plan_pool
from tinkercloud_operator.decide.session.actions import GiveAway, TakeBack
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.cluster.work_queue import WorkQueue
from tinkercloud_operator.run.pool.move_requests import MoveRequests
from tinkercloud_operator.run.pool.pool_memory import PoolMemory
from tinkercloud_operator.run.pool.spare_runner import Spares

log = structlog.get_logger(__name__)


class Pools:
    """The pools during one term of leadership. Belongs to one event loop.

    Args:
        watched: the known objects.
        cluster: the Kubernetes API.
        head_saver: receives requests to give models away.
        note: called with the kind and the new state of an object after a write.
        enqueue: called with the name of a session to reconcile.
        spares: the warm spares, which the same worker maintains.
        memory: how many models heads can hold.
    """

    def __init__(
        self,
        watched: Watched,
        cluster: Client,
        head_saver: HeadSaver,
        note: Callable[[str, Manifest], object],
        enqueue: Callable[[str], object],
        *,
        spares: Spares,
        memory: PoolMemory,
    ) -> None:
        self._watched = watched
        self._cluster = cluster
        self._requests = MoveRequests(head_saver)
        self._note = note
        self._enqueue = enqueue
        self._spares = spares
        self._memory = memory
        self._queue = WorkQueue()
        """Model names whose pool may need something."""
        self._deleting: set[str] = set()
        """Uids of clusters whose deletion may not be visible yet."""
        self._seen: dict[str, Manifest] = {}
        """What the sessions of each cluster depend on, by the cluster's name."""
        self._cordoned: frozenset[str] = frozenset()
        """Cordoned nodes."""
        self._waiting: dict[str, str] = {}
        """Why each session without a place, or without room there, waits, by name."""
        self._held: dict[str, str] = {}
        """Why sessions that are to be moved stay for now, by name."""

    def waiting_message(self, session: str) -> str | None:
        """Return why a session waits for a place, or for room where it is, if it does."""
        return self._waiting.get(session)

    def move_failure(self, session: str) -> str | None:
        """Return why a session is not moved for now, if it is to be moved."""
        return self._held.get(session)

    def facts(self, model_name: str) -> PoolFacts:
        """Return the facts about the pool of a model name."""
        now = datetime.now(UTC)
        heads = self._watched.ending_heads(model_name, now)
        sessions = self._watched.sessions_of(model_name)
        return pool_facts(
            model_name,
            self._watched.offering(model_name),
            sessions,
            deleting=self._deleting,
            given_away=self._requests.given_away(sessions),
            taken_back=self._requests.taken_back(sessions),
            failed=self._requests.failed(sessions),
            now=now,
            cordoned={
                session["metadata"]["name"]
                for session in sessions
                if is_of_pool(session)
                and self._watched.must_leave(session["metadata"]["name"], self._cordoned)
            },
            measured=self._memory.known,
            ending={name: awaited_until(head) for name, head in heads.items()},
        )

    def note_cordons(self, nodes: frozenset[str]) -> None:
        """Record which nodes are cordoned."""
        for name in self._watched.children.with_pods_on(nodes ^ self._cordoned):
            session = self._watched.sessions.get(name)
            if session is not None and is_of_pool(session):
                self._queue.add(str(session["spec"].get("baseModel", "")))
        self._cordoned = nodes

    def is_emptied(self, cluster: str) -> bool:
        """Return whether the sessions of a cluster on a cordoned node are moved to others."""
        session = self._watched.sessions.get(cluster)
        if session is None or not is_of_pool(session):
            return False
        if not self._watched.must_leave(cluster, self._cordoned):
            return False
        facts = self.facts(session["spec"].get("baseModel", ""))
        return is_emptied(facts, plan_pool(facts).moves, cluster)

    def note_saved(self, session: str) -> None:
        """Record that a head has completed, or refused, a request for a session."""
        known = self._watched.sessions.get(session)
        if known is not None and is_in_pool(known):
            self._queue.add(str(known["spec"].get("baseModel", "")))

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool = False) -> None:
        """Record a changed object: a BaseModel, a cluster of a pool, a session on one, or a pod."""
        if kind == "BaseModel":
            self._queue.add(str(manifest["spec"].get("modelName", "")))
        if kind == "Pod":
            self._note_pod(manifest)
        if kind != "TrainingSession":
            return
        if is_gone:
            self._deleting.discard(manifest["metadata"]["uid"])
            for messages in (self._waiting, self._held):
                messages.pop(manifest["metadata"]["name"], None)
        if is_cluster(manifest):
            self._note_cluster(manifest, is_gone=is_gone)
        for model_name in self._spares.note(manifest, is_gone=is_gone):
            self._queue.add(model_name)
        if is_cluster(manifest) or is_in_pool(manifest):
            self._queue.add(str(manifest["spec"].get("baseModel", "")))

    def _note_pod(self, pod: Manifest) -> None:
        """Enqueue the sessions that wait for the head of a deleted cluster to end."""
        cluster = pod["metadata"].get("labels", {}).get(labels.SESSION_LABEL)
        if cluster is None or cluster in self._watched.sessions:
            return
        for session in self._watched.sessions.values():
            if session["spec"].get("poolCluster") == cluster:
                self._queue.add(str(session["spec"].get("baseModel", "")))

    def _note_cluster(self, manifest: Manifest, *, is_gone: bool) -> None:
        """Enqueue the sessions of a cluster if what their status depends on has changed."""
        name, status = manifest["metadata"]["name"], manifest.get("status", {})
        seen = {
            "is_leaving": is_gone or "deletionTimestamp" in manifest["metadata"],
            "incarnation": status.get("incarnation"),
            "conditions": status.get("conditions"),
        }
        before = self._seen.pop(name, None)
        if before is not None and (is_gone or before["incarnation"] != seen["incarnation"]):
            self._memory.forget(before["incarnation"])
        if not is_gone:
            self._seen[name] = seen
        if seen != before:
            for session in self._watched.pool_sessions_of(manifest):
                self._enqueue(session)

    def enqueue_all(self) -> None:
        """Enqueue the pools of all BaseModels and sessions."""
        for base_model in self._watched.base_models.values():
            self.note("BaseModel", base_model)
        for session in self._watched.sessions.values():
            self.note("TrainingSession", session)

    async def work(self) -> None:
        """Maintain the pools, forever; one worker, so that no slot is assigned twice."""
        try:
            await self._work()
        finally:
            self._memory.close()

    async def _work(self) -> None:
        while True:
            name = await self._queue.take()
            try:
                await self._maintain(name)
            except KubernetesError as error:
                log.warning("could not maintain the pool; retrying", model=name, error=str(error))
                self._queue.failed(name)
            except Exception:
                log.exception("maintaining the pool failed unexpectedly; retrying", model=name)
                self._queue.failed(name)
            else:
                self._queue.done(name)

    async def _maintain(self, model_name: str) -> None:
        self._requests.forget_arrived(self._watched.sessions_of(model_name))
        facts = await self._measured_facts(model_name)
        plan = plan_pool(facts)
        self._ask_again(model_name, facts, plan)
        self._record(facts, self._waiting, plan.waiting)
        self._record(facts, self._held, plan.moves.held)
        self._requests.ask(facts, GiveAway, plan.moves.ask)
        self._requests.ask(facts, TakeBack, plan.moves.take_back)
        placed = {**plan.places, **plan.moves.arrive}
        moved = {**plan.moves.start, **dict.fromkeys(plan.moves.cancel)}
        failures = [
            failure
            for write in (
                *(self._place(session, name) for session, name in placed.items()),
                *(self._move(session, name) for session, name in moved.items()),
            )
            if (failure := await write) is not None
        ]
        for cluster in facts.clusters:
            if cluster.is_cordoned:
                # It is suspended when its sessions have left, or can't leave.
                self._enqueue(cluster.name)
        for name in plan.delete:
            await self._delete(name)
        base_model = self._watched.offering(model_name)
        if base_model is not None:
            for name in plan.create:
                await self._create(name, base_model)
        for moment in (plan.changes_at, await self._spares.maintain(model_name)):
            if moment is not None:
                seconds = (moment - datetime.now(UTC)).total_seconds()
                self._queue.add_after(model_name, max(0.0, seconds))
        if failures:
            raise failures[0]

    async def _measured_facts(self, model_name: str) -> PoolFacts:
        """Return the facts, with the memory of heads as it is now if a session waits for a place.

        The same holds if sessions may be moved between clusters, or if a head does not have all
        that are placed on it: it may have no room for them.
        """
        facts = self.facts(model_name)
        is_settled = len(facts.clusters) <= 1 and not any(each.pending for each in facts.clusters)
        if facts.pool is None or (is_settled and not facts.unplaced()):
            return facts
        await self._memory.ask(facts.clusters, lambda: self._queue.add(model_name))
        return self.facts(model_name)

    def _ask_again(self, model_name: str, facts: PoolFacts, plan: PoolPlan) -> None:
        """Plan a pool again soon if sessions wait for memory: heads have no event for that."""
        is_short = bool(plan.waiting or plan.moves.homeless)
        if is_short and any(cluster.is_limited for cluster in facts.clusters):
            self._queue.add_after(model_name, ASK_AGAIN_SECONDS)

    def _record(self, facts: PoolFacts, known: dict[str, str], new: Mapping[str, str]) -> None:
        for session in facts.sessions:
            before, message = known.get(session.name), new.get(session.name)
            if message is None:
                known.pop(session.name, None)
            else:
                known[session.name] = message
            if message != before:
                self._enqueue(session.name)

    async def _place(self, session: str, cluster: str) -> KubernetesError | None:
        """Give a session a place; return the failure of an attempt."""
        patch = {"metadata": {"annotations": {labels.MOVING_TO: None}}}
        return await self._change(session, patch | {"spec": {"poolCluster": cluster}})

    async def _move(self, session: str, target: str | None) -> KubernetesError | None:
        """Record the cluster that a session is moved to; return the failure of an attempt.

        Args:
            session: the session.
            target: the cluster; None if it is not moved after all.
        """
        return await self._change(
            session, {"metadata": {"annotations": {labels.MOVING_TO: target}}}
        )

    async def _change(self, session: str, patch: Manifest) -> KubernetesError | None:
        """Change a session, unless it was deleted; return the failure of an attempt.

        The session must be as it is known. Otherwise a late request of an operator that is no
        longer the leader could move a run that was started elsewhere.
        """
        known = self._watched.sessions.get(session)
        if known is None:
            return None
        same = {key: known["metadata"][key] for key in ("uid", "resourceVersion")}
        patch = {**patch, "metadata": {**patch["metadata"], **same}}
        try:
            changed = await self._cluster.merge(ObjectRef("TrainingSession", session), patch)
        except NotFound:
            return None
        except KubernetesError as error:
            # Others must not wait because one session can't be placed.
            log.warning("could not place a session; retrying", session=session, error=str(error))
            return error
        log.info(
            "placed a session",
            session=session,
            cluster=changed["spec"].get("poolCluster"),
            moving_to=changed["metadata"].get("annotations", {}).get(labels.MOVING_TO),
        )
        self._note("TrainingSession", changed)
        return None

    async def _delete(self, name: str) -> None:
        known = self._watched.sessions.get(name)
        if known is None:
            return
        uid = known["metadata"]["uid"]
        # Before the request: while it is in progress, no session may be placed there.
        self._deleting.add(uid)
        try:
            await self._cluster.delete(ObjectRef("TrainingSession", name), uid)
        except KubernetesError:
            self._deleting.discard(uid)
            raise
        log.info("deleted an unused pool cluster", cluster=name)

    async def _create(self, name: str, base_model: Manifest) -> None:
        with suppress(AlreadyExists):
            created = await self._cluster.create(pool_cluster(name, base_model), is_strict=True)
            log.info("created a pool cluster", cluster=name)
            self._note("TrainingSession", created)
