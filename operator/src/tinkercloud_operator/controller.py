"""Looks at sessions: observes, asks `reconcile` what to do, does it."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import structlog

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, find, timestamp
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_operator import metrics, seen
from tinkercloud_operator.children.pods import Names
from tinkercloud_operator.cluster import (
    Cluster,
    ClusterError,
    Conflict,
    NotThere,
    ObjectRef,
    Refused,
)
from tinkercloud_operator.heads import Heads
from tinkercloud_operator.observed import Manifest, Node, Observed
from tinkercloud_operator.offers import offer_status
from tinkercloud_operator.plan import (
    Action,
    Announce,
    Apply,
    AskHead,
    CreateSecret,
    Delete,
    DeleteSession,
    HoldFinalizer,
    Plan,
)
from tinkercloud_operator.queue import WorkQueue
from tinkercloud_operator.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.watched import CHILD_KINDS, Surroundings, Watched

log = structlog.get_logger(__name__)

_MANY_CHANGES = frozenset({"Pod", "RayCluster"})
_GATHER_SECONDS = 0.25
"""For how long changes of pods, which come in bursts, are gathered before their session is looked
at: each look may write a status."""
_OFFER_SECONDS = 2.0
"""For how long changes of sessions are gathered before their BaseModel's status is written."""
_NODES_SECONDS = 60.0
"""How long a list of nodes is good."""
_MAX_ROUNDS = 4
"""Times a session is looked at in a row when a head's answer changes what is to be done."""


