"""A simulated cluster with the operator in it, and how it comes to rest."""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Mapping
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_operator.decide.read.session_facts import condition
from tinkercloud_testing.simulation.clients import Client, Run
from tinkercloud_testing.simulation.cluster.api_server import ApiServer, Json
from tinkercloud_testing.simulation.cluster.connection import HeadUnreachable, Network
from tinkercloud_testing.simulation.cluster.heads import Head, HeadSpeed
from tinkercloud_testing.simulation.cluster.kuberay import KubeRay
from tinkercloud_testing.simulation.cluster.nodes import Nodes, component_of, session_of
from tinkercloud_testing.simulation.cluster.operator_process import OperatorProcess
from tinkercloud_testing.simulation.orphans import Orphans
from tinkercloud_testing.simulation.places import PlacesOnClusters
from tinkercloud_testing.simulation.store import Store
from tinkercloud_testing.simulation.virtual_time import Clock, VirtualLoop, until

_TICK_SECONDS = 0.5
"""Interval at which the simulated controllers look at what has changed."""
_SILENT_SECONDS = 10.0
"""Controllers also look after so long without a change, because of time-outs."""
QUIET_SECONDS = 400.0
"""Time without a write after which the API server is quiet: longer than a resync."""
_PATIENCE_SECONDS = 4 * 3600.0
"""Time in which everything must come to rest: longer than any deadline."""


