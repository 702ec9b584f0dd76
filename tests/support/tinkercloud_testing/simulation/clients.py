"""Simulated clients: they create sessions, train, and count the steps that were acknowledged.

They stand for programs with the SDK and for the API server that serves them.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_testing.simulation.cluster.api_server import ApiError, ApiServer, Json
from tinkercloud_testing.simulation.cluster.heads import Head
from tinkercloud_testing.simulation.store import Store

_ACTIVITY_SECONDS = labels.LAST_ACTIVITY_SECONDS


@dataclass(frozen=True)
class Run:
    """What a client asks for."""

    name: str
    """Name of the session; the run is named like it."""
    owner: str
    model_name: str
    is_shared: bool = False
    is_declared: bool = False

    def manifest(self, now: str) -> Json:
        """Return the TrainingSession, as the API server or a person creates it."""
        spec: Json = {"baseModel": self.model_name, "owner": self.owner, "lora": {"rank": 8}}
        if self.is_declared:
            return {"metadata": {"name": self.name}, "spec": spec}
        run = f"{self.name}:train:0"
        shared = {"sharing": "Shared"} if self.is_shared else {}
        annotations = {labels.CREATED_FOR: run, labels.LAST_ACTIVITY: now}
        metadata = {"name": self.name, "annotations": annotations}
        return {"metadata": metadata, "spec": {**spec, "modelId": run, "role": "Trainer", **shared}}


@dataclass
class Client:
    """One client and its run.

    Args:
        run: what it asks for.
        server: the API server.
        store: the checkpoint store.
        heads: the living heads, by incarnation.
        random: for the choices of the simulation.
        violate: called with what must never happen.
        pauses: cleared while all clients are silent.
    """

    run: Run
    server: ApiServer
    store: Store
    heads: dict[str, Head]
    random: random.Random
    violate: Callable[[str], object]
    pauses: asyncio.Event
    steps: int = 0
    """Steps that were acknowledged."""
    answers: int = 0
    """Number of acknowledgements, which a loss of steps does not lower."""
    is_created: bool = False
    is_silent: bool = False
    """Whether it sends nothing for now."""
    is_over: bool = False
    excused: list[str] = field(default_factory=list)
    """Losses that were announced as such."""
    uid: str | None = None
    model_id: str = ""
    _used_at: float = float("-inf")

    async def work(self) -> None:
        """Create the session, and train until it is gone."""
        created = self.server.create("TrainingSession", self.run.manifest(self._now()))
        self.uid = created["metadata"]["uid"]
        # Runs of a session that was created again with the same name are others.
        self.model_id = created["spec"].get("modelId", f"{self.uid}:train:0")
        while not self.is_over:
            await self.pauses.wait()
            if not self.is_silent:
                await self._use()
            await asyncio.sleep(self.random.uniform(1.0, 6.0))

    def session(self) -> Json | None:
        """Return its session, if it exists."""
        found = self.server.find("TrainingSession", self.run.name)
        return found if found is not None and found["metadata"]["uid"] == self.uid else None

    def is_served(self) -> bool:
        """Return whether its session is said to be ready."""
        session = self.session()
        return session is not None and "endpoint" in session.get("status", {})

    async def _use(self) -> None:
        session = self.session()
        if session is None or "finishedTime" in session.get("status", {}):
            self.is_over = True
            return
        if "deletionTimestamp" in session["metadata"]:
            return
        self._note_use(session)
        head = self._head(session)
        if head is None:
            return
        steps = await head.step(self.model_id, known=self.is_created)
        if steps is None:
            return
        self.is_created = True
        self.answers += 1
        if steps <= self.steps:
            self._note_loss(steps)
        self.steps = steps

    def _note_loss(self, steps: int) -> None:
        excuse = self.store.excuse(self.model_id, self.steps)
        lost = f"{self.run.name} lost steps {steps} to {self.steps}"
        if excuse is None:
            self.violate(lost)
        else:
            self.excused.append(f"{lost}: {excuse}")

    def _head(self, session: Json) -> Head | None:
        """Return the head that serves the run, as far as the API server knows.

        In a pool it is that of the run's cluster, although the status of the run may be older.
        """
        if "endpoint" not in session.get("status", {}):
            return None
        if session["metadata"].get("annotations", {}).get(labels.MOVING_TO):
            return None
        cluster = session["spec"].get("poolCluster")
        serving = session if cluster is None else self.server.find("TrainingSession", cluster)
        if serving is None:
            return None
        return self.heads.get(serving.get("status", {}).get("incarnation", ""))

    def _note_use(self, session: Json) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._used_at < _ACTIVITY_SECONDS:
            return
        self._used_at = now
        used: Json = {"metadata": {"annotations": {labels.LAST_ACTIVITY: self._now()}}}
        cluster = session["spec"].get("poolCluster")
        for name in filter(None, (self.run.name, cluster)):
            self.server.update("TrainingSession", name, used)

    def _now(self) -> str:
        return timestamp(self.server.clock.now())

    async def end(self) -> None:
        """Delete the session."""
        session = self.session()
        if session is not None:
            try:
                self.server.delete("TrainingSession", self.run.name, self.uid)
            except ApiError:
                return