class Controller:
    """One term of leadership: everything it has seen, and its workers. Belongs to one loop."""

    def __init__(self, cluster: Cluster, heads: Heads, settings: Settings) -> None:
        self.watched = Watched()
        self.queue = WorkQueue()
        self._offers = WorkQueue()
        """BaseModels whose status may have changed."""
        self.has_kuberay = True
        self.needs_resync = asyncio.Event()
        """Set when something may have gone without a word; whoever lists everything clears it."""
        self._heard: set[str] = set()
        """Kinds whose watches have told more than what was there when they began."""
        self._is_complete = asyncio.Event()
        """Whether everything has been listed once: half of a picture must not be acted on."""
        self._cluster = cluster
        self._heads = heads
        self._settings = settings
        self._answers: dict[str, frozenset[tuple[str, str]]] = {}
        self._apply_errors: dict[str, str] = {}
        self._secrets: dict[str, tuple[str, float]] = {}
        """Session to its uid, and when its Secret was last seen."""
        self._nodes: tuple[float, tuple[Node, ...] | None] = (float("-inf"), None)

    def hear(self, kind: str, event_type: str | None, manifest: Manifest) -> None:
        """Take note of a watch event; it has no type if it is of the list that a watch begins with.

        A watch that begins anew tells what is there, but not what has gone meanwhile.
        """
        if event_type is not None:
            self._heard.add(kind)
        elif kind in self._heard:
            self.needs_resync.set()
        self.note(kind, manifest, is_gone=event_type == "DELETED")

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool) -> None:
        """Take note of how an object is, or was when it went."""
        name = manifest["metadata"]["name"]
        for session in self.watched.note(kind, manifest, is_gone=is_gone):
            if kind in _MANY_CHANGES:
                self.queue.add_after(session, _GATHER_SECONDS)
            else:
                self.queue.add(session)
        if kind == "BaseModel":
            self._offers.add(name)
        elif kind == "TrainingSession":
            offering = self.watched.offering(manifest["spec"].get("baseModel", ""))
            if offering is not None:
                self._offers.add_after(offering["metadata"]["name"], _OFFER_SECONDS)
        if kind == "TrainingSession" and is_gone:
            for known in (self._answers, self._apply_errors, self._secrets):
                known.pop(name, None)

    async def resync(self) -> None:
        """List everything, and look at every session.

        Raises:
            ClusterError: something could not be listed; what was, counts.
        """
        self.has_kuberay = await self._cluster.serves("RayCluster")
        kinds = ["BaseModel", "TrainingSession", "Pod", *CHILD_KINDS]
        if not self.has_kuberay:
            kinds.remove("RayCluster")
        for kind in kinds:
            is_own = kind in {"BaseModel", "TrainingSession"}
            selector = "" if is_own else labels.SESSION_LABEL
            await self._list(kind, selector)
        for name in self.watched.sessions:
            self.queue.add(name)
        for name in self.watched.base_models:
            self._offers.add(name)
        self._is_complete.set()

    async def _list(self, kind: str, selector: str) -> None:
        kept: list[Manifest] = []
        version = 0
        async for page in self._cluster.pages(kind, selector):
            kept += [seen.slim(kind, item) for item in page.items]
            version = page.version
        self.watched.replace(kind, kept, version)

    async def work(self) -> None:
        """Look at sessions as they come, without end; several of these run at once."""
        await self._is_complete.wait()
        while True:
            name = await self.queue.take()
            metrics.QUEUE_DEPTH.set(len(self.queue))
            try:
                with metrics.RECONCILE_SECONDS.time():
                    await self._look_at(name)
            except ClusterError as error:
                metrics.RECONCILES.labels("retried").inc()
                log.warning("will look again", session=name, error=str(error))
                self.queue.failed(name)
            except Exception:
                metrics.RECONCILES.labels("failed").inc()
                log.exception("will look again", session=name)
                self.queue.failed(name)
            else:
                metrics.RECONCILES.labels("done").inc()
                self.queue.done(name)

    async def work_on_offers(self) -> None:
        """Keep the status of BaseModels, without end."""
        await self._is_complete.wait()
        while True:
            name = await self._offers.take()
            try:
                await self._write_offer(name)
            except ClusterError as error:
                log.warning("will look again", base_model=name, error=str(error))
                self._offers.failed(name)
            except Exception:
                log.exception("will look again", base_model=name)
                self._offers.failed(name)
            else:
                self._offers.done(name)

    async def _write_offer(self, name: str) -> None:
        self._count_sessions()
        base_model = self.watched.base_models.get(name)
        if base_model is None:
            return
        model_name = base_model["spec"].get("modelName", "")
        offering, sessions = self.watched.offering(model_name), self.watched.sessions_of(model_name)
        status = offer_status(base_model, offering, sessions, datetime.now(UTC))
        content = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if content != base_model.get("status"):
            await self._apply_status("BaseModel", name, base_model["metadata"]["uid"], content)

    async def _look_at(self, name: str) -> None:
        for _ in range(_MAX_ROUNDS):
            observed = await self._observe(name)
            if observed is None:
                return
            plan = reconcile(observed, self._settings)
            if plan.look_again_seconds is not None:
                self.queue.add_after(name, plan.look_again_seconds)
            if not await self._execute(observed, plan):
                return

    async def _observe(self, name: str) -> Observed | None:
        surroundings = Surroundings(
            has_secret=True,
            has_kuberay=self.has_kuberay,
            nodes=None,
            apply_error=self._apply_errors.get(name),
            answers=self._answers.get(name, frozenset()),
            now=datetime.now(UTC),
        )
        observed = self.watched.observed(name, surroundings)
        if observed is None or observed.deleted is not None:
            return observed
        is_unschedulable = any(pod.trouble and not pod.is_scheduled for pod in observed.pods)
        return replace(
            observed,
            has_secret=await self._has_secret(observed),
            nodes=await self._all_nodes() if is_unschedulable else None,
        )

    async def _has_secret(self, observed: Observed) -> bool:
        """Whether the Secret is there; it can't be watched without the right to read all others."""
        uid, seen_at = self._secrets.get(observed.name, ("", 0.0))
        moment = asyncio.get_running_loop().time()
        if uid == observed.uid and moment - seen_at < self._settings.resync_seconds:
            return True
        if not observed.children:
            # They are made together; creating it tells whether it is there all the same.
            return False
        try:
            secret = await self._cluster.get(_secret_of(observed))
        except NotThere:
            return False
        if not _is_owned(secret, observed):
            return False
        self._secrets[observed.name] = (observed.uid, moment)
        return True

    async def _all_nodes(self) -> tuple[Node, ...] | None:
        listed_at, nodes = self._nodes
        moment = asyncio.get_running_loop().time()
        if not self._settings.judges_nodes or moment - listed_at < _NODES_SECONDS:
            return nodes
        try:
            listed = [item async for page in self._cluster.pages("Node") for item in page.items]
            nodes = tuple(map(seen.node, listed))
        except Refused:
            nodes = None
        self._nodes = (moment, nodes)
        return nodes

    async def _execute(self, observed: Observed, plan: Plan) -> bool:
        """Carry a plan out; return whether the session is to be looked at again at once.

        Raises:
            ClusterError: something could not be done. If it was refused, the status says so.
        """
        again, refusal = False, None
        for _, actions in groupby(plan.actions, _step):
            done = await asyncio.gather(
                *(self._do(observed, action) for action in actions), return_exceptions=True
            )
            refusal = _first_refusal(done)
            if refusal is not None:
                again |= self._apply_errors.get(observed.name) != str(refusal)
                self._apply_errors[observed.name] = str(refusal)
                break
            again |= any(done)
        else:
            again |= self._apply_errors.pop(observed.name, None) is not None
        if plan.status is not None and not again:
            await self._write_status(observed, plan.status)
        if refusal is not None and not again:
            raise refusal
        return again

    async def _do(self, observed: Observed, action: Action) -> bool:
        match action:
            case Apply(manifest):
                applied = await self._cluster.apply(manifest)
                self.note(manifest["kind"], applied, is_gone=False)
            case CreateSecret():
                await self._create_secret(observed, action)
            case Delete(key):
                await self._cluster.delete(ObjectRef(key.kind, key.name))
            case AskHead():
                return await self._ask(observed, action)
            case HoldFinalizer(held):
                await self._hold_finalizer(observed, held=held)
            case DeleteSession():
                await self._cluster.delete(ObjectRef("TrainingSession", observed.name))
            case Announce():
                await self._announce(observed, action)
        return False

    async def _create_secret(self, observed: Observed, action: CreateSecret) -> None:
        token = base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
        data = dict.fromkeys(action.token_keys, token)
        try:
            await self._cluster.create({**action.manifest, "data": data})
        except Conflict:
            if not _is_owned(await self._cluster.get(_secret_of(observed)), observed):
                raise Refused(
                    f"Secret {action.manifest['metadata']['name']} is not this session's: it"
                    " belongs to an earlier one of this name that is still going, or to somebody"
                    " else; it is tried again"
                ) from None
        moment = asyncio.get_running_loop().time()
        self._secrets[observed.name] = (observed.uid, moment)

    async def _ask(self, observed: Observed, action: AskHead) -> bool:
        answer = await self._heads.ask(observed.name, action)
        if answer is None:
            return False
        known = self._answers.get(observed.name, frozenset())
        self._answers[observed.name] = known | {(action.what, action.incarnation)}
        if answer.latest_checkpoint is not None:
            update = {"latest_checkpoint": answer.latest_checkpoint}
            await self._write_status(observed, observed.status.model_copy(update=update))
        return True

    async def _hold_finalizer(self, observed: Observed, *, held: bool) -> None:
        # With the uid, applying can't make a session anew that is gone by now.
        metadata = {"name": observed.name, "uid": observed.uid}
        finalizers = {"finalizers": [labels.FINALIZER]} if held else {}
        applied = await self._cluster.apply(
            {
                "apiVersion": labels.API_VERSION,
                "kind": "TrainingSession",
                "metadata": {**metadata, **finalizers},
            }
        )
        self.watched.note("TrainingSession", applied)

    async def _write_status(self, observed: Observed, status: TrainingSessionStatus) -> None:
        content = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        await self._apply_status("TrainingSession", observed.name, observed.uid, content)
        if _became_ready(observed, status):
            age = (datetime.now(UTC) - observed.created).total_seconds()
            metrics.READY_SECONDS.observe(age)

    async def _apply_status(self, kind: str, name: str, uid: str, content: Manifest) -> None:
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": kind,
            "metadata": {"name": name, "uid": uid},
            "status": content,
        }
        try:
            self.watched.note(kind, await self._cluster.apply_status(manifest))
        except NotThere:
            log.debug("gone before its status was written", kind=kind, name=name)

    async def _announce(self, observed: Observed, action: Announce) -> None:
        """Post an Event; one with the same content, as long as it is kept, is the same Event."""
        content = f"{observed.uid}/{action.reason}/{action.message}"
        name = f"{observed.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        try:
            await self._cluster.create(_event(observed, action, name))
        except (Conflict, Refused):
            log.debug("no new Event", session=observed.name, reason=action.reason)

    def _count_sessions(self) -> None:
        metrics.SESSIONS.clear()
        statuses = [item.get("status", {}) for item in self.watched.sessions.values()]
        for status in statuses:
            metrics.SESSIONS.labels(status.get("phase", "Pending")).inc()
        metrics.SESSION_GPUS.set(sum(status.get("gpus", 0) for status in statuses))


