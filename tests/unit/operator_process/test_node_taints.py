"""The operator follows the taints of nodes by list and watch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tinkercloud_kube.client import Page
from tinkercloud_kube.errors import Rejected
from tinkercloud_operator.run.cluster.node_taints import NodeTaints
from tinkercloud_testing.cluster.kube_api.live_objects import LiveObjects
from tinkercloud_testing.cluster.kube_api.memory_api import Connection

NOTICE = {"key": "notice", "effect": "NoSchedule"}


def a_node(*taints: Any) -> dict[str, Any]:
    return {"spec": {"taints": list(taints)}}


async def following(changes: AsyncIterator[frozenset[str]]) -> frozenset[str]:
    return await asyncio.wait_for(anext(changes), 10)


async def test_only_changed_taints_are_reported(connection: Connection) -> None:
    cluster = LiveObjects(connection)
    cluster.put("Node", "node-0", a_node(NOTICE))
    cluster.put("Node", "node-1", a_node())
    nodes = NodeTaints(cluster)
    changes = nodes.changes()

    assert await following(changes) == {"node-0"}
    assert nodes.by_node == {"node-0": {"notice"}}
    # What a heartbeat changes.
    cluster.put("Node", "node-0", {**a_node(NOTICE), "status": {"phase": "Running"}})
    cluster.put("Node", "node-1", a_node(NOTICE))
    assert await following(changes) == {"node-1"}
    cluster.put("Node", "node-0", a_node())
    cluster.remove("Node", "node-1")
    seen = set(await following(changes))
    while nodes.by_node:
        seen |= await following(changes)
    assert seen == {"node-0", "node-1"}


async def test_an_operator_without_permission_ignores_taints(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(*_: object, **__: object) -> AsyncIterator[Page]:
        raise Rejected("GET /api/v1/nodes: 403", status=403)
        yield Page([], 0)

    cluster = LiveObjects(connection)
    monkeypatch.setattr(cluster, "pages", forbidden)
    nodes = NodeTaints(cluster)

    assert [change async for change in nodes.changes()] == []
    assert nodes.by_node == {}
