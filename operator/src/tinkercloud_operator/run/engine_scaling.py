"""Asks heads how many engines they need, and has their sessions reconciled when that changes.

One request to each head whose engines follow the load is always open; the head holds it until the
number of engines should change. An answer is valid for the head's process that gave it, and until
the number of engines has changed.
"""

import asyncio
from dataclasses import dataclass

import structlog

from tinkercloud_crds.conditions import ConditionType
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pods.engine_pods import existing_engines, is_scaled
from tinkercloud_operator.decide.read.session_facts import condition
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.work_queue import WorkQueue
from tinkercloud_protocol.heads.engine_scaling_settings import HOLD_SECONDS

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
"""First and longest pause after a request that failed."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A head, and how many engines it has."""

    url: str
    incarnation: str
    engines: int


class EngineScaling:
    """The numbers of engines that heads need. Belongs to one event loop.

    Args:
        watched: the known objects.
        client: sends requests to heads.
        sessions: queue of the sessions to reconcile.
    """

    def __init__(self, watched: Watched, client: HeadClient, sessions: WorkQueue) -> None:
        self._watched = watched
        self._client = client
        self._sessions = sessions
        self._changed: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        """Names in `_changed`."""
        self._running: dict[str, tuple[_Subject, asyncio.Task[None]]] = {}
        """The head of each session that is asked, and the task that asks it."""
        self._needed: dict[str, tuple[_Subject, int]] = {}
        """The last answer of each head whose number of engines should change."""

    def needed(self, session: str) -> int | None:
        """Return how many engines a session's head needs; None if that is as many as it has."""
        subject, number = self._needed.get(session, (None, None))
        return number if subject is not None and subject == self._subject(session) else None

    def note(self, session: str) -> None:
        """Record that a session or its RayCluster has changed."""
        is_concerned = session in self._running or self._subject(session) is not None
        if is_concerned and session not in self._queued:
            self._queued.add(session)
            self._changed.put_nowait(session)

    def note_all(self) -> None:
        """Record that any session may have changed, or is gone."""
        for session in {*self._running, *self._watched.sessions}:
            self.note(session)

    async def work(self) -> None:
        """Keep a request open to each head, forever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                name = await self._changed.get()
                self._queued.discard(name)
                self._update(name, tasks)

    def _update(self, name: str, tasks: asyncio.TaskGroup) -> None:
        subject = self._subject(name)
        before, task = self._running.get(name, (None, None))
        if subject == before:
            return
        if task is not None:
            task.cancel()
            del self._running[name]
            self._needed.pop(name, None)
        if subject is not None:
            self._running[name] = (subject, tasks.create_task(self._ask(name, subject)))

    def _subject(self, name: str) -> _Subject | None:
        """Return the head to ask; None if the session has no head, or a fixed number of engines."""
        cluster = self._watched.children.cluster_of(name)
        session = self._watched.sessions.get(name)
        if session is None or not is_scaled(cluster):
            return None
        status: Manifest = session.get("status", {})
        is_ready = condition(session, ConditionType.READY).get("status") == "True"
        if not is_ready or "endpoint" not in status or "incarnation" not in status:
            return None
        return _Subject(status["endpoint"], status["incarnation"], existing_engines(cluster))

    async def _ask(self, name: str, subject: _Subject) -> None:
        """Ask one head again and again; cancelled when the subject changes."""
        pause = _RETRY_SECONDS
        while True:
            # The head may use all of them again from here on.
            self._needed.pop(name, None)
            needed = await self._client.needed_engines(name, subject.url, subject.engines)
            if needed is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
                continue
            pause = _RETRY_SECONDS
            if needed == subject.engines:
                # Two operators that are alive for a moment end each other's calls.
                await asyncio.sleep(pause)
                continue
            log.info("a head needs another number of engines", session=name, engines=needed)
            self._needed[name] = (subject, needed)
            self._sessions.add(name)
            # The number of engines changes meanwhile, unless Kubernetes rejects it.
            await asyncio.sleep(HOLD_SECONDS)
