"""Validation of the rank settings of a session head."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinkercloud_protocol.heads.launch import TrainerConfig


def test_megatron_ranks_are_a_multiple_of_what_the_model_is_divided_over() -> None:
    config = TrainerConfig(backend="megatron", ranks=8, tensor_parallel=2, pipeline_parallel=2)

    assert config.ranks == 8
    with pytest.raises(ValidationError, match=r"ranks: 6 is not a multiple of .*, 4"):
        TrainerConfig(backend="megatron", ranks=6, tensor_parallel=2, pipeline_parallel=2)


def test_expert_parallelism_uses_existing_ranks() -> None:
    divided = {"tensor_parallel": 2, "expert_parallel": 4}

    assert TrainerConfig(backend="megatron", ranks=8, **divided).expert_parallel == 4
    with pytest.raises(ValidationError, match=r"ranks: 4 is not a multiple .*expert_parallel, 8"):
        TrainerConfig(backend="megatron", ranks=4, **divided)


@pytest.mark.parametrize(
    "field", ["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"]
)
def test_the_torch_trainer_takes_no_parallelism_that_it_would_ignore(field: str) -> None:
    with pytest.raises(ValidationError, match="backend to megatron"):
        TrainerConfig(ranks=2, **{field: 2})


def test_the_megatron_trainer_is_rejected_without_ranks() -> None:
    with pytest.raises(ValidationError, match="set ranks to 1 or more"):
        TrainerConfig(backend="megatron")


def test_a_head_that_trains_nothing_has_no_ranks() -> None:
    assert TrainerConfig(backend="none").ranks == 0
    with pytest.raises(ValidationError, match="ranks: 2, but backend none does not train"):
        TrainerConfig(backend="none", ranks=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "only valid for backend torch with ranks"),
        ({"backend": "megatron", "ranks": 2}, "only valid for backend torch with ranks"),
        ({"ranks": 2, "max_kept_tokens": 512}, "max_kept_tokens: 512, .* set it to 0"),
    ],
)
def test_the_base_is_sharded_over_identical_ranks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(sharded=True, **settings)

    assert TrainerConfig(sharded=True, ranks=2, max_kept_tokens=0).sharded
