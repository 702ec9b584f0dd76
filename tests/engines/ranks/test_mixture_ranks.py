"""Mixtures of experts divided over megatron ranks against the torch trainer in this process."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_testing.data import random_data
from tinkercloud_testing.megatron import megatron_factory
from tinkercloud_testing.models import save, tiny_deepseek_v3, tiny_qwen3_moe
from tinkercloud_testing.ranks import BATCH_TOKENS
from tinkercloud_testing.trainers import assert_close, run
from tinkercloud_worker.actors.group import GroupShape, RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning:megatron.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 11, 8]
LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)
MODELS = {"qwen3": tiny_qwen3_moe, "deepseek": partial(tiny_deepseek_v3, num_hidden_layers=4)}
SHAPES = {
    "tp2": ("qwen3", 2, 1, 1, 1, 2),
    "ep2": ("qwen3", 1, 1, 1, 2, 2),
    "cp2 ep2": ("qwen3", 1, 1, 2, 2, 2),
    "tp2 ep2": ("qwen3", 2, 1, 1, 2, 4),
    "pp2 ep2": ("qwen3", 1, 2, 1, 2, 4),
    "ep2 dp4": ("qwen3", 1, 1, 1, 2, 4),
    "deepseek tp2": ("deepseek", 2, 1, 1, 1, 2),
    "deepseek pp2": ("deepseek", 1, 2, 1, 1, 2),
    "deepseek cp2 ep2": ("deepseek", 1, 1, 2, 2, 2),
    "deepseek tp2 ep2": ("deepseek", 2, 1, 1, 2, 4),
}
"""Model; tensor, pipeline, context and expert parallelism; ranks."""
KEPT = {2: None, 4: 0}
"""By ranks: four compute their layers again in the backward pass."""


@pytest.fixture(scope="module", params=SHAPES)
def trainers(request, cluster, tmp_path_factory) -> Iterator[tuple[RankedTrainer, TorchTrainer]]:
    name, *parallelism, ranks = SHAPES[request.param]
    folder = save(MODELS[name](), tmp_path_factory.mktemp("model"))
    factory = megatron_factory(str(folder), *parallelism, max_kept_tokens=KEPT[ranks])
    ranked = RankedTrainer(lambda: RankGroup(GroupShape(ranks), factory))
    yield ranked, TorchTrainer(BaseModel(MODELS[name]()), max_batch_tokens=BATCH_TOKENS)
    ranked.close()


def test_logprobs_loss_and_every_lora_gradient_equal_the_torch_trainers(trainers) -> None:
    ranked, single = trainers
    data = random_data(LENGTHS)
    single.add_model("m", LORA)
    run(single, random_data([6, 9], seed=9))
    single.optim_step("m", AdamParams(learning_rate=5e-2))
    ranked.add_model("m", LORA)
    ranked.import_state("m", single.export_state("m"))

    got, expected = run(ranked, data), run(single, data)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    assert got.metrics == pytest.approx(expected.metrics, abs=1e-4)
    assert_close(ranked.export_gradient("m"), single.export_gradient("m"), rtol=1e-4)


def test_five_steps_of_unequal_batches_go_alike(trainers) -> None:
    losses = []
    for trainer in trainers:
        trainer.add_model("m", LORA)
        losses.append([])
        for seed in range(5):
            output = run(trainer, random_data([*LENGTHS, 20 * seed + 1], seed=seed))
            trainer.optim_step("m", ADAM)
            losses[-1].append(output.metrics["loss:sum"])

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_one_example_leaves_other_replicas_nothing_but_their_experts(trainers) -> None:
    for trainer in trainers:
        trainer.add_model("m", LORA)

    got, expected = (run(trainer, random_data([9])) for trainer in trainers)

    np.testing.assert_allclose(got.logprobs[0], expected.logprobs[0], atol=1e-5)
    norms = [trainer.optim_step("m", ADAM) for trainer in trainers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