class World:
    """Everything that a history happens to.

    Args:
        loop: the event loop.
        seed: of all choices.
        knows_owners: of `KubeRay`.
        speeds: how long heads take, by the beginning of their session's name.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        knows_owners: bool,
        speeds: Mapping[str, HeadSpeed] | None = None,
    ) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.clock = Clock(loop)
        """The operator's clock."""
        self.server = ApiServer(Clock(loop), random.Random(seed + 1))
        self.store = Store()
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.clients: list[Client] = []
        self.network = Network(loop, self.server, random.Random(seed + 2))
        self.nodes = Nodes(
            self.server,
            self.store,
            random.Random(seed + 3),
            self._speed,
            self.violate,
            self.note,
        )
        self.kuberay = KubeRay(self.server, knows_owners=knows_owners)
        self.operator = OperatorProcess(
            self.network, self._answer, random.Random(seed + 4), self.violate
        )
        self.orphans = Orphans(self.server, self.store, self.nodes.heads, self.note)
        self.clients_act = asyncio.Event()
        self.wait_longer = 0.0
        """Seconds that pass before the next event, in addition."""
        self._speeds = dict(speeds or {})
        self._tasks: list[asyncio.Task[None]] = []
        self._names = 0
        self.server.subscribers += [self._trace_change, PlacesOnClusters(self.server, self.violate)]

    def start(self) -> None:
        """Start the operator and the simulated controllers."""
        self.clients_act.set()
        self.operator.start()
        self.background(self._control())
        self.background(self.orphans.drop())

    # What is recorded.

    def note(self, what: str) -> None:
        """Record what happens."""
        self.trace.append(f"{self.loop.time():9.2f} {what}")

    def violate(self, what: str) -> None:
        """Record what must never happen."""
        self.note(f"VIOLATION {what}")
        self.violations.append(f"{self.loop.time():.2f} {what}")

    def _trace_change(self, kind: str, event: str, manifest: Json) -> None:
        metadata = manifest["metadata"]
        if (kind, event) == ("RayCluster", "DELETED") and self.network.is_writing:
            self._note_stop(metadata)
        if kind in {"TrainingSession", "RayCluster", "Pod", "Node"}:
            detail = _summary(kind, manifest)
            line = f"{event.lower()} {kind} {metadata['name']} {metadata['resourceVersion']}"
            self.note(f"  {line} {detail}")

    def _note_stop(self, cluster: Json) -> None:
        """Note that the operator deletes a RayCluster of a session that has unlimited time."""
        session = self.server.find("TrainingSession", cluster["name"])
        if session is None or "deletionTimestamp" in session["metadata"]:
            return
        stops = condition(session, ConditionType.SUSPENDED)
        is_limited = stops.get("reason") == Reason.DISRUPTED or "failing" in session["status"]
        if not is_limited and "poolCluster" not in session["spec"]:
            self.nodes.to_be_saved.add(cluster["uid"])

    # What others do.

    async def _control(self) -> None:
        changed = asyncio.Event()
        self.server.subscribers.append(lambda *_: changed.set())
        while True:
            changed.clear()
            self.kuberay.sync()
            self.nodes.schedule()
            self.nodes.sync(self.loop.time())
            self.server.collect_garbage()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_SECONDS):
                    await changed.wait()
            await asyncio.sleep(_TICK_SECONDS)

    async def _answer(self, method: str, session: str, path: str) -> bytes:
        """Let a head answer that the Service of a session leads to."""
        if self.server.find("Service", f"{session}-head") is None:
            raise HeadUnreachable(f"{session}-head does not resolve")
        living = self.nodes.living(session)
        ready = [each for each in living if each.is_ready]
        if not living:
            raise HeadUnreachable(f"{session}-head: connection refused")
        head: Head = self.random.choice(ready or living)
        self.note(f"  {method} {path} to head {head.incarnation}")
        return await head.answer(method, path)

    def _speed(self, session: str) -> HeadSpeed:
        for prefix, speed in self._speeds.items():
            if session.startswith(prefix):
                return speed
        rng = self.nodes.random
        return HeadSpeed(load=rng.uniform(5, 40), save=rng.choice([0.5, 5.0, 20.0, 90.0]), step=0.5)

    # What histories use.

    def add_client(self, run: Run) -> Client:
        """Add a client, which creates its session at once."""
        client = Client(
            run,
            self.server,
            self.store,
            self.nodes.heads,
            random.Random(self.random.random()),
            self.violate,
            self.clients_act,
        )
        self.clients.append(client)
        self._tasks.append(asyncio.create_task(client.work()))
        return client

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something during the history."""
        self._tasks.append(asyncio.create_task(work))

    def next_name(self, prefix: str) -> str:
        """Return a name that no session has had."""
        self._names += 1
        return f"{prefix}-{self._names}"

    def pods(self, component: str | None = None, session: str | None = None) -> list[Json]:
        """Return the pods of a component, or of a session."""
        return [
            pod
            for pod in self.server.all("Pod")
            if component in {None, component_of(pod)} and session in {None, session_of(pod)}
        ]

    async def settle(self) -> None:
        """End all disturbances, let the clients be silent, and wait until nothing happens."""
        self.clients_act.clear()
        await self.calm()
        end = self.loop.time() + _PATIENCE_SECONDS
        while self.loop.time() < end:
            await asyncio.sleep(QUIET_SECONDS)
            recent = [
                each for each in self.network.writes if each.at > self.loop.time() - QUIET_SECONDS
            ]
            if not (recent or self.orphans.unclaimed):
                self.note("settled")
                return
        counts = [each.what for each in self.network.writes if each.at > end - QUIET_SECONDS]
        self.violate(f"the API server does not become quiet: {counts[-6:]}")

    async def calm(self) -> None:
        """End all disturbances: what is broken works again."""
        weather = self.network.weather
        weather.failing, weather.is_down, weather.slowest_seconds = 0.0, False, 0.05
        self.end_outage()
        for head in self.nodes.heads.values():
            head.hang(hangs=False)
        for name, machine in [*self.nodes.machines.items()]:
            if not machine.is_on:
                self.nodes.power_on(name)
            taints = self.server.get("Node", name)["spec"].get("taints", [])
            self.nodes.untaint(name, [each["key"] for each in taints])
            self.server.update("Node", name, {"spec": {"unschedulable": None}})
        self.operator.writes_left = None
        if not self.operator.is_running:
            self.operator.start()
        watches = self.operator.watches
        if watches is not None:
            watches.longest_delay = 0.2
            watches.reconnect()

    def end_outage(self) -> None:
        """Let the checkpoint store respond again."""
        if self.store.is_away:
            self.store.is_away, self.store.away_until = False, self.loop.time()

    async def use(self) -> None:
        """Let every client train some more steps, so that a loss shows."""
        before = {id(client): client.answers for client in self.clients}
        for client in self.clients:
            client.is_silent = False
        self.clients_act.set()

        def is_used() -> bool:
            return all(
                client.is_over or client.answers > before[id(client)] for client in self.clients
            )

        await until(is_used, 900.0)
        for client in self.clients:
            if client.answers == before[id(client)] and client.is_served():
                self.violate(f"{client.run.name} is ready, and its client can't train")

    async def tear_down(self) -> None:
        """Delete everything that people and clients have created."""
        self.clients_act.clear()
        for client in self.clients:
            await client.end()
        for session in self.server.all("TrainingSession"):
            if session["spec"].get("role") not in {"Pool", "Spare"}:
                self.server.delete("TrainingSession", session["metadata"]["name"])
        for base_model in self.server.all("BaseModel"):
            self.server.delete("BaseModel", base_model["metadata"]["name"])
        await self.settle()


def _summary(kind: str, manifest: Json) -> str:
    metadata = manifest["metadata"]
    ending = " ending" if "deletionTimestamp" in metadata else ""
    if kind == "Pod":
        conditions = manifest.get("status", {}).get("conditions", [])
        true = "+".join(each["type"] for each in conditions if each["status"] == "True")
        return f"on {manifest['spec'].get('nodeName')} {true}{ending}"
    if kind == "TrainingSession":
        status, spec = manifest.get("status", {}), manifest["spec"]
        ready = [each for each in status.get("conditions", []) if each["type"] == "Ready"]
        reason = ready[0]["reason"] if ready else None
        moving = metadata.get("annotations", {}).get(labels.MOVING_TO)
        return (
            f"{status.get('phase')} {reason} on {spec.get('poolCluster')} moving to {moving}"
            f" {status.get('incarnation')}{ending}"
        )
    if kind == "Node":
        spec = manifest["spec"]
        return f"{spec.get('unschedulable')} {[each['key'] for each in spec.get('taints', [])]}"
    return ending
