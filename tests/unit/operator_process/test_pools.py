"""The worker of pools: what it writes, and which sessions it has reconciled."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_operator.run.pools import Pools
from tinkercloud_operator.run.spares import Spares
from tinkercloud_operator.run.store import Watched
from tinkercloud_testing.cluster.memory_api import Connection, Json
from tinkercloud_testing.sessions import MODEL_NAME, a_base_model_manifest, a_session_manifest
from tinkercloud_testing.waiting import reached

OWN = "/apis/tinkercloud.dev/v1alpha1/namespaces/default"
ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Accepted"}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "lastTransitionTime": "2026-01-01T12:00:00Z",
}


class Operator:
    """The worker of pools, with the objects that it knows."""

    def __init__(self, connection: Connection) -> None:
        self.api = connection.api
        self.watched = Watched()
        self.reconciled: list[str] = []
        self.spares = Spares(self.watched, connection.cluster, self._note, self.reconciled.append)
        self.pools = Pools(
            self.watched, connection.cluster, self._note, self.reconciled.append, self.spares
        )

    def _note(self, kind: str, manifest: Any) -> None:
        self.watched.note(kind, manifest)
        self.pools.note(kind, manifest)

    def see(self, kind: str, manifest: Json, **status: Any) -> None:
        plural = {"BaseModel": "basemodels", "TrainingSession": "trainingsessions"}[kind]
        path = f"{OWN}/{plural}/{manifest['metadata']['name']}"
        self._note(kind, self.api.put(path, manifest | {"status": status}))

    def see_cluster(self, **status: Any) -> None:
        cluster = a_session_manifest("pool-a", role="Pool", lora=None)
        self.see("TrainingSession", cluster, **{"conditions": [READY]} | status)

    def see_run(self, name: str = "one", cluster: str | None = None) -> None:
        run = a_session_manifest(
            name, sharing="Shared", modelId=f"{name}:train:0", poolCluster=cluster
        )
        run["metadata"]["finalizers"] = [labels.FINALIZER]
        self.see("TrainingSession", run, conditions=[ACCEPTED])

    @contextmanager
    def working(self) -> Iterator[None]:
        task = asyncio.create_task(self.pools.work())
        try:
            yield
        finally:
            task.cancel()

    def wrote(self, request: str) -> bool:
        return request in self.api.writes


@pytest.fixture
async def operator(connection: Connection) -> Operator:
    made = Operator(connection)
    pool = {"minClusters": 0, "maxClusters": 1, "scaleDownAfterSeconds": 0}
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool=pool)
    made.see("BaseModel", shared)
    return made


async def test_a_waiting_run_starts_a_cluster_that_its_base_model_owns(operator: Operator) -> None:
    operator.see_run()

    with operator.working():
        await reached(lambda: operator.wrote(f"POST {OWN}/trainingsessions"))

    [made] = [each for each in operator.watched.sessions.values() if "Pool" in str(each["spec"])]
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("BaseModel", "model")
    assert made["spec"]["baseModel"] == MODEL_NAME
    assert "one" in operator.reconciled


async def test_no_run_gets_a_place_on_a_cluster_whose_deletion_is_not_visible_yet(
    operator: Operator,
) -> None:
    operator.see_cluster()

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {OWN}/trainingsessions/pool-a"))
        operator.see_run()
        await reached(lambda: operator.pools.waiting_message("one") is not None)

    assert not operator.wrote(f"PATCH {OWN}/trainingsessions/one")


async def test_a_refused_deletion_leaves_the_cluster_in_use(operator: Operator) -> None:
    operator.api.refused["pool-a"] = 500
    operator.see_cluster()

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {OWN}/trainingsessions/pool-a"))
        operator.see_run()
        await reached(lambda: operator.wrote(f"PATCH {OWN}/trainingsessions/one"))


async def test_a_run_whose_place_is_refused_does_not_delay_the_others(operator: Operator) -> None:
    operator.api.refused["one"] = 403
    operator.see_cluster()
    operator.see_run("one")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {OWN}/trainingsessions/two"))


async def test_a_run_that_was_changed_meanwhile_gets_its_place_once_that_is_seen(
    operator: Operator,
) -> None:
    path = f"{OWN}/trainingsessions/one"
    operator.see_cluster()
    operator.see_run()
    seen = operator.watched.sessions["one"]
    changed = operator.api.put(path, {"spec": seen["spec"] | {"poolCluster": "pool-b"}})

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {path}"))
        assert operator.api.objects[path] == changed
        operator._note("TrainingSession", operator.api.put(path, {"spec": seen["spec"]}))
        await reached(lambda: operator.api.objects[path]["spec"] == {"poolCluster": "pool-a"})


async def test_runs_are_reconciled_when_their_cluster_changes_but_not_when_it_is_used(
    operator: Operator,
) -> None:
    operator.see_cluster(incarnation="head-0")
    operator.see_run(cluster="pool-a")
    operator.reconciled.clear()

    operator.see_cluster(incarnation="head-0", lastActivityTime="2026-01-01T13:00:00Z")
    assert operator.reconciled == []
    operator.see_cluster(incarnation="head-1")

    assert operator.reconciled == ["one"]
