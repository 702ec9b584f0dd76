"""Mixtures of experts on several megatron ranks against the torch trainer in this process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_planning.activations import SEPARATE
from tinkercloud_planning.families import read
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import training
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_testing.ranks.megatron import megatron_factory
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, TrainerOf, Trainers, often
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import save, tiny_deepseek_v3, tiny_qwen3_moe
from tinkercloud_testing.training.trainers import assert_close, gradient_of, moments_of, run
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 11, 8]
LORA = LoraConfig(rank=4, seed=1)
OF_ATTENTION = LoraConfig(rank=4, seed=1, train_mlp=False)
ADAM = AdamParams(learning_rate=1e-2)
CLIPPED = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=5)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_qwen3_moe,
    "deepseek": partial(tiny_deepseek_v3, num_hidden_layers=4),
}
Shape = tuple[str, int, int, int, int, int]
"""Model; tensor, pipeline, context and expert parallelism; ranks."""
SHAPES: dict[str, Shape] = {
    "tp2": ("qwen3", 2, 1, 1, 1, 2),
    "cp2 ep2": ("qwen3", 1, 1, 2, 2, 2),
    "tp2 ep2": ("qwen3", 2, 1, 1, 2, 4),
    "pp2 ep2": ("qwen3", 1, 2, 1, 2, 4),
    "ep2 dp4": ("qwen3", 1, 1, 1, 2, 4),
    "deepseek pp2": ("deepseek", 1, 2, 1, 1, 2),
    "deepseek cp2 ep2": ("deepseek", 1, 1, 2, 2, 2),
    "deepseek tp2 ep2": ("deepseek", 2, 1, 1, 2, 4),
}
OFTEN = ("tp2 ep2",)
"""The shapes that CI tries; `make test-long` tries the others."""
KEPT = {2: None, 4: 0}
"""By ranks: four compute their layers again in the backward pass."""


def test_a_killed_rank_loses_only_the_models_with_experts_on_it(
    cluster: None, tmp_path: Path
) -> None:
    folder = save(tiny_qwen3_moe(), tmp_path)
    factory = megatron_factory(str(folder), tensor=1, pipeline=1, expert=2)
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), factory))
    for name, config in {"experts": LORA, "attention": OF_ATTENTION}.items():
        ranked.add_model(name, config)
        run(ranked, random_data(LENGTHS), model_id=name)
        ranked.optim_step(name, ADAM)
    saved, kept = ranked.export_state("experts"), ranked.copy_weights("attention").tensors
    ranked.group.current.call("die_in", "forward_backward", 1)

    with pytest.raises(StateLost, match=r"model experts was lost .* from its last checkpoint"):
        run(ranked, random_data(LENGTHS), model_id="experts")
    assert_close(ranked.copy_weights("attention").tensors, kept, rtol=0)
    ranked.add_model("experts", LORA)
    ranked.import_state("experts", saved)

    assert_close(ranked.copy_weights("experts").tensors, saved.weights.tensors, rtol=0)
    ranked.close()


@pytest.fixture(scope="module", params=often(SHAPES, OFTEN))
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def trainers(
    shape: Shape, trainer_of: TrainerOf, tmp_path_factory: pytest.TempPathFactory
) -> Trainers:
    name, tensor, pipeline, context, expert, ranks = shape
    folder = save(MODELS[name](), tmp_path_factory.mktemp("model"))
    factory = megatron_factory(
        str(folder), tensor, pipeline, context, expert, max_kept_tokens=KEPT[ranks]
    )
    single = TorchTrainer(TorchBaseModel(MODELS[name]()), max_batch_tokens=BATCH_TOKENS)
    return trainer_of(ranks, factory), single


def of_every_rank(ranked: RankedTrainer, method: str, model_id: str) -> list[Any]:
    group = ranked.group.current
    return group.call_each(method, [(model_id,)] * group.shape.ranks)


def test_logprobs_loss_and_every_lora_gradient_equal_the_torch_trainers(trainers: Trainers) -> None:
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
    np.testing.assert_array_equal(got.expert_tokens, expected.expert_tokens)
    assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-4)


def test_the_size_of_an_adapter_at_each_rank_is_known_before_it_exists(trainers: Trainers) -> None:
    ranked, _ = trainers
    group = ranked.group.current

    sizes = group.call_each("adapter_size", [(LORA,)] * group.shape.ranks)
    ranked.add_model("m", LORA)

    reports = group.call_each("memory", [()] * group.shape.ranks)
    assert sizes == [report.models["m"].full // 16 for report in reports]


def test_ten_steps_of_unequal_batches_go_alike(trainers: Trainers) -> None:
    losses: list[list[float]] = []
    for trainer in trainers:
        trainer.add_model("m", LORA)
        losses.append([])
        for seed in range(10):
            output = run(trainer, random_data([*LENGTHS[seed % 5 :], 6 * seed + 1], seed=seed))
            trainer.optim_step("m", ADAM)
            losses[-1].append(output.metrics["loss:sum"])

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "whole"])
def test_a_rank_holds_what_is_planned(
    trainers: Trainers, shape: Shape, lora: LoraConfig | None
) -> None:
    ranked, _ = trainers
    name, tensor, pipeline, context, expert, ranks = shape
    # Engines hold what compresses for latent attention whole, which megatron divides.
    is_less = lora is None and name == "deepseek" and tensor > 1
    least = 0.93 if is_less else 1.0
    layout = Layout(tensor, pipeline, context, expert, ranks // (tensor * pipeline * context))
    ranked.add_model("m", lora)
    ranked.optim_step("m", ADAM)

    held = of_every_rank(ranked, "trained_elements", "m")

    architecture = read(MODELS[name]().config.to_dict())
    rank = None if lora is None else lora.rank
    planned, whole = (
        training(architecture, split, tokens=1, lora_rank=rank, kernels=SEPARATE).trained
        for split in (layout, Layout())
    )
    assert least * planned <= 4 * max(held) <= planned < whole


def test_a_seed_gives_the_same_adapter_and_without_one_copies_start_equal(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    for trainer in trainers:
        trainer.add_model("m", LORA)
    assert_close(ranked.copy_weights("m").tensors, single.copy_weights("m").tensors, rtol=0)
    ranked.add_model("m", LoraConfig(rank=4))
    run(ranked, random_data(LENGTHS))
    ranked.optim_step("m", ADAM)

    whole = ranked.copy_weights("m").tensors

    held = of_every_rank(ranked, "held", "m")
    for name, tensor in whole.items():
        of_ranks = [tensors[name] for tensors in held if name in tensors]
        parts = {part.numpy().tobytes(): part.numel() for part in of_ranks}
        assert sum(parts.values()) == tensor.numel(), name


def test_a_state_of_distributed_experts_continues_at_the_torch_trainer_and_comes_back(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    for trainer in trainers:
        trainer.add_model("m", LORA)
    for seed in range(2):
        run(ranked, random_data(LENGTHS, seed=seed))
        ranked.optim_step("m", ADAM)
    run(ranked, random_data(LENGTHS, seed=2))
    state, gradient = ranked.export_state("m"), gradient_of(ranked)

    for trainer in (single, ranked):
        trainer.import_state("m", state)
        trainer.import_gradient("m", gradient)

    returned = ranked.export_state("m")
    assert_close(returned.weights.tensors, state.weights.tensors, rtol=0)
    assert_close(moments_of(returned), moments_of(state), rtol=0)
    assert_close(gradient_of(ranked), gradient, rtol=0)
    clipped = AdamParams(learning_rate=1e-2, grad_clip_norm=1)
    norms = [trainer.optim_step("m", clipped) for trainer in (ranked, single)]
    assert norms[0] == pytest.approx(norms[1])
    assert_close(ranked.copy_weights("m").tensors, single.copy_weights("m").tensors, rtol=1e-6)


def test_a_fully_fine_tuned_mixture_has_the_torch_trainers_gradients_and_steps(
    trainers: Trainers,
) -> None:
    ranked, _ = trainers
    for trainer in trainers:
        trainer.add_model("m", None)
        run(trainer, random_data(LENGTHS))
    gradients = [gradient_of(trainer) for trainer in trainers]
    assert_close(*gradients, rtol=1e-4)
    ranked.import_gradient("m", gradients[1])
    assert_close(gradient_of(ranked), gradients[1], rtol=0)

    steps = []
    for trainer in trainers:
        steps.append([trainer.optim_step("m", CLIPPED)["grad_norm"]])
        for seed in range(2):
            output = run(trainer, random_data([*LENGTHS, 1 + seed], seed=seed))
            norm = trainer.optim_step("m", CLIPPED)["grad_norm"]
            steps[-1] += [output.metrics["loss:sum"], norm]

    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-4)
    states = [trainer.export_state("m") for trainer in trainers]
    assert_close(states[0].weights.tensors, states[1].weights.tensors, rtol=1e-3)
    ranked.import_state("m", states[1])
    assert_close(moments_of(ranked.export_state("m")), moments_of(states[1]), rtol=0)


def test_one_example_leaves_other_replicas_nothing_but_their_experts(trainers: Trainers) -> None:
    for trainer in trainers:
        trainer.add_model("m", LORA)

    got, expected = (run(trainer, random_data([9])) for trainer in trainers)

    np.testing.assert_allclose(got.logprobs[0], expected.logprobs[0], atol=1e-5)
    norms = [trainer.optim_step("m", ADAM) for trainer in trainers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
