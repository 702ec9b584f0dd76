"""Simulated nodes: a scheduler that books GPUs, kubelets, and the end of nodes and of pods."""

import asyncio
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_testing.simulation.cluster.api_server import ApiServer, Json, owners_of
from tinkercloud_testing.simulation.cluster.heads import Disk, Head, HeadSpeed
from tinkercloud_testing.simulation.store import Store
from tinkercloud_testing.simulation.virtual_time import until

GPU = "nvidia.com/gpu"
FORCED = "!its pod was deleted by force"
"""A cause that nothing survives begins with an exclamation mark."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_UNREACHABLE = "node.kubernetes.io/unreachable"
_SILENT_SECONDS = 40.0
"""Time after which a node without a kubelet is NotReady."""
_TOLERATED_SECONDS = 300.0
"""Time after which the pods of such a node are deleted."""


def gpus_of(pod: Mapping[str, Any]) -> int:
    """Return how many GPUs a pod requests."""
    containers = pod["spec"].get("containers", [])
    limits = (each.get("resources", {}).get("limits", {}) for each in containers)
    return sum(int(each.get(GPU, 0)) for each in limits)


def component_of(pod: Mapping[str, Any]) -> str:
    """Return what a pod is."""
    return str(pod["metadata"]["labels"].get(labels.COMPONENT_LABEL, ""))


def session_of(pod: Mapping[str, Any]) -> str:
    """Return the session that a pod belongs to."""
    return str(pod["metadata"]["labels"].get(labels.SESSION_LABEL, ""))


@dataclass
class Machine:
    """A node's hardware and the processes on it, independent of the API server."""

    name: str
    gpus: int
    is_on: bool = True
    down_since: float = 0.0
    pods: dict[str, "RunningPod"] = field(default_factory=dict)
    """By uid."""

    def used(self) -> int:
        """Return the GPUs that processes use."""
        return sum(each.gpus for each in self.pods.values())


@dataclass
class RunningPod:
    """A pod that a kubelet runs."""

    name: str
    uid: str
    session: str
    component: str
    gpus: int
    owner: str
    """Uid of its RayCluster."""
    disk: Disk = field(default_factory=Disk)
    head: Head | None = None
    task: "asyncio.Task[None] | None" = None
    crashes: int = 0
    restart: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its containers are killed."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its pod is being deleted."""
    stopped_at: float = math.inf


