"""Looks at sessions: observes, asks `reconcile` what to do, has it done."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from tinkercloud_crds import labels
from tinkercloud_operator import metrics, seen
from tinkercloud_operator.base_models import BaseModels
from tinkercloud_operator.cluster import Cluster, ClusterError, Refused
from tinkercloud_operator.executor import Executor
from tinkercloud_operator.heads import Heads
from tinkercloud_operator.observed import Manifest, Node, Observed
from tinkercloud_operator.questions import Questions
from tinkercloud_operator.queue import WorkQueue
from tinkercloud_operator.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.watched import CHILD_KINDS, Surroundings, Watched

log = structlog.get_logger(__name__)

_MANY_CHANGES = frozenset({"Pod", "RayCluster"})
_GATHER_SECONDS = 1.0
"""For how long changes of pods, which come in bursts, are gathered before their session is looked
at: each look may write a status. The last of a burst, by which all pods are Ready, is not held
back."""
_NODES_SECONDS = 60.0
"""How long a list of nodes is good."""
_MAX_ROUNDS = 4
"""Times a session is looked at in a row when what is refused changes what there is to say."""


class Controller:
    """One term of leadership: everything it has seen, and its workers. Belongs to one loop."""

    def __init__(self, cluster: Cluster, heads: Heads, settings: Settings) -> None:
        self.watched = Watched()
        self.queue = WorkQueue()
        self.has_kuberay = True
        self.has_device_claims = True
        self.needs_resync = asyncio.Event()
        """Set when something may have gone without a word; whoever lists everything clears it."""
        self._heard: set[str] = set()
        """Kinds whose watches have told more than what was there when they began."""
        self._is_complete = asyncio.Event()
        """Whether everything has been listed once: half of a picture must not be acted on."""
        self._cluster = cluster
        self._questions = Questions(heads, self.queue.add)
        self._executor = Executor(cluster, self._questions, self.note, self.watched.note)
        self._base_models = BaseModels(self.watched, self._executor)
        self._settings = settings
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

    def note(self, kind: str, manifest: Manifest, *, is_gone: bool = False) -> None:
        """Take note of how an object is, or was when it went."""
        for session in self.watched.note(kind, manifest, is_gone=is_gone):
            if kind in _MANY_CHANGES and not self.watched.has_only_ready_pods(session):
                self.queue.add_after(session, _GATHER_SECONDS)
            else:
                self.queue.add(session)
        self._base_models.note(kind, manifest)
        if kind == "TrainingSession" and is_gone:
            self._executor.forget(manifest["metadata"]["name"])
            self._questions.forget(manifest["metadata"]["name"])

    async def resync(self) -> None:
        """List everything, and look at every session.

        Raises:
            ClusterError: something could not be listed; what was, counts.
        """
        self.has_kuberay = await self._cluster.serves("RayCluster")
        self.has_device_claims = await self._cluster.serves("ResourceClaimTemplate")
        kinds = ["BaseModel", "TrainingSession", "Pod", *CHILD_KINDS]
        if not self.has_kuberay:
            kinds.remove("RayCluster")
        if not self.has_device_claims:
            kinds.remove("ResourceClaimTemplate")
        for kind in kinds:
            is_own = kind in {"BaseModel", "TrainingSession"}
            selector = "" if is_own else labels.SESSION_LABEL
            await self._list(kind, selector)
        for name in self.watched.sessions:
            self.queue.add(name)
        self._base_models.look_at_all()
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

    async def ask_heads(self) -> None:
        """Have heads save what they hold, without end."""
        await self._questions.work()

    async def work_on_base_models(self) -> None:
        """Keep the status of BaseModels, without end."""
        await self._is_complete.wait()
        await self._base_models.work()

    async def _look_at(self, name: str) -> None:
        for _ in range(_MAX_ROUNDS):
            observed = await self._observe(name)
            if observed is None:
                return
            plan = reconcile(observed, self._settings)
            is_news = await self._executor.execute(observed, plan)
            # What failed is tried again later and later, not at the time of a plan that did not.
            if plan.look_again_seconds is not None:
                self.queue.add_after(name, plan.look_again_seconds)
            if not is_news:
                return

    async def _observe(self, name: str) -> Observed | None:
        surroundings = Surroundings(
            has_kuberay=self.has_kuberay,
            has_device_claims=self.has_device_claims,
            starts_in_order=self._settings.starts_in_order,
            nodes=None,
            apply_error=self._executor.refusal(name),
            answers=self._questions.answers(name),
            asked=self._questions.asked(name),
            now=datetime.now(UTC),
        )
        observed = self.watched.observed(name, surroundings)
        if observed is None or observed.deleted is not None:
            return observed
        if any(pod.trouble and not pod.is_scheduled for pod in observed.pods):
            return replace(observed, nodes=await self._all_nodes())
        return observed

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
