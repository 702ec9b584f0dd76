"""`tinkercloud drain` asks the sessions on a node to leave, and follows them until they have."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tinkercloud_api.admin.draining import CannotDrain, Progress, cordon, drain
from tinkercloud_crds import labels
from tinkercloud_testing.cluster.kube_api.live_objects import LiveObjects
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, a_memory_api
from tinkercloud_testing.harness.waiting import reached

ANYTHING = {"operator": "Exists"}


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with a_memory_api() as made:
        yield made


@pytest.fixture
def cluster(connection: Connection) -> LiveObjects:
    """A cluster with a cordoned node, on which session `one` runs, and session `two` elsewhere."""
    made = LiveObjects(connection)
    made.put("Node", "node-0", {"spec": {"unschedulable": True}})
    for session, node in (("one", "node-0"), ("two", "node-1")):
        made.put("TrainingSession", session, {})
        put_pod(made, session, node)
    return made


def put_pod(cluster: LiveObjects, session: str, node: str, **fields: Any) -> None:
    wanted = {labels.SESSION_LABEL: session, labels.COMPONENT_LABEL: "head"}
    metadata = {"labels": wanted, **fields.pop("metadata", {})}
    cluster.put(
        "Pod", f"{session}-head", {"metadata": metadata, "spec": {"nodeName": node, **fields}}
    )


def put_status(cluster: LiveObjects, session: str, **conditions: dict[str, str]) -> None:
    listed = [{"type": kind, **fields} for kind, fields in conditions.items()]
    before = cluster.objects["TrainingSession"][session]
    cluster.put("TrainingSession", session, {**before, "status": {"conditions": listed}})


def asked(cluster: LiveObjects, session: str) -> str | None:
    metadata = cluster.objects["TrainingSession"][session]["metadata"]
    node: str | None = metadata.get("annotations", {}).get(labels.LEAVE_NODE)
    return node


class Drain:
    """A drain in progress."""

    def __init__(self, cluster: LiveObjects) -> None:
        self.seen: list[Progress] = []
        self.task = asyncio.create_task(self._run(cluster))

    async def _run(self, cluster: LiveObjects) -> None:
        async for progress in drain(cluster, "node-0"):
            self.seen.append(progress)

    async def shows(self, state: str) -> bool:
        return await reached(lambda: any(state in each.state for each in self.seen))


async def test_a_drain_follows_a_session_until_it_has_left(cluster: LiveObjects) -> None:
    drained = Drain(cluster)

    assert await drained.shows("asked to leave")
    assert (asked(cluster, "one"), asked(cluster, "two")) == ("node-0", None)
    put_status(cluster, "one", Suspended={"status": "Unknown"})
    assert await drained.shows("saving its state")
    put_pod(cluster, "one", "node-0", metadata={"deletionTimestamp": "2026-01-01T12:00:00Z"})
    assert await drained.shows("its pods are terminating")
    cluster.remove("Pod", "one-head")
    await asyncio.wait_for(drained.task, 10)

    assert drained.seen[-1] == Progress("one", "has left the node", has_left=True)
    assert {each.session for each in drained.seen} == {"one"}
    assert asked(cluster, "one") is None


async def test_a_session_that_can_not_be_saved_is_shown_with_the_reason(
    cluster: LiveObjects,
) -> None:
    drained = Drain(cluster)
    stalled = {"status": "True", "reason": "SaveFailed", "message": "the store is away"}
    put_status(cluster, "one", Stalled=stalled)

    assert await drained.shows("SaveFailed: the store is away")
    assert not drained.task.done()
    drained.task.cancel()


async def test_a_session_that_arrives_during_a_drain_is_asked_too(cluster: LiveObjects) -> None:
    drained = Drain(cluster)
    assert await drained.shows("asked to leave")

    put_pod(cluster, "two", "node-0")

    assert await reached(lambda: asked(cluster, "two") == "node-0")
    drained.task.cancel()


async def test_a_repeated_drain_completes_what_an_interrupted_one_started(
    cluster: LiveObjects,
) -> None:
    drained = Drain(cluster)
    assert await drained.shows("asked to leave")
    drained.task.cancel()
    cluster.remove("Pod", "one-head")

    again = Drain(cluster)
    await asyncio.wait_for(again.task, 10)

    assert [each.has_left for each in again.seen] == [True]
    assert asked(cluster, "one") is None


async def test_a_node_that_takes_new_pods_is_not_drained(cluster: LiveObjects) -> None:
    cluster.put("Node", "node-0", {"spec": {}})

    with pytest.raises(CannotDrain, match="pass --cordon"):
        await Drain(cluster).task
    assert asked(cluster, "one") is None


async def test_a_node_can_be_cordoned_first(cluster: LiveObjects) -> None:
    cluster.put("Node", "node-0", {"spec": {}})

    await cordon(cluster, "node-0")

    assert cluster.objects["Node"]["node-0"]["spec"] == {"unschedulable": True}


async def test_an_unknown_node_is_named(cluster: LiveObjects) -> None:
    cluster.remove("Node", "node-0")

    with pytest.raises(CannotDrain, match="no node node-0"):
        await Drain(cluster).task
    with pytest.raises(CannotDrain, match="no node node-0"):
        await cordon(cluster, "node-0")


async def test_sessions_that_stay_on_cordoned_nodes_are_named(cluster: LiveObjects) -> None:
    put_pod(cluster, "one", "node-0", tolerations=[ANYTHING])

    with pytest.raises(CannotDrain, match="the pods of one tolerate cordons"):
        await Drain(cluster).task
