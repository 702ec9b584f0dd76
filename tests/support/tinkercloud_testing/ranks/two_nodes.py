"""Ranks in a Ray cluster of two local nodes, each with its own object store and cores."""

import os
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import tinkercloud_testing
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.ranks.recorder import Recorder
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup

CORES_OF_A_NODE = 2
_STORE_BYTES = 100 << 20


class Located(Recorder):
    """Reports its node."""

    def node(self) -> str:
        """Return the id of the node."""
        return str(ray.get_runtime_context().get_node_id())


def sums_and_nodes(shapes: Sequence[GroupShape]) -> list[tuple[float, list[str]]]:
    """Start groups one after another; return the sum over the ranks of each, and their nodes.

    Call it in a separate process, because a process can join only one cluster.

    Args:
        shapes: The shapes of the groups; each rank adds its number and one.
    """
    os.environ["PYTHONPATH"] = str(Path(tinkercloud_testing.__path__[0]).parent)
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=CORES_OF_A_NODE, object_store_memory=_STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        return [_sum_and_nodes(shape) for shape in shapes]
    finally:
        ray.shutdown()
        cluster.shutdown()


def _is_empty() -> bool:
    return bool(ray.available_resources().get("CPU") == 2 * CORES_OF_A_NODE)


def _sum_and_nodes(shape: GroupShape) -> tuple[float, list[str]]:
    wait_until(_is_empty, "the ranks before have given their cores back")
    group = RankGroup(shape, Located)
    try:
        return group.call("add", 1), group.call_each("node", [()] * shape.ranks)
    finally:
        group.close()
