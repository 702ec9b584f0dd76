"""The operator continues the objects that the operator of the last release has left.

`tests/data/clusters` has one archive, named after the release whose operator made it
(`tinkercloud_testing.storage.cluster_of_release`).
"""

import asyncio
import lzma
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_crds import labels
from tinkercloud_crds.generate import KINDS, definition
from tinkercloud_testing.simulation.cluster.api_server import ApiServer
from tinkercloud_testing.simulation.cluster.connection import Network
from tinkercloud_testing.simulation.cluster.heads import Disk, Head, HeadSpeed
from tinkercloud_testing.simulation.cluster.kuberay import KubeRay
from tinkercloud_testing.simulation.cluster.nodes import component_of, session_of
from tinkercloud_testing.simulation.cluster.operator_process import OperatorProcess
from tinkercloud_testing.simulation.store import Store
from tinkercloud_testing.simulation.virtual_time import (
    Clock,
    VirtualLoop,
    operator_time,
    run_virtually,
    until,
)
from tinkercloud_testing.storage.cluster_of_release import READY, SEED, SUSPENDED, WAITING

Json = dict[str, Any]

pytestmark = pytest.mark.timeout(300)
(ARCHIVE,) = (Path(__file__).parents[2] / "data" / "clusters").glob("*.yaml.xz")
LONG_SECONDS = 2000.0
"""Several resyncs of the operator."""


@cache
def left() -> Json:
    """Return what the operator of the last release has left."""
    content: Json = yaml.load(lzma.decompress(ARCHIVE.read_bytes()), yaml.CSafeLoader)
    return content


def pruned(value: Any, schema: Json, path: str = "") -> Iterator[str]:
    """Remove what a definition does not have, as Kubernetes does; yield its paths."""
    if isinstance(value, list):
        for each in value:
            yield from pruned(each, schema["items"], path)
    elif isinstance(value, dict) and "additionalProperties" not in schema:
        known = schema.get("properties")
        for name in [*value]:
            if known is None:
                continue
            if name in known:
                yield from pruned(value[name], known[name], f"{path}.{name}")
            else:
                del value[name]
                yield f"{path}.{name}"


class Cluster:
    """The stored objects with this tree's definitions, KubeRay, and heads that keep running."""

    def __init__(self, loop: VirtualLoop) -> None:
        content = yaml.load(yaml.safe_dump(left()), yaml.CSafeLoader)
        self.clock = Clock(loop)
        self.clock.error = timedelta(seconds=content["seconds"] + 60)
        self.removed = [*_upgraded(content["objects"])]
        """Fields that this tree's definitions do not have."""
        objects: dict[str, dict[str, Json]] = defaultdict(dict)
        for kind, items in content["objects"].items():
            objects[kind] = {item["metadata"]["name"]: item for item in items}
        self.server = ApiServer(
            self.clock,
            random.Random(SEED),
            objects,
            version=content["version"],
            _applied={(each["uid"], each["part"]): each["fields"] for each in content["applied"]},
            _uids=count(content["version"]).__next__,
        )
        self.violations: list[str] = []
        self._heads = {session_of(pod): self._head(pod) for pod in self._pods_of_heads()}
        self._kuberay = KubeRay(self.server, knows_owners=True)
        network = Network(loop, self.server, random.Random(SEED))
        self._operator = OperatorProcess(
            network, self._answer, random.Random(SEED), self.violations.append
        )

    def _pods_of_heads(self) -> list[Json]:
        return [pod for pod in self.server.all("Pod") if component_of(pod) == "head"]

    def _head(self, pod: Json) -> Head:
        """Return the head of a pod, with the models that it serves."""
        incarnation = f"{pod['metadata']['uid']}-0"
        serving = [
            each["spec"]["modelId"]
            for each in self.server.all("TrainingSession")
            if each["status"].get("incarnation") == incarnation and "modelId" in each["spec"]
        ]
        store, rng = Store(), random.Random(SEED)
        head = Head(session_of(pod), incarnation, "local", Disk(), store, HeadSpeed(), rng)
        head.models, head.is_loaded = dict.fromkeys(serving, 3), True
        return head

    async def _answer(self, method: str, session: str, path: str) -> bytes:
        return await self._heads[session].answer(method, path)

    async def run(self, script: Callable[["Cluster"], Awaitable[None]]) -> None:
        """Run the operator and the controllers of Kubernetes during a script."""
        self._operator.start()
        controlling = asyncio.create_task(self._control())
        await script(self)
        controlling.cancel()

    async def _control(self) -> None:
        while True:
            self._kuberay.sync()
            self.server.collect_garbage()
            for pod in self.server.all("Pod"):
                if "deletionTimestamp" in pod["metadata"]:
                    self.server.remove("Pod", pod["metadata"]["name"])
            await asyncio.sleep(0.5)

    def parts(self, kind: str, *names: str) -> dict[str, Mapping[str, Any]]:
        """Return parts of the objects of a kind, such as `spec`, by name of the object."""
        return {
            each["metadata"]["name"]: {name: each.get(name) for name in names}
            for each in self.server.all(kind)
        }

    def uids(self) -> dict[tuple[str, str], str]:
        """Return the uids of all objects, except those that only people read."""
        return {
            (kind, name): item["metadata"]["uid"]
            for kind, items in self.server.objects.items()
            for name, item in items.items()
            if kind != "Event"
        }

    def children(self) -> list[str]:
        """Return the objects of sessions."""
        return [
            f"{kind}/{name}"
            for kind, items in self.server.objects.items()
            for name, item in items.items()
            if labels.SESSION_LABEL in item["metadata"].get("labels", {})
        ]


