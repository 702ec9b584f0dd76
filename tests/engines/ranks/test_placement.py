"""Ranks that hold a model between them are kept together; copies on CPUs are not."""

import pytest
from ray.util import placement_group_table

from tinkercloud_protocol.launch import TrainerConfig
from tinkercloud_testing.recorder import Recorder
from tinkercloud_worker.actors.group import GroupShape, RankGroup
from tinkercloud_worker.build_trainer import strategy


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
def test_what_meets_in_every_layer_is_kept_together(trainer, expected) -> None:
    assert strategy(TrainerConfig(ranks=2, **trainer)) == expected


@pytest.mark.slow
def test_ray_is_asked_for_it(cluster) -> None:
    group = RankGroup(GroupShape(ranks=1, strategy="SPREAD"), Recorder)

    assert placement_group_table(group._places)["strategy"] == "SPREAD"
    group.close()
