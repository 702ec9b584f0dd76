"""Saving and publishing allocate no memory on the trainer's device, which others may be using."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.leaving import taken_by_what_leaves
from tinkercloud_worker.build_trainer import build_trainer, build_weight_host
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler

STAY = {f"TorchTrainerWithSampler, {model}: published" for model in ("adapter", "whole")}
"""A sampler takes these there, on a device that nobody else has."""


def a_config(**parts: Any) -> HeadConfig:
    return HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root="memory://",
        scratch_dir="",
        **parts,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_exports_of_a_trainer_allocate_no_device_memory() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        taken = process.submit(taken_by_what_leaves).result()

    assert {way for way, elements in taken.items() if elements} == STAY


@pytest.mark.parametrize(
    ("sampler", "trainer"),
    [
        (SamplerConfig(), TorchTrainerWithSampler),
        (
            SamplerConfig(
                backend="sglang", inference=InferenceConfig(urls=("http://a",), colocated=True)
            ),
            TorchTrainer,
        ),
    ],
    ids=["torch", "engines"],
)
def test_weights_stay_on_the_device_for_a_sampler_in_the_same_process(
    sampler: SamplerConfig, trainer: type[TorchTrainer]
) -> None:
    config = a_config(sampler=sampler)

    assert type(build_trainer(config, lambda: TorchBaseModel(tiny_llama()), None)) is trainer


@pytest.mark.parametrize(
    ("ranks", "way", "stays"),
    [
        (2, {"process_group": "gloo"}, True),
        (2, {}, False),
        (0, {"process_group": "gloo"}, False),
    ],
    ids=["group", "requests", "no ranks"],
)
def test_full_models_stay_on_ranks_only_if_processes_send_them_from_there_to_engines(
    ranks: int, way: dict[str, Any], stays: bool
) -> None:
    config = a_config(
        trainer=TrainerConfig(ranks=ranks),
        sampler=SamplerConfig(
            backend="sglang", inference=InferenceConfig(urls=("http://a",), **way)
        ),
    )

    assert (build_weight_host(config) is not None) == stays
