"""Ranks that share a model are placed together; CPU replicas are not."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Never

import pytest
import ray
from ray.util import placement_group_table

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, TrainerConfig
from tinkercloud_testing.ranks.recorder import Recorder
from tinkercloud_testing.ranks.two_nodes import CORES_OF_A_NODE, sums_and_nodes
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, RanksUnavailable
from tinkercloud_worker.build_trainer import build_trainer, strategy


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, "SPREAD"),
        ({"backend": "megatron"}, "SPREAD"),
        ({"device": "cuda"}, "PACK"),
        ({"sharded": True}, "PACK"),
        ({"backend": "megatron", "tensor_parallel": 2}, "PACK"),
        ({"backend": "megatron", "pipeline_parallel": 2}, "PACK"),
        ({"backend": "megatron", "context_parallel": 2}, "PACK"),
        ({"backend": "megatron", "expert_parallel": 2}, "PACK"),
    ],
)
def test_ranks_that_communicate_in_every_layer_share_a_node(
    trainer: dict[str, Any], expected: str
) -> None:
    assert strategy(TrainerConfig(ranks=2, **trainer)) == expected


@pytest.mark.slow
def test_ray_gets_the_placement_strategy(cluster: None) -> None:
    group = RankGroup(GroupShape(ranks=1, strategy="SPREAD"), Recorder)

    tables = [each for each in placement_group_table().values() if each["state"] == "CREATED"]
    assert [each["strategy"] for each in tables] == ["SPREAD"]
    group.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_on_two_nodes_ranks_are_packed_onto_one_or_spread_and_neighbours_share_a_node() -> None:
    shapes = [
        GroupShape(ranks=CORES_OF_A_NODE, strategy="PACK"),
        GroupShape(ranks=CORES_OF_A_NODE, strategy="SPREAD"),
        GroupShape(ranks=2 * CORES_OF_A_NODE, strategy="PACK"),
    ]

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        packed, spread, full = process.submit(sums_and_nodes, shapes).result()

    assert [len(set(nodes)) for _, nodes in (packed, spread, full)] == [1, 2, 2]
    assert [total for total, _ in (packed, spread, full)] == [1 + 2, 1 + 2, 1 + 2 + 3 + 4]
    _, nodes = full
    assert nodes == [nodes[0]] * CORES_OF_A_NODE + [nodes[-1]] * CORES_OF_A_NODE


@pytest.mark.slow
def test_a_head_waits_for_placement_up_to_its_timeout(cluster: None) -> None:
    ranks = int(ray.cluster_resources()["CPU"]) + 1
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path="/nowhere"),
        token_file="",
        checkpoint_root="file:///nowhere",
        scratch_dir="/nowhere",
        trainer=TrainerConfig(ranks=ranks, start_timeout_seconds=2),
    )

    def base() -> Never:
        raise AssertionError("ranks load the base")

    with pytest.raises(
        RanksUnavailable, match=rf"insufficient capacity: {ranks} ranks of .* within 2 s"
    ):
        build_trainer(config, base, None)