def _secret_of(observed: Observed) -> ObjectRef:
    return ObjectRef("Secret", Names(observed.name).token_secret)


def _is_owned(manifest: Manifest, observed: Observed) -> bool:
    owners = manifest["metadata"].get("ownerReferences", [])
    return any(owner["uid"] == observed.uid for owner in owners)


def _step(action: Action) -> str | int:
    """Return what tells actions that may be done at once, with others, from those that follow.

    Pods come after all that they are told and bound by. The head's Service may come with them: it
    costs most, since the API server gives out cluster addresses one at a time.
    """
    if isinstance(action, Apply) and action.manifest["kind"] in {"RayCluster", "Service"}:
        return "pods"
    if isinstance(action, Apply | CreateSecret):
        return "what pods need"
    return id(action)


def _first_refusal(results: Sequence[bool | BaseException]) -> Refused | None:
    """Return what was refused, if anything; raise what failed for another reason."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, Refused):
            raise error
    return next((error for error in errors if isinstance(error, Refused)), None)


def _became_ready(observed: Observed, status: TrainingSessionStatus) -> bool:
    now = find(status.conditions, ConditionType.READY)
    is_first = observed.status.incarnation is None
    return is_first and now is not None and now.status == "True"


def _event(observed: Observed, action: Announce, name: str) -> dict[str, Any]:
    moment = timestamp(observed.now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": observed.namespace},
        "involvedObject": {
            "apiVersion": labels.API_VERSION,
            "kind": "TrainingSession",
            "name": observed.name,
            "namespace": observed.namespace,
            "uid": observed.uid,
        },
        "reason": action.reason,
        "message": action.message[:1024],
        "type": "Warning" if action.is_warning else "Normal",
        "source": {"component": labels.OPERATOR_FIELD_MANAGER},
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
