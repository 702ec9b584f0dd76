"""Reconciles sessions: observes them, calls `reconcile`, and executes the plan."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import Reason
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError, Rejected
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator import metrics
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.run.cluster.executor import Executor
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.node_taints import NodeTaints
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.cluster.served_definitions import REQUIRED_KINDS, ServedDefinitions
from tinkercloud_operator.run.cluster.session_children import CHILD_KINDS
from tinkercloud_operator.run.cluster.work_queue import WorkQueue
from tinkercloud_operator.run.engine_scaling import EngineScaling
from tinkercloud_operator.run.gauges import count_sessions
from tinkercloud_operator.run.pool.base_models import BaseModels
from tinkercloud_operator.run.pool.pool_memory import PoolMemory
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares
from tinkercloud_operator.run.pool.tenant_runner import Tenants
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import Answers, Node, Observed, Platform, PoolPlace

log = structlog.get_logger(__name__)

_MANY_CHANGES = frozenset({"Pod", "RayCluster"})
_GATHER_SECONDS = 1.0
"""Time during which changes of pods, which come in bursts, are collected before their session is
reconciled: each reconciliation may write a status. The last change of a burst, which makes all
pods Ready, is not delayed."""
_NODES_SECONDS = 60.0
"""How long a list of nodes is cached."""
_DEFINITIONS_SECONDS = 30.0
"""Interval between two checks of the served CRDs."""
_COUNT_SECONDS = 15.0
"""Interval between two updates of the session metrics."""
_OPTIONAL_KINDS = ("RayCluster", "ResourceClaimTemplate", "Tenant")
"""Kinds whose API may be added or removed while the operator runs."""
_MAX_ROUNDS = 4
"""Maximum number of immediate reconciliations when a rejection changes the status."""


class DefinitionsMissing(KubernetesError):
    """The CRDs of our own resources are not installed."""


class Controller:
    """The caches and workers of one term of leadership. Belongs to one event loop."""

    def __init__(self, cluster: Client, head_client: HeadClient, settings: Settings) -> None:
        self.watched = Watched(settings.starts_in_order)
        self.queue = WorkQueue()
        self.served = frozenset({*REQUIRED_KINDS, *_OPTIONAL_KINDS})
        """Custom and optional kinds that the cluster serves."""
        self.needs_resync = asyncio.Event()
        """Set when a deletion may have been missed; a resync clears it."""
        self._live_watches: set[str] = set()
        """Kinds whose watches have delivered events after their initial list."""
        self._is_complete = asyncio.Event()
        """Set after the first complete list; the operator must not act on partial data."""
        self._cluster = cluster
        self._head_saver = HeadSaver(head_client, self._note_saved)
        self._definitions = ServedDefinitions(cluster)
        self._executor = Executor(
            cluster, self._head_saver, self.note, self._note_own, self._definitions.storable
        )
        self._spares = Spares(self.watched, cluster, self.note, self.queue.add)
        self._pools = Pools(
            self.watched,
            cluster,
            self._head_saver,
            self.note,
            self.queue.add,
            spares=self._spares,
            memory=PoolMemory(head_client),
        )
        self._base_models = BaseModels(self.watched, self._executor, self._pools, self._spares)
        self._tenants = Tenants(self.watched, self._executor)
        self._engines = EngineScaling(self.watched, head_client, self.queue)
        self._settings = settings
        self._nodes: tuple[float, tuple[Node, ...] | None] = (float("-inf"), None)
        self._node_taints = NodeTaints(cluster)
        self._unready: str | None = "the initial list is not complete"

    def unready(self) -> str | None:
        """Return why sessions are not being reconciled; None if they are."""
        return self._unready

    @property
    def has_kuberay(self) -> bool:
        """Whether the cluster serves the RayCluster API."""
        return "RayCluster" in self.served

    def on_event(self, kind: str, event_type: str | None, manifest: Manifest) -> None:
        """Record a watch event; events of a watch's initial list have no type.

        The initial list of a restarted watch shows existing objects, but not deletions in the
        meantime.
        """
        if event_type is not None:
            self._live_watches.add(kind)
        elif kind in self._live_watches:
            self.needs_resync.set()
        self.note(kind, manifest, is_gone=event_type == "DELETED")

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool = False) -> None:
        """Record the current, or for a deletion the last, state of an object."""
        affected = self.watched.note(kind, manifest, is_gone=is_gone)
        own = {manifest["metadata"]["name"]} if kind == "TrainingSession" else set()
        for session in affected | own:
            self._engines.note(session)
        for session in affected:
            if kind in _MANY_CHANGES and not self.watched.children.has_only_ready_pods(session):
                self.queue.add_after(session, _GATHER_SECONDS)
            else:
                self.queue.add(session)
        self._base_models.note(kind, manifest)
        self._tenants.note(kind, manifest)
        self._pools.note(kind, manifest, is_gone=is_gone)
        if kind == "TrainingSession" and is_gone:
            self._executor.forget(manifest["metadata"]["name"])
            self._head_saver.forget(manifest["metadata"]["name"])

    def _note_own(self, kind: str, manifest: Manifest) -> None:
        """Record one of our own objects after a write of its status or finalizer.

        The write itself needs no reconciliation. But somebody else may have changed the object
        since it was observed, and then the watch event is older than what is recorded here.
        """
        known = self.watched.own(kind).get(manifest["metadata"]["name"])
        affected = self.watched.note(kind, manifest)
        if kind == "TrainingSession":
            self._engines.note(manifest["metadata"]["name"])
        if known is not None and _is_changed_by_others(known, manifest):
            for session in affected:
                self.queue.add(session)

    def _note_saved(self, session: str) -> None:
        """Record that a head has completed a request for a session."""
        self.queue.add(session)
        self._pools.note_saved(session)

    async def resync(self) -> None:
        """List all objects and enqueue every session.

        Raises:
            DefinitionsMissing: the CRDs of our own resources are not installed.
            KubernetesError: a kind could not be listed; the kinds listed before are updated.
        """
        kinds = (*REQUIRED_KINDS, *_OPTIONAL_KINDS)
        self.served = frozenset([kind for kind in kinds if await self._cluster.serves(kind)])
        self._require_definitions()
        await self._definitions.refresh()
        # Tenants first: a session must not start before its limits are known.
        for kind in ("Tenant", *REQUIRED_KINDS, "Pod", *CHILD_KINDS):
            if kind in _OPTIONAL_KINDS and kind not in self.served:
                continue
            is_own = kind in {"Tenant", *REQUIRED_KINDS}
            of_pods = {"Pod": labels.COMPONENT_LABEL}
            selector = "" if is_own else of_pods.get(kind, labels.SESSION_LABEL)
            await self._list(kind, selector)
        for name in self.watched.sessions:
            self.queue.add(name)
        self._engines.note_all()
        self._base_models.enqueue_all()
        self._tenants.enqueue_all()
        self._pools.enqueue_all()
        self._is_complete.set()
        self._unready = None

    def _require_definitions(self) -> None:
        missing = [kind for kind in REQUIRED_KINDS if kind not in self.served]
        if missing:
            self._unready = (
                f"the CRDs of {' and '.join(missing)} ({labels.API_VERSION}) are not installed;"
                " install the chart tinkercloud-crds"
            )
            raise DefinitionsMissing(self._unready)

    async def _list(self, kind: str, selector: str) -> None:
        kept: list[Manifest] = []
        version = 0
        async for page in self._cluster.pages(kind, selector):
            kept += [parsing.slim(kind, item) for item in page.items]
            version = page.version
        self.watched.replace(kind, kept, version)

    async def work(self) -> None:
        """Reconcile sessions from the queue, forever; several workers run concurrently."""
        await self._is_complete.wait()
        while True:
            name = await self.queue.take()
            metrics.QUEUE_DEPTH.set(len(self.queue))
            try:
                with metrics.RECONCILE_SECONDS.time():
                    await self._reconcile(name)
            except KubernetesError as error:
                metrics.RECONCILES.labels("retried").inc()
                log.warning("reconciliation failed; retrying", session=name, error=str(error))
                self.queue.failed(name)
            except Exception:
                metrics.RECONCILES.labels("failed").inc()
                log.exception("reconciliation failed unexpectedly; retrying", session=name)
                self.queue.failed(name)
            else:
                metrics.RECONCILES.labels("done").inc()
                self.queue.done(name)

    async def save_heads(self) -> None:
        """Send save requests to heads, forever."""
        await self._head_saver.work()

    async def scale_engines(self) -> None:
        """Ask heads how many engines they need, forever."""
        await self._is_complete.wait()
        await self._engines.work()

    async def watch_definitions(self) -> None:
        """Check the served CRDs periodically, and resync if they have changed."""
        await self._is_complete.wait()
        while True:
            await asyncio.sleep(_DEFINITIONS_SECONDS)
            try:
                if await self._definitions.refresh():
                    self.needs_resync.set()
            except KubernetesError as error:
                log.info("could not read the served CRDs; retrying", error=str(error))

    async def watch_nodes(self) -> None:
        """Enqueue sessions with pods on nodes whose taints change.

        Returns if the operator may not list nodes.
        """
        await self._is_complete.wait()
        async for changed in self._node_taints.changes():
            self._pools.note_cordons(self._node_taints.cordoned)
            for name in self.watched.children.with_pods_on(changed):
                self.queue.add(name)

    async def count(self) -> None:
        """Update the session metrics periodically; reset them at the end of the term."""
        await self._is_complete.wait()
        try:
            while True:
                count_sessions(self.watched.sessions.values(), datetime.now(UTC))
                await asyncio.sleep(_COUNT_SECONDS)
        finally:
            count_sessions((), datetime.now(UTC))

    async def work_on_base_models(self) -> None:
        """Maintain the status of BaseModels, forever."""
        await self._is_complete.wait()
        await self._base_models.work()

    async def work_on_tenants(self) -> None:
        """Maintain the status of Tenants, forever."""
        await self._is_complete.wait()
        await self._tenants.work()

    async def work_on_pools(self) -> None:
        """Maintain the pools of BaseModels, forever."""
        await self._is_complete.wait()
        await self._pools.work()

    async def _reconcile(self, name: str) -> None:
        for _ in range(_MAX_ROUNDS):
            self._admit(name)
            observed = await self._observe(name)
            if observed is None:
                return
            plan = reconcile(observed, self._settings)
            is_changed = await self._executor.execute(observed, plan)
            # A failed reconciliation does not get here: the queue retries it with backoff.
            if plan.requeue_after_seconds is not None:
                self.queue.add_after(name, plan.requeue_after_seconds)
            if not is_changed:
                return

    def _admit(self, name: str) -> None:
        """Reserve what a session needs to start, before it is decided whether it starts."""
        self.watched.admit(name)
        self._spares.promise(name)

    async def _observe(self, name: str) -> Observed | None:
        observed = self.watched.observed(
            name,
            pool=PoolPlace(
                cluster=self.watched.pool_cluster(name),
                message=self._pools.waiting_message(name),
                move_failure=self._pools.move_failure(name),
                takes_spare=self._spares.is_promised(name),
                is_emptied=self._pools.is_emptied(name),
            ),
            platform=Platform(
                has_kuberay=self.has_kuberay,
                has_device_claims="ResourceClaimTemplate" in self.served,
                kuberay_gap=self._definitions.kuberay_gap,
                own_gap=self._definitions.own_gaps.get("TrainingSession"),
                node_taints=self._node_taints.by_node,
            ),
            answers=Answers(
                apply_error=self._executor.rejection(name),
                completed_saves=self._head_saver.completed(name),
                pending_saves=self._head_saver.pending(name),
                failed_saves=self._head_saver.failed(name),
                engines_needed=self._engines.needed(name),
            ),
            now=datetime.now(UTC),
        )
        if observed is None or observed.session.deleted is not None:
            return observed
        problems = [pod.problem.reason for pod in observed.pods.required if pod.problem is not None]
        if Reason.UNSCHEDULABLE in problems:
            platform = replace(observed.platform, nodes=await self._all_nodes())
            return replace(observed, platform=platform)
        return observed

    async def _all_nodes(self) -> tuple[Node, ...] | None:
        listed_at, nodes = self._nodes
        moment = asyncio.get_running_loop().time()
        if not self._settings.judges_nodes or moment - listed_at < _NODES_SECONDS:
            return nodes
        try:
            listed = [item async for page in self._cluster.pages("Node") for item in page.items]
            nodes = tuple(map(parsing.node, listed))
        except Rejected:
            nodes = None
        self._nodes = (moment, nodes)
        return nodes


def _is_changed_by_others(known: Manifest, now: Manifest) -> bool:
    """Whether an object differs in what the operator's own writes of it do not change."""
    fields = ("generation", "deletionTimestamp", "annotations")
    return any(known["metadata"].get(each) != now["metadata"].get(each) for each in fields)