@dataclass
class Nodes:
    """All nodes.

    Args:
        server: the API server.
        store: the checkpoint store.
        random: for the choices of the simulation.
        speed: how long the heads of a session take.
        violate: called with what must never happen.
        trace: called with what happens.
    """

    server: ApiServer
    store: Store
    random: random.Random
    speed: Callable[[str], HeadSpeed]
    violate: Callable[[str], object]
    trace: Callable[[str], object]
    machines: dict[str, Machine] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    """The living processes of heads, by incarnation."""
    most_models: int = 8
    to_be_saved: set[str] = field(default_factory=set)
    """Uids of RayClusters that the operator may only delete once their heads have saved."""

    def __post_init__(self) -> None:
        """Follow the deletions of pods."""
        self.server.subscribers.append(self._note)

    def _note(self, kind: str, event: str, manifest: Json) -> None:
        metadata = manifest["metadata"]
        if kind != "Pod" or not (event == "DELETED" or "deletionTimestamp" in metadata):
            return
        for machine in self.machines.values():
            if metadata["uid"] in machine.pods:
                machine.pods[metadata["uid"]].ends.set()

    def add(self, name: str, gpus: int) -> None:
        """Add a node."""
        self.machines[name] = Machine(name, gpus)
        amounts = {
            "cpu": "64",
            "memory": "512Gi",
            "pods": "110",
            **({GPU: str(gpus)} if gpus else {}),
        }
        self.server.create(
            "Node",
            {
                "metadata": {"name": name, "labels": {"pool": "gpu" if gpus else "cpu"}},
                "spec": {},
                "status": {"allocatable": amounts, "capacity": amounts},
            },
        )

    def living(self, session: str) -> list[Head]:
        """Return the processes of a session's heads."""
        return [each for each in self.heads.values() if each.session == session]

    # The scheduler.

    def schedule(self) -> None:
        """Give each pod that waits a node with enough free GPUs, if there is one."""
        for pod in self.server.all("Pod"):
            metadata = pod["metadata"]
            if "nodeName" in pod["spec"] or "deletionTimestamp" in metadata:
                continue
            fitting = [each for each in self.server.all("Node") if self._fits(pod, each)]
            if not fitting:
                message = "0 nodes are available: Insufficient nvidia.com/gpu"
                waits = _condition("PodScheduled", "False", "Unschedulable", message)
                self._set_conditions(pod, [waits])
                continue
            # Pods without GPUs go to nodes without any, if these are there.
            gpus = gpus_of(pod)
            chosen = min(
                fitting,
                key=lambda node: (_capacity(node) if not gpus else 0, node["metadata"]["name"]),
            )
            name = metadata["name"]
            self.server.update("Pod", name, {"spec": {"nodeName": chosen["metadata"]["name"]}})
            self._set_conditions(self.server.get("Pod", name), [_condition("PodScheduled", "True")])

    def _fits(self, pod: Json, node: Json) -> bool:
        name, spec = node["metadata"]["name"], node["spec"]
        if spec.get("unschedulable") or name not in self.machines:
            return False
        tolerated = {each.get("key", "") for each in pod["spec"].get("tolerations", [])}
        taints = (each["key"] for each in spec.get("taints", []))
        if any(key not in tolerated and "" not in tolerated for key in taints):
            return False
        booked = sum(
            gpus_of(other)
            for other in self.server.all("Pod")
            if other["spec"].get("nodeName") == name
            and other.get("status", {}).get("phase") not in {"Failed", "Succeeded"}
        )
        return gpus_of(pod) <= _capacity(node) - booked

    def fits_somewhere(self, pod: Json) -> bool:
        """Return whether some node has room for a pod now."""
        return any(self._fits(pod, node) for node in self.server.all("Node"))

    # The kubelets.

    def sync(self, now: float) -> None:
        """Let every kubelet start and stop what the API server says, and note dead nodes."""
        for machine in [*self.machines.values()]:
            if machine.is_on:
                self._sync_machine(machine)
            else:
                self._note_silence(machine, now)

    def _sync_machine(self, machine: Machine) -> None:
        bound = {
            pod["metadata"]["uid"]: pod
            for pod in self.server.all("Pod")
            if pod["spec"].get("nodeName") == machine.name
        }
        for uid, running in [*machine.pods.items()]:
            if uid not in bound:
                self._end(machine, running, FORCED)
        for uid, pod in bound.items():
            if uid in machine.pods:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self.server.delete("Pod", pod["metadata"]["name"], uid, grace=0)
            elif pod.get("status", {}).get("phase") != "Failed":
                self._start(machine, pod)

    def _start(self, machine: Machine, pod: Json) -> None:
        metadata = pod["metadata"]
        [owner] = owners_of(pod, "RayCluster")
        running = RunningPod(
            metadata["name"],
            metadata["uid"],
            session_of(pod),
            component_of(pod),
            gpus_of(pod),
            owner,
        )
        machine.pods[running.uid] = running
        if machine.used() > machine.gpus:
            self.violate(f"node {machine.name} runs pods that use {machine.used()} GPUs")
        running.task = asyncio.create_task(self._run(machine, running, pod))

    async def _run(self, machine: Machine, running: RunningPod, pod: Json) -> None:
        await asyncio.sleep(self.random.uniform(1.0, 4.0))
        serving = asyncio.create_task(self._serve(running, pod))
        try:
            await running.ends.wait()
            current = self.server.find("Pod", running.name)
            if current is not None:
                seconds = float(current["metadata"]["deletionGracePeriodSeconds"])
                await self._stop(running, seconds)
        finally:
            serving.cancel()
        is_forced = self.server.find("Pod", running.name) is None
        self._end(machine, running, FORCED if is_forced else "its grace period was over")
        self.server.remove("Pod", running.name)

    async def _serve(self, running: RunningPod, pod: Json) -> None:
        """Run the containers of a pod, again after each crash."""
        while True:
            running.restart.clear()
            if running.component != "head":
                self._report(running, is_started=True, is_ready=False)
                await asyncio.sleep(self.random.uniform(1.0, 5.0))
                self._report(running, is_started=True, is_ready=True)
                await running.restart.wait()
            else:
                await self._serve_head(running, pod)
            self._report(running, is_started=False, is_ready=False)
            await asyncio.sleep(min(2.0 * 2**running.crashes, 60.0))

    async def _serve_head(self, running: RunningPod, pod: Json) -> None:
        session = running.session
        head = Head(
            session,
            f"{running.uid}-{running.crashes}",
            self._level(session),
            running.disk,
            self.store,
            self.speed(session),
            self.random,
            self.most_models,
        )
        for other in self.living(session):
            if other.unsaved():
                self.violate(
                    f"head {head.incarnation} starts while {other.incarnation} of the same session"
                    f" has unsaved steps of {', '.join(sorted(other.unsaved()))}"
                )
        running.head = head
        self.heads[head.incarnation] = head
        self.trace(f"head {head.incarnation} of {session} starts")
        self._report(running, is_started=True, is_ready=False)
        loading = asyncio.create_task(head.load())
        try:
            while not running.restart.is_set():
                self._report(running, is_started=True, is_ready=head.is_ready)
                head.changed.clear()
                await head.changed.wait()
        finally:
            loading.cancel()

    def _level(self, session: str) -> str:
        cluster = self.server.find("RayCluster", session)
        if cluster is None:
            return "none"
        config = json.loads(cluster["metadata"]["annotations"][labels.HEAD_CONFIG])
        return str(config.get("durability", {}).get("level", "none"))

    async def _stop(self, running: RunningPod, seconds: float) -> None:
        """Stop the containers of a pod within its grace period."""
        running.stopped_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds):
                if running.head is not None and running.component == "head":
                    self.trace(f"head {running.head.incarnation} gets SIGTERM")
                    await running.head.terminate()
                else:
                    await until(lambda: not self.living(running.session))
        except TimeoutError:
            return

    def _end(self, machine: Machine, running: RunningPod, cause: str) -> None:
        """End the processes of a pod, and lose its disk."""
        machine.pods.pop(running.uid, None)
        if running.task is not None and running.task is not asyncio.current_task():
            running.task.cancel()
        head = running.head
        if head is None:
            return
        self.heads.pop(head.incarnation, None)
        is_running = head.is_loaded and not head.is_dead
        left = head.unsaved() if is_running else self._unsaved_journals(running)
        head.kill()
        if not left:
            return
        was_away = self.store.is_away or self.store.away_until > running.stopped_at
        must_be_saved = running.owner in self.to_be_saved
        is_excused = cause.startswith("!") or (was_away and not must_be_saved) or not is_running
        self.trace(f"head {head.incarnation} ends with unsaved {left}: {cause}")
        for run, steps in left.items():
            if is_excused:
                self.store.note_destroyed(run, steps, cause)

    def _unsaved_journals(self, running: RunningPod) -> dict[str, int]:
        journals = running.disk.journals.items()
        return {run: steps for run, steps in journals if steps > self.store.steps.get(run, 0)}

    # What happens to containers and nodes.

    def crash(self, pod_name: str) -> None:
        """Kill the processes of a pod's containers; they start again in the same pod."""
        for machine in self.machines.values():
            for running in machine.pods.values():
                if running.name == pod_name and not running.restart.is_set():
                    self._crash(running)

    def _crash(self, running: RunningPod) -> None:
        running.crashes += 1
        running.restart.set()
        head = running.head
        if head is None:
            return
        head.kill()
        self.heads.pop(head.incarnation, None)
        for run, steps in head.unsaved().items():
            if running.disk.journals.get(run, 0) < steps:
                self.store.note_destroyed(run, steps, "!its container was killed")

    def power_off(self, name: str, now: float) -> None:
        """Let a machine stop at once, with everything on it."""
        machine = self.machines[name]
        machine.is_on, machine.down_since = False, now
        for running in [*machine.pods.values()]:
            self._end(machine, running, "!its machine was lost")

    def power_on(self, name: str) -> None:
        """Start a machine: the pods that were on it are gone."""
        machine = self.machines[name]
        machine.is_on = True
        self._set_taints(name, add=(), remove=(_UNREACHABLE, OUT_OF_SERVICE))
        for pod in self._pods_on(name):
            self._fail(pod)

    def _fail(self, pod: Json) -> None:
        status = {"phase": "Failed", "reason": "NodeShutdown", "message": "the machine restarted"}
        self.server.update("Pod", pod["metadata"]["name"], {"status": status})

    def _pods_on(self, name: str) -> list[Json]:
        return [pod for pod in self.server.all("Pod") if pod["spec"].get("nodeName") == name]

    def _note_silence(self, machine: Machine, now: float) -> None:
        """Do what Kubernetes does about a node whose kubelet is silent."""
        silent = now - machine.down_since
        node = self.server.find("Node", machine.name)
        pods = self._pods_on(machine.name)
        if node is None or any(
            taint["key"] == OUT_OF_SERVICE for taint in node["spec"].get("taints", [])
        ):
            for pod in pods:
                self.server.remove("Pod", pod["metadata"]["name"])
            return
        if silent >= _SILENT_SECONDS:
            self._set_taints(machine.name, add=(_UNREACHABLE,), remove=())
            for pod in pods:
                self._set_conditions(pod, [_condition("Ready", "False", "NodeNotReady")])
        if silent >= _TOLERATED_SECONDS:
            for pod in pods:
                self.server.delete("Pod", pod["metadata"]["name"])

    def delete_node(self, name: str, now: float) -> None:
        """Remove a node for good, with its machine."""
        self.power_off(name, now)
        self.server.remove("Node", name)
        for pod in self._pods_on(name):
            self.server.remove("Pod", pod["metadata"]["name"])
        del self.machines[name]

    def taint(self, name: str, key: str) -> None:
        """Add a taint to a node."""
        self._set_taints(name, add=(key,), remove=())

    def untaint(self, name: str, keys: Iterable[str]) -> None:
        """Remove taints from a node."""
        self._set_taints(name, add=(), remove=keys)

    def _set_taints(self, name: str, add: Iterable[str], remove: Iterable[str]) -> None:
        node = self.server.find("Node", name)
        if node is None:
            return
        before = {each["key"] for each in node["spec"].get("taints", [])}
        after = (before | set(add)) - set(remove)
        if after != before:
            taints = [{"key": key, "effect": "NoSchedule"} for key in sorted(after)]
            self.server.update("Node", name, {"spec": {"taints": taints}})

    # The status of pods.

    def _report(self, running: RunningPod, *, is_started: bool, is_ready: bool) -> None:
        pod = self.server.find("Pod", running.name)
        if pod is None or pod["metadata"]["uid"] != running.uid:
            return
        containers = [
            {
                "name": each["name"],
                "started": is_started,
                "ready": is_ready,
                "restartCount": running.crashes,
                "state": {"running": {}} if is_started else {"waiting": {"reason": "Restarting"}},
            }
            for each in pod["spec"]["containers"]
        ]
        status = {"phase": "Running", "containerStatuses": containers}
        self.server.update("Pod", running.name, {"status": status})
        truth = "True" if is_ready else "False"
        reason = "" if is_ready else "ContainersNotReady"
        ready = [_condition(kind, truth, reason) for kind in ("ContainersReady", "Ready")]
        self._set_conditions(self.server.get("Pod", running.name), ready)

    def _set_conditions(self, pod: Json, conditions: Iterable[Json]) -> None:
        found = {each["type"]: each for each in pod.get("status", {}).get("conditions", [])}
        now = timestamp(self.server.clock.now())
        for condition in conditions:
            before = found.get(condition["type"], {})
            if any(before.get(key) != value for key, value in condition.items()):
                found[condition["type"]] = {**condition, "lastTransitionTime": now}
        status = {"status": {"conditions": [*found.values()]}}
        self.server.update("Pod", pod["metadata"]["name"], status)

    def disrupt(self, pod: Json) -> None:
        """Mark a pod as a target of a disruption, and delete it."""
        self._set_conditions(pod, [_condition("DisruptionTarget", "True", "PreemptionByScheduler")])
        self.server.delete("Pod", pod["metadata"]["name"])


def _condition(kind: str, status: str, reason: str = "", message: str = "") -> Json:
    condition = {"type": kind, "status": status}
    return condition | {
        key: value for key, value in (("reason", reason), ("message", message)) if value
    }


def _capacity(node: Json) -> int:
    return int(node["status"]["allocatable"].get(GPU, 0))
