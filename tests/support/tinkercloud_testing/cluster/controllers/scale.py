"""Many sessions at a steady rate, and the latency that the operator adds.

An observer watches sessions, RayClusters and pods, and records when it first sees each; it provides
both ends of every interval. The operator's share of the startup time is what only it can shorten:
from the session to its RayCluster, and from the last Ready pod to the Ready session. The time in
between belongs to KubeRay, the scheduler and the nodes.
"""

import asyncio
import base64
import contextlib
import json
import ssl
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tinkercloud_testing.cluster.controllers.operators import RunningOperator
from tinkercloud_testing.cluster.controllers.training_sessions import (
    a_base_model,
    a_session,
    a_volume,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster, KubectlFailed
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.harness.waiting import wait_until

PODS_PER_SESSION = 5
"""Head, two trainers, two samplers."""
_GPUS_PER_SESSION = 4
_SESSIONS_PER_NODE = 25


@dataclass(frozen=True)
class Load:
    """The load of a measurement."""

    sessions: int
    creates_per_second: float
    steady_seconds: float
    """The time for which writes are counted once all sessions are settled."""
    patience_seconds: float
    """The timeout for all sessions to become Ready, after the last was created."""


@dataclass(frozen=True)
class Percentiles:
    """The distribution of an interval in seconds."""

    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Percentiles":
        """Return the percentiles of at least two values."""
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        return cls(round(cuts[49], 3), round(cuts[98], 3), round(max(seconds), 3))


@dataclass(frozen=True)
class Result:
    """The result of a measurement."""

    sessions: int
    pods: int
    creates_per_second: float
    to_cluster: Percentiles
    """Time from the session to its RayCluster."""
    to_ready: Percentiles
    """Time from the last Ready pod to the Ready session."""
    added: Percentiles
    """The sum of both: the latency that the operator adds."""
    whole: Percentiles
    """Time from the session to its Ready condition, including KubeRay and the nodes."""
    one_write: Percentiles
    """Time that the API server took to create a session: the minimum cost of a write. The operator
    makes two consecutive writes before a RayCluster exists."""
    steady_writes_per_second: float
    """Writes of the operator when nothing happens, apart from renewals of its Lease."""
    rss_bytes: int
    """Peak memory of the operator."""
    cpu_seconds: float
    """CPU time of the operator until all sessions were Ready."""
    delete_seconds: float
    """Time until all sessions and their children were deleted."""

    def as_row(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def as_table(self) -> str:
        """Return it as text, a line each."""
        rows = [
            f"{self.sessions} sessions, {self.pods} pods, {self.creates_per_second:g} created/s",
            "seconds                                p50      p99      max",
            _row("session to RayCluster", self.to_cluster),
            _row("last Ready pod to Ready session", self.to_ready),
            _row("added by the operator", self.added),
            _row("session to Ready, all together", self.whole),
            _row("one write to the API server", self.one_write),
            f"writes/s when nothing happens     {self.steady_writes_per_second:8.3f}",
            f"most memory, MB                   {self.rss_bytes / 1e6:8.0f}",
            f"CPU until all were Ready, s       {self.cpu_seconds:8.1f}",
            f"all deleted after, s              {self.delete_seconds:8.1f}",
        ]
        return "\n".join(rows)


def _row(what: str, p: Percentiles) -> str:
    return f"{what:33} {p.p50:8.3f} {p.p99:8.3f} {p.most:8.3f}"


@dataclass
class Seen:
    """When an observer first saw each object, by session (`time.monotonic`)."""

    sessions: int
    """The expected numbers."""
    session: dict[str, float] = field(default_factory=dict)
    cluster: dict[str, float] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    pods: dict[str, dict[str, float]] = field(default_factory=dict)
    """When each pod was Ready."""
    writes: list[float] = field(default_factory=list)
    """Seconds that each session's creation took."""
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether all sessions and pods have been Ready."""

    def note(self, kind: str, manifest: Mapping[str, Any], moment: float) -> None:
        """Record an object that a watch has delivered."""
        metadata = manifest["metadata"]
        name = metadata["name"]
        if kind == "trainingsessions":
            self.session.setdefault(name, moment)
            if _is_ready(manifest):
                self.ready.setdefault(name, moment)
        elif kind == "rayclusters":
            self.cluster.setdefault(name, moment)
        elif _is_ready(manifest):
            session = metadata["labels"]["tinkercloud.dev/session"]
            self.pods.setdefault(session, {}).setdefault(name, moment)
        # The watch of pods may report them later than the watch of the session they made Ready.
        if len(self.ready) == self.sessions and self._has_all_pods():
            self.is_complete.set()

    def _has_all_pods(self) -> bool:
        return sum(map(len, self.pods.values())) >= self.sessions * PODS_PER_SESSION

    def to_cluster(self) -> dict[str, float]:
        """Return the seconds from each session to its RayCluster."""
        return {name: self.cluster[name] - moment for name, moment in self.session.items()}

    def to_ready(self) -> dict[str, float]:
        """Return the seconds from each session's last Ready pod to its own Ready."""
        return {
            name: max(0.0, moment - max(self.pods[name].values()))
            for name, moment in self.ready.items()
        }


def _is_ready(manifest: Mapping[str, Any]) -> bool:
    conditions = manifest.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def prepare(cluster: Cluster, kwok: KwokNodes, namespace: str, sessions: int) -> None:
    """Create nodes for this many sessions, and their BaseModel."""
    for number in range(-(-sessions // _SESSIONS_PER_NODE)):
        kwok.add(f"scale-{number}", gpus=_SESSIONS_PER_NODE * _GPUS_PER_SESSION)
    sampler = {"backend": "sglang", "image": "sglang", "replicas": 2, "gpusPerReplica": 1}
    cluster.apply(a_base_model(namespace, sampler=sampler), *a_volume(namespace))
    # An API server does not list a new kind immediately.
    wait_until(lambda: _can_list(cluster, namespace), "sessions can be listed")


def _can_list(cluster: Cluster, namespace: str) -> bool:
    with contextlib.suppress(KubectlFailed):
        return not cluster.objects("tsess,rayclusters", namespace)
    return False


def measure(cluster: Cluster, operator: RunningOperator, load: Load) -> Result:
    """Create sessions, wait until all are Ready, measure the settled state, delete all.

    Raises:
        TimeoutError: Not all were Ready, or deleted, in time.
    """
    namespace = operator.namespace
    seen = asyncio.run(_create(cluster, namespace, load))
    cpu_seconds = _cpu_seconds(operator)
    whole = [seen.ready[name] - moment for name, moment in seen.session.items()]
    to_cluster, to_ready = seen.to_cluster(), seen.to_ready()
    writes = _steady_writes(operator, load.steady_seconds)
    deleting = time.monotonic()
    cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--wait=false")
    kinds = "tsess,rayclusters,pods,secrets,services,configmaps"
    selector = "app.kubernetes.io/managed-by=tinkercloud"
    wait_until(
        lambda: (
            not cluster.objects("tsess", namespace)
            and not cluster.objects(kinds, namespace, selector)
        ),
        "everything is gone",
        load.patience_seconds,
    )
    return Result(
        sessions=load.sessions,
        pods=load.sessions * PODS_PER_SESSION,
        creates_per_second=load.creates_per_second,
        to_cluster=Percentiles.of(list(to_cluster.values())),
        to_ready=Percentiles.of(list(to_ready.values())),
        added=Percentiles.of([to_cluster[name] + to_ready[name] for name in to_ready]),
        whole=Percentiles.of(whole),
        one_write=Percentiles.of(seen.writes),
        steady_writes_per_second=writes / load.steady_seconds,
        rss_bytes=_most_memory(operator),
        cpu_seconds=cpu_seconds,
        delete_seconds=round(time.monotonic() - deleting, 1),
    )


async def _create(cluster: Cluster, namespace: str, load: Load) -> Seen:
    """Create the sessions at the given rate; return when each object was seen."""
    seen = Seen(load.sessions)
    async with _client(cluster) as client, asyncio.TaskGroup() as tasks:
        places = {
            "trainingsessions": "apis/tinkercloud.dev/v1alpha1",
            "rayclusters": "apis/ray.io/v1",
            "pods": "api/v1",
        }
        watches = [
            tasks.create_task(_watch(client, f"/{api}/namespaces/{namespace}/{kind}", kind, seen))
            for kind, api in places.items()
        ]
        start = time.monotonic()
        for number in range(load.sessions):
            await asyncio.sleep(start + number / load.creates_per_second - time.monotonic())
            session = a_session(namespace, f"s-{number}", owner=f"owner-{number % 50}")
            path = f"/apis/tinkercloud.dev/v1alpha1/namespaces/{namespace}/trainingsessions"
            tasks.create_task(_post(client, path, session, seen))
        async with asyncio.timeout(load.patience_seconds):
            await seen.is_complete.wait()
        for watch in watches:
            watch.cancel()
    return seen


async def _post(
    client: aiohttp.ClientSession, path: str, manifest: Mapping[str, Any], seen: Seen
) -> None:
    start = time.monotonic()
    async with client.post(path, json=manifest, raise_for_status=True):
        seen.writes.append(time.monotonic() - start)


async def _watch(client: aiohttp.ClientSession, path: str, kind: str, seen: Seen) -> None:
    """Record everything that a watch delivers until this is cancelled.

    An API server ends a watch that is too slow: the next one starts with the existing objects.
    """
    while True:
        async with client.get(path, params={"watch": "1"}, raise_for_status=True) as stream:
            async for line in stream.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    break
                seen.note(kind, event["object"], time.monotonic())


@contextlib.asynccontextmanager
async def _client(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a connection to the API server with an administrator's rights."""
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    own, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
    tls = ssl.create_default_context(cadata=_decoded(own["certificate-authority-data"]))
    with _file(user["client-certificate-data"]) as public, _file(user["client-key-data"]) as key:
        tls.load_cert_chain(public, key)
    async with aiohttp.ClientSession(
        own["server"],
        connector=aiohttp.TCPConnector(ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**22,
    ) as client:
        yield client


@contextlib.contextmanager
def _file(content: str) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_decoded(content))
        file.flush()
        yield Path(file.name)


def _decoded(content: str) -> str:
    return base64.b64decode(content).decode()


def _steady_writes(operator: RunningOperator, seconds: float) -> int:
    """Return the number of writes of the operator while nothing happens."""
    # The summary of the BaseModel and Events follow the last Ready condition.
    time.sleep(10)
    before = operator.writes()
    time.sleep(seconds)
    return operator.writes() - before


def _most_memory(operator: RunningOperator) -> int:
    return int(_status(operator)["VmHWM"].split()[0]) * 1024


def _status(operator: RunningOperator) -> dict[str, str]:
    lines = _proc(operator, "status").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _cpu_seconds(operator: RunningOperator) -> float:
    ticks = _proc(operator, "stat").rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / 100


def _proc(operator: RunningOperator, file: str) -> str:
    process = operator.program.process
    if process is None:
        raise RuntimeError("the operator was never started")
    return Path(f"/proc/{process.pid}/{file}").read_text()