def _upgraded(objects: Mapping[str, list[Json]]) -> Iterator[str]:
    """Remove fields that this tree's definitions do not have; yield them."""
    for kind in KINDS:
        [version] = definition(kind)["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        for manifest in objects[kind.kind]:
            for part in {"spec", "status"} & manifest.keys():
                found = pruned(manifest[part], schema["properties"][part], part)
                yield from (f"{kind.kind} {manifest['metadata']['name']} {each}" for each in found)


def continued(script: Callable[[Cluster], Awaitable[None]]) -> Cluster:
    """Let this tree's operator continue the objects during a script; return what is there then."""
    loop = VirtualLoop()
    cluster = Cluster(loop)
    with operator_time(loop, cluster.clock, SEED):
        run_virtually(loop, cluster.run(script))
    assert cluster.violations == []
    return cluster


async def a_long_time(_: Cluster) -> None:
    await asyncio.sleep(LONG_SECONDS)


@pytest.fixture(scope="module")
def before() -> Cluster:
    """Return the cluster before this tree's operator starts."""
    return Cluster(VirtualLoop())


@pytest.fixture(scope="module")
def after() -> Cluster:
    """Return it a long time after that."""
    return continued(a_long_time)


def test_the_definitions_keep_all_fields_except_one_that_is_gone(before: Cluster) -> None:
    assert before.removed == ["BaseModel engines spec.sampler.engines.sharedMemory"]


def test_no_object_is_replaced_and_no_pod_is_changed(before: Cluster, after: Cluster) -> None:
    assert after.uids() == before.uids()
    assert after.parts("Pod", "spec") == before.parts("Pod", "spec")


def test_clusters_are_changed_by_one_argument_of_engines_which_restarts_no_pod(
    before: Cluster, after: Cluster
) -> None:
    now = after.parts("RayCluster", "spec")

    assert without(now, ["--grammar-backend", "llguidance"]) == before.parts("RayCluster", "spec")


def without(value: Any, arguments: list[str]) -> Any:
    """Return a JSON value without arguments of commands."""
    if isinstance(value, dict):
        return {key: without(each, arguments) for key, each in value.items()}
    if isinstance(value, list):
        return [without(each, arguments) for each in value if each not in arguments]
    return value


@pytest.mark.parametrize("name", [*READY, SUSPENDED, WAITING])
def test_a_session_keeps_its_status_and_gets_new_fields_at_most(
    before: Cluster, after: Cluster, name: str
) -> None:
    was, now = (each.server.get("TrainingSession", name) for each in (before, after))

    assert now["spec"] == was["spec"]
    assert now["status"].keys() - was["status"].keys() <= {"idleSince"}
    assert {key: now["status"][key] for key in was["status"]} == was["status"]


def test_base_models_get_the_counts_that_their_status_lacked(
    before: Cluster, after: Cluster
) -> None:
    statuses = after.parts("BaseModel", "status")
    idle = {name: each["status"]["idle"]["gpus"] for name, each in statuses.items()}

    assert not any(
        "idle" in each["status"] for each in before.parts("BaseModel", "status").values()
    )
    assert idle == {"alone": 0, "ranks": 8, "pool": 0, "warm": 0, "engines": 4}
    assert statuses["pool"]["status"]["pool"]["gpus"] == 0


async def delete_everything(cluster: Cluster) -> None:
    await asyncio.sleep(LONG_SECONDS)
    for name in (*READY, SUSPENDED, WAITING):
        cluster.server.delete("TrainingSession", name)
    for each in cluster.server.all("BaseModel"):
        cluster.server.delete("BaseModel", each["metadata"]["name"])
    await until(lambda: not cluster.server.all("TrainingSession") and not cluster.children(), 3600)


def test_nothing_is_left_once_sessions_and_base_models_are_deleted() -> None:
    cluster = continued(delete_everything)

    assert cluster.server.all("TrainingSession") == []
    assert cluster.children() == []
