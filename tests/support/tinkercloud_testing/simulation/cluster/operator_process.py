"""A process of the operator: the real controller, started, killed and started again."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

from tinkercloud_crds import labels
from tinkercloud_operator.run.cluster.session_children import CHILD_KINDS
from tinkercloud_operator.run.cluster.work_queue import WorkQueue
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.run.term import resync, workers_of
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.simulation.cluster.api_server import ApiServer, EventType, Json, has_label
from tinkercloud_testing.simulation.cluster.connection import (
    Network,
    SimulatedClient,
    SimulatedHeadClient,
)

_begin = WorkQueue.__init__
_KINDS = ("TrainingSession", "BaseModel", "Tenant", "Pod", *CHILD_KINDS)
SETTINGS = Settings(max_concurrent=4, api_url="http://api.default.svc:80")


def _is_watched(kind: str, manifest: Json) -> bool:
    if kind in {"TrainingSession", "BaseModel", "Tenant"}:
        return True
    return has_label(manifest, labels.COMPONENT_LABEL if kind == "Pod" else labels.SESSION_LABEL)


class Watches:
    """The watches of one process: late, with several changes of an object as one, or broken."""

    def __init__(self, server: ApiServer, controller: Controller, rng: random.Random) -> None:
        """Create watches that have not started."""
        self.longest_delay = 0.2
        """In seconds."""
        self._server = server
        self._controller = controller
        self._random = rng
        self._changes: dict[str, dict[tuple[str, str], tuple[EventType, Json]]] = {}
        """By kind: the last change of each object that has not arrived."""
        self._some: dict[str, asyncio.Event] = {}
        self._broken: set[str] = set()

    def start(self) -> list[Coroutine[Any, Any, None]]:
        """Return what delivers the changes of each kind."""
        self._server.subscribers.append(self._note)
        for kind in _KINDS:
            self._changes[kind], self._some[kind] = {}, asyncio.Event()
            self._list(kind)
        return [self._deliver(kind) for kind in _KINDS]

    def stop(self) -> None:
        """Deliver nothing any more."""
        self._server.subscribers.remove(self._note)

    def break_off(self) -> None:
        """Lose all changes until `reconnect`."""
        self._broken = set(_KINDS)

    def reconnect(self) -> None:
        """List everything again: deletions in the meantime are not seen."""
        for kind in _KINDS:
            if kind in self._broken:
                self._changes[kind].clear()
                self._list(kind)
        self._broken = set()

    def _list(self, kind: str) -> None:
        for manifest in self._server.all(kind):
            if _is_watched(kind, manifest):
                self._controller.on_event(kind, None, manifest)

    def _note(self, kind: str, event: EventType, manifest: Json) -> None:
        if kind not in self._changes or kind in self._broken or not _is_watched(kind, manifest):
            return
        key = (manifest["metadata"]["name"], manifest["metadata"]["uid"])
        # A later change of the same object takes the place of one that has not arrived.
        self._changes[kind].pop(key, None)
        self._changes[kind][key] = (event, manifest)
        self._some[kind].set()

    async def _deliver(self, kind: str) -> None:
        while True:
            await self._some[kind].wait()
            await asyncio.sleep(self._random.uniform(0.001, self.longest_delay))
            self._some[kind].clear()
            arrived = [*self._changes[kind].values()]
            self._changes[kind].clear()
            for event, manifest in arrived:
                self._controller.on_event(kind, event, manifest)


class OperatorProcess:
    """The operator's deployment: at most one process at a time.

    Args:
        network: the connection to the API server.
        answer: lets a head answer; see `SimulatedHeadClient`.
        rng: for the choices of the simulation.
        fail: called with an error that ends a task of the operator.
    """

    def __init__(
        self,
        network: Network,
        answer: Callable[[str, str, str], Any],
        rng: random.Random,
        fail: Callable[[str], object],
    ) -> None:
        self._network = network
        self._answer = answer
        self._random = rng
        self._fail = fail
        self._tasks: list[asyncio.Task[None]] = []
        self.writes_left: int | None = None
        self.watches: Watches | None = None
        self.controller: Controller | None = None
        network.on_write = self._note_write

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self.controller is not None

    def start(self) -> None:
        """Start a process, unless there is one."""
        if self.is_running:
            return
        cluster = SimulatedClient(self._network)
        with patch.object(WorkQueue, "__init__", _begin_in_order):
            controller = Controller(cluster, SimulatedHeadClient(cluster, self._answer), SETTINGS)
        self.controller = controller
        self.watches = Watches(self._network.server, controller, self._random)
        parts = [
            resync(controller, asyncio.Event(), SETTINGS),
            *(work for _, work in workers_of(controller, SETTINGS)),
            *self.watches.start(),
        ]
        self._tasks = [asyncio.create_task(self._guard(part)) for part in parts]

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:  # noqa: BLE001 - a crash of the operator is what is looked for
            self._fail(f"a task of the operator ended: {type(error).__name__}: {error}")

    async def kill(self) -> None:
        """Kill the process; its requests that are on their way still arrive."""
        if self.watches is not None:
            self.watches.stop()
        self.controller = self.watches = self.writes_left = None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill_after(self, writes: int) -> None:
        """Kill the process right after so many more writes, before it gets the last answer."""
        self.writes_left = writes

    def _note_write(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left <= 0:
                self.writes_left = None
                self.killing = asyncio.get_running_loop().create_task(self.kill())


def _begin_in_order(queue: WorkQueue) -> None:
    """Create a queue whose workers take names in alphabetical order.

    Names are often queued in the order of a set, which differs from one Python process to another.
    """
    _begin(queue)
    queue._ready = asyncio.PriorityQueue()
