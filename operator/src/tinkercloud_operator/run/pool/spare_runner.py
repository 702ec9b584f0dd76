"""Maintains the warm spares of BaseModels, and gives them to sessions."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog

from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import AlreadyExists, KubernetesError, NotFound, Rejected
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.children.pool_cluster import session_owner, spare_cluster
from tinkercloud_operator.decide.pods.deadlines import awaited_until
from tinkercloud_operator.decide.pool.spare_clusters import SparesFacts, plan_spares
from tinkercloud_operator.decide.pool.spare_facts import is_short, is_unplaced, spares_facts
from tinkercloud_operator.run.cluster.resource_store import Watched

log = structlog.get_logger(__name__)

_REFUSED = timedelta(minutes=5)
"""Cooldown after a rejected takeover, for the spare and for the session, which starts its own
pods."""


class Spares:
    """The warm spares during one term of leadership. Belongs to one event loop.

    Args:
        watched: the known objects.
        cluster: the Kubernetes API.
        note: called with the kind and the new state of an object after a write.
        enqueue: called with the name of a session to reconcile.
    """

    def __init__(
        self,
        watched: Watched,
        cluster: Client,
        note: Callable[[str, Manifest], object],
        enqueue: Callable[[str], object],
    ) -> None:
        self._watched = watched
        self._cluster = cluster
        self._note = note
        self._enqueue = enqueue
        self._deleting: set[str] = set()
        """Uids of spares whose deletion may not be visible yet."""
        self._unplaced: dict[str, bool] = {}
        """Sessions without nodes for all of their pods; whether they wait for nodes or quota."""
        self._refused: dict[str, datetime] = {}
        """Spares and sessions whose takeover was rejected, until when they take no part in any."""
        self._promised: dict[str, str] = {}
        """Model names of the sessions that start no pods because they are to take over a spare."""

    def facts(self, model_name: str) -> SparesFacts:
        """Return the facts about the spares of a model name."""
        now = datetime.now(UTC)
        # A session may have gone unseen, while a watch was interrupted.
        known = self._watched.sessions
        unplaced = [is_short for name, is_short in self._unplaced.items() if name in known]
        facts = spares_facts(
            model_name,
            self._watched.offering(model_name),
            self._watched.sessions_of(model_name),
            may_start=self._watched.may_start,
            resolved=self._watched.resolved,
            sessions_short=sum(unplaced),
            sessions_unplaced=len(unplaced),
            deleting=self._deleting,
            now=now,
        )
        refused = {name for name, until in self._refused.items() if now < until}
        heads = self._watched.ending_heads(model_name, now)
        return replace(
            facts,
            ending={name: awaited_until(head) for name, head in heads.items()},
            spares=[
                replace(each, is_ready=each.is_ready and each.name not in refused)
                for each in facts.spares
            ],
            takers=[
                replace(each, may_take=each.may_take and each.name not in refused)
                for each in facts.takers
            ],
        )

    def is_promised(self, session: str) -> bool:
        """Return whether a session is about to take over a spare, so that it starts no pods."""
        return session in self._promised

    def promise(self, session: str) -> None:
        """Promise a session the spare that it is to take over next, if there is one.

        It is enqueued when it has the spare, or when the spare is gone.
        """
        self._promised.pop(session, None)
        known = self._watched.sessions.get(session)
        if known is None or not self.concern(known) or self._watched.children.has_cluster(session):
            return
        model_name = str(known["spec"].get("baseModel", ""))
        plan = plan_spares(self.facts(model_name))
        if session in plan.take or session in plan.place:
            self._promised[session] = model_name

    def concern(self, session: Manifest) -> bool:
        """Return whether the BaseModel of a session has, or had, spares."""
        if session["spec"].get("role") == "Spare" or "poolCluster" in session["spec"]:
            return True
        offered = self._watched.offering(session["spec"].get("baseModel", ""))
        return offered is not None and bool(offered["spec"].get("warmSpares"))

    def note(self, session: Manifest, *, is_gone: bool) -> list[str]:
        """Record a changed session; return the model names whose spares it concerns."""
        metadata = session["metadata"]
        if is_gone:
            self._deleting.discard(metadata["uid"])
            self._refused.pop(metadata["name"], None)
        before = self._unplaced.pop(metadata["name"], None)
        if is_unplaced(session) and not is_gone:
            self._unplaced[metadata["name"]] = is_short(session)
        concerned = [session["spec"].get("baseModel", "")] if self.concern(session) else []
        if before != self._unplaced.get(metadata["name"]):
            concerned += [
                str(each["spec"].get("modelName", ""))
                for each in self._watched.base_models.values()
                if each["spec"].get("warmSpares")
            ]
        return concerned

    async def maintain(self, model_name: str) -> datetime | None:
        """Do what the plan says; return when it may change although no object does.

        Raises:
            KubernetesError: a request failed; the next attempt continues where this one ended.
        """
        plan = plan_spares(self.facts(model_name))
        for session in plan.take:
            # Before the first request: what the limits have room for now may be gone after it.
            self._watched.admit(session)
        base_model = self._watched.offering(model_name)
        create = plan.create if base_model is not None else ()
        failures = await _failures_of(
            *(self._take_over(session, spare) for session, spare in plan.take.items()),
            *(self._set_cluster(session, spare) for session, spare in plan.place.items()),
        )
        self._end_promises(model_name)
        failures += await _failures_of(
            *(self._set_cluster(session, None) for session in plan.release),
            *(self._delete(name) for name in plan.delete),
            *(self._create(name, base_model or {}) for name in create),
        )
        if failures:
            raise failures[0]
        return min(filter(None, (plan.changes_at, self._next_use())), default=None)

    def _next_use(self) -> datetime | None:
        """Return when a spare or session may take part in a takeover again, if any may."""
        now = datetime.now(UTC)
        self._refused = {name: until for name, until in self._refused.items() if now < until}
        return min(self._refused.values(), default=None)

    async def _take_over(self, session: str, spare: str) -> None:
        """Give a spare to a session; one that may not have it starts pods of its own."""
        if await self._take(session, spare):
            await self._set_cluster(session, spare)

    def _end_promises(self, model_name: str) -> None:
        """Enqueue the sessions that were to take over a spare: they have one, or it is gone."""
        ended = [each for each, model in self._promised.items() if model == model_name]
        for session in ended:
            del self._promised[session]
            self._enqueue(session)

    async def _take(self, session: str, spare: str) -> bool:
        """Make a session the owner of a spare, if both are still as they are known."""
        known, taker = self._watched.sessions.get(spare), self._watched.sessions.get(session)
        if known is None or taker is None:
            return False
        metadata = {key: known["metadata"][key] for key in ("uid", "resourceVersion")}
        patch = {"metadata": {**metadata, "ownerReferences": [session_owner(taker)]}}
        try:
            owned = await self._cluster.merge(ObjectRef("TrainingSession", spare), patch)
        except NotFound:
            return False
        except Rejected:
            self._refused[spare] = datetime.now(UTC) + _REFUSED
            raise
        self._note("TrainingSession", owned)
        log.info("a session takes over a warm spare", session=session, cluster=spare)
        return True

    async def _set_cluster(self, session: str, spare: str | None) -> None:
        """Record the spare that serves a session, or that none does, unless it has changed.

        A session that may not get the spare starts pods of its own, and the spare that it owns
        ends. The session could use no other either, so it gets none for a while.
        """
        known = self._watched.sessions.get(session)
        if known is None:
            return
        metadata = {key: known["metadata"][key] for key in ("uid", "resourceVersion")}
        patch = {"metadata": metadata, "spec": {"poolCluster": spare}}
        try:
            placed = await self._cluster.merge(ObjectRef("TrainingSession", session), patch)
        except NotFound:
            return
        except Rejected:
            if spare is not None:
                self._refused[session] = datetime.now(UTC) + _REFUSED
            raise
        self._note("TrainingSession", placed)

    async def _delete(self, name: str) -> None:
        known = self._watched.sessions.get(name)
        if known is None:
            return
        metadata = known["metadata"]
        self._deleting.add(metadata["uid"])
        try:
            await self._cluster.delete(ObjectRef("TrainingSession", name), metadata["uid"])
        except KubernetesError:
            self._deleting.discard(metadata["uid"])
            raise
        log.info("deleted a warm spare", cluster=name)

    async def _create(self, name: str, base_model: Manifest) -> None:
        with suppress(AlreadyExists):
            created = await self._cluster.create(spare_cluster(name, base_model), is_strict=True)
            log.info("created a warm spare", cluster=name)
            self._note("TrainingSession", created)


async def _failures_of(*writes: Awaitable[object]) -> list[KubernetesError]:
    """Await writes, one after the other, and return their failures: none holds up the others."""
    failures = []
    for write in writes:
        try:
            await write
        except KubernetesError as error:
            log.warning("could not maintain a warm spare; retrying", error=str(error))
            failures.append(error)
    return failures
