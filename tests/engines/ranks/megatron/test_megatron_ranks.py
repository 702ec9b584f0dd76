"""The megatron trainer on several ranks against PEFT and the torch trainer in this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_testing.ranks.megatron import megatron_factory
from tinkercloud_testing.ranks.ranks import (
    BATCH_TOKENS,
    TrainerOf,
    Trainers,
    often,
    weights_at_ranks,
)
from tinkercloud_testing.small_models.data import a_request, counting_every_token, random_data
from tinkercloud_testing.small_models.models import (
    VOCAB_SIZE,
    save,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tinkercloud_testing.training.peft_twin import PeftTwin
from tinkercloud_testing.training.trainers import (
    assert_close,
    gradient_of,
    moments_of,
    run,
    ten_changing_steps,
)
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 11, 8]
LORA = LoraConfig(rank=4, seed=1)
OF_ANOTHER_RANK = LoraConfig(rank=8, seed=2)
OF_OUTPUT_LAYER = LoraConfig(rank=4, seed=1, train_attn=False, train_mlp=False)
ADAM = AdamParams(learning_rate=1e-2)
CLIPPED = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=5)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}
Shape = tuple[str, int, int, int, int]
"""Model; tensor, pipeline and context parallelism; ranks."""
SHAPES: dict[str, Shape] = {
    "tp2": ("llama", 2, 1, 1, 2),
    "pp2": ("llama", 1, 2, 1, 2),
    "pp2 qwen3": ("qwen3", 1, 2, 1, 2),
    "cp2": ("llama", 1, 1, 2, 2),
    "dp2": ("llama", 1, 1, 1, 2),
    "tp2 pp2 qwen2": ("qwen2", 2, 2, 1, 4),
    "tp2 cp2 qwen3": ("qwen3", 2, 1, 2, 4),
    "cp2 dp2 mistral": ("mistral", 1, 1, 2, 4),
}
OFTEN = ("tp2 pp2 qwen2", "cp2 dp2 mistral")
"""The shapes that CI tries; `make test-long` tries the others."""
KEPT = {2: None, 4: 0}
"""By ranks: four compute their layers again in the backward pass."""


@pytest.mark.long
def test_a_full_model_that_no_surviving_rank_holds_is_lost_and_can_be_restored(
    cluster: None, tmp_path: Path
) -> None:
    factory = megatron_factory(str(save(tiny_llama(), tmp_path)), tensor=2, pipeline=1)
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), factory))
    ranked.add_model("m", None)
    run(ranked, random_data(LENGTHS))
    ranked.optim_step("m", ADAM)
    saved = ranked.export_state("m")
    ranked.group.current.call("die_in", "forward_backward", 1)

    with pytest.raises(StateLost, match=r"model m was lost .* from its last checkpoint"):
        run(ranked, random_data(LENGTHS))
    ranked.add_model("m", None)
    ranked.import_state("m", saved)

    assert_close(ranked.copy_weights("m").tensors, saved.weights.tensors, rtol=0)
    ranked.close()


def test_a_full_model_over_a_base_in_bfloat16_is_published_in_it(
    trainer_of: TrainerOf, tmp_path: Path
) -> None:
    folder = str(save(tiny_llama(), tmp_path))
    ranked = trainer_of(2, megatron_factory(folder, 2, 1, dtype=torch.bfloat16))
    ranked.add_model("m", None)
    run(ranked, random_data(LENGTHS))
    ranked.optim_step("m", ADAM)

    saved, published = ranked.copy_weights("m"), ranked.publication("m")()

    assert isinstance(published, WeightsCopy)
    assert {each.dtype for each in saved.tensors.values()} == {torch.float32}
    assert published.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(published.tensors[name], tensor.to(torch.bfloat16)), name


@pytest.fixture(scope="module", params=often(SHAPES, OFTEN))
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def trainers(
    shape: Shape, trainer_of: TrainerOf, tmp_path_factory: pytest.TempPathFactory
) -> Trainers:
    name, tensor, pipeline, context, ranks = shape
    folder: Path = save(MODELS[name](), tmp_path_factory.mktemp("model"))
    factory = megatron_factory(str(folder), tensor, pipeline, context, max_kept_tokens=KEPT[ranks])
    return trainer_of(ranks, factory), a_torch_trainer(name)


def a_torch_trainer(name: str) -> TorchTrainer:
    return TorchTrainer(TorchBaseModel(MODELS[name]()), max_batch_tokens=BATCH_TOKENS)


def move(single: TorchTrainer) -> None:
    """Give it the adapter of a seed, whose B has moved off zero."""
    single.add_model("m", LORA)
    run(single, random_data([6, 9], seed=9))
    single.optim_step("m", AdamParams(learning_rate=5e-2))


def begin_alike(ranked: RankedTrainer, single: TorchTrainer) -> None:
    """Give both the same adapter, whose B has moved off zero."""
    move(single)
    ranked.add_model("m", LORA)
    ranked.import_state("m", single.export_state("m"))


@dataclass(frozen=True)
class OfPeft:
    """What PEFT computes."""

    logprobs: np.ndarray
    """Concatenated logprobs of the data, with the trained adapter."""
    gradients: Mapping[str, Tensor]
    losses: list[float]
    """Losses of ten steps, with a new adapter."""


@cache
def of_peft(name: str) -> OfPeft:
    """Compute what all shapes of a model are held to."""
    single, data = a_torch_trainer(name), random_data(LENGTHS)
    single.add_model("m", LORA)
    fresh = PeftTwin(MODELS[name](), single.copy_weights("m"))
    move(single)
    moved = PeftTwin(MODELS[name](), single.copy_weights("m"))
    moved.backward(data)
    return OfPeft(
        np.concatenate(moved.logprobs(data)),
        moved.gradients(),
        fresh.steps(ten_changing_steps(LENGTHS)),
    )


def test_logprobs_loss_and_every_lora_gradient_equal_the_torch_trainers_and_pefts(
    shape: Shape, trainers: Trainers
) -> None:
    ranked, single = trainers
    begin_alike(ranked, single)
    data, pefts = random_data(LENGTHS), of_peft(shape[0])

    got, expected = run(ranked, data), run(single, data)

    assert [len(logprobs) for logprobs in got.logprobs] == LENGTHS
    for logprobs in (np.concatenate(expected.logprobs), pefts.logprobs):
        np.testing.assert_allclose(np.concatenate(got.logprobs), logprobs, atol=1e-5)
    assert got.metrics == pytest.approx(expected.metrics, abs=1e-4)
    for gradients in (gradient_of(single), pefts.gradients):
        assert_close(gradient_of(ranked), gradients, rtol=1e-4)


@pytest.mark.parametrize("config", [LORA, None], ids=["adapter", "whole model"])
def test_no_rank_ever_holds_more_of_a_positions_logits_than_its_part_of_the_vocabulary(
    shape: Shape, trainers: Trainers, config: LoraConfig | None
) -> None:
    _, tensor, *_, ranks = shape
    ranked, _ = trainers
    ranked.add_model("m", config)
    batch = prepare(a_request(random_data(LENGTHS)), ranked.limits)

    made = ranked.group.current.call_each("matrices", [("m", batch)] * ranks)

    assert max(max(shape) for shapes in made for shape in shapes) == VOCAB_SIZE // tensor


def test_what_is_computed_between_divided_weights_is_divided_along_the_sequence(
    shape: Shape, trainers: Trainers
) -> None:
    name, tensor, _, context, ranks = shape
    ranked, _ = trainers
    ranked.add_model("m", LORA)
    batch = prepare(a_request(random_data([BATCH_TOKENS // 4] * 4)), ranked.limits)

    made = ranked.group.current.call_each("matrices", [("m", batch)] * ranks)

    part = (BATCH_TOKENS // (tensor * context), 1, MODELS[name]().config.hidden_size)
    assert all(part in shapes for shapes in made)


def test_replicas_have_as_much_to_compute_in_micro_batches_within_the_budget(
    shape: Shape, trainers: Trainers
) -> None:
    *_, ranks = shape
    ranked, _ = trainers
    ranked.add_model("m", LORA)

    # Ranks that divide sequences make the short ones longer.
    run(ranked, random_data([16] + [1] * 16))

    computed = ranked.group.current.call_each("positions", [()] * ranks)
    assert len({sum(positions) for positions in computed}) == 1
    assert max(map(max, computed)) <= BATCH_TOKENS


@pytest.mark.parametrize("config", [LORA, None], ids=["adapter", "whole model"])
def test_gradients_add_up_over_requests_as_if_their_data_had_come_at_once(
    trainers: Trainers, config: LoraConfig | None
) -> None:
    ranked, _ = trainers
    data = random_data(LENGTHS)
    gradients = []
    for requests in ([data], [data[:2], data[2:3], data[3:]]):
        ranked.add_model("m", config)
        run(ranked, random_data([6, 9], seed=9))
        ranked.optim_step("m", ADAM)
        for request in requests:
            run(ranked, request)
        gradients.append(gradient_of(ranked))

    assert_close(gradients[1], gradients[0], rtol=1e-5)


def test_a_loss_over_whole_sequences_has_the_torch_trainers_gradient(trainers: Trainers) -> None:
    ranked, single = trainers
    begin_alike(ranked, single)
    data = counting_every_token(random_data(LENGTHS, policy=True))

    for trainer in trainers:
        run(trainer, data, "gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})

    assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-4)


def test_an_adapter_of_the_lm_head_alone_has_the_torch_trainers_gradient(
    trainers: Trainers,
) -> None:
    gradients = []
    for trainer in trainers:
        trainer.add_model("m", OF_OUTPUT_LAYER)
        run(trainer, random_data([6, 9], seed=9))
        trainer.optim_step("m", ADAM)
        run(trainer, random_data(LENGTHS))
        gradients.append(gradient_of(trainer))

    assert_close(*gradients, rtol=1e-4)


def test_adapters_start_equal_ten_changing_steps_go_as_pefts_and_the_copies_stay_equal(
    shape: Shape, trainers: Trainers
) -> None:
    ranked, single = trainers
    losses: list[list[float]] = []
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
        losses.append([])
        for data, params in ten_changing_steps(LENGTHS):
            output = run(trainer, data)
            trainer.optim_step("m", params)
            losses[-1].append(output.metrics["loss:sum"])

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0], of_peft(shape[0]).losses, rtol=1e-5)
    first, *copies = weights_at_ranks(ranked.group.current, "m")
    for copy in copies:
        assert_close(copy, first, rtol=0)


def test_a_step_of_one_adapter_leaves_another_as_it_is_on_every_rank(trainers: Trainers) -> None:
    ranked, _ = trainers
    for name, config in {"m": LORA, "other": OF_ANOTHER_RANK}.items():
        ranked.add_model(name, config)
        run(ranked, random_data([6, 9], seed=9), model_id=name)
        ranked.optim_step(name, ADAM)
    before = weights_at_ranks(ranked.group.current, "other")
    moments = moments_of(ranked.export_state("other"))

    run(ranked, random_data(LENGTHS))
    assert ranked.export_gradient("other") is None
    ranked.optim_step("m", ADAM)

    assert ranked.export_gradient("other") is None
    assert_close(moments_of(ranked.export_state("other")), moments, rtol=0)
    for rank, weights in enumerate(weights_at_ranks(ranked.group.current, "other")):
        assert_close(weights, before[rank], rtol=0)


def by_turns(
    ranked: RankedTrainer, models: Mapping[str, LoraConfig | None]
) -> dict[str, tuple[list[float], Mapping[str, Tensor]]]:
    """Have models take two steps, all of them with a gradient before the first one takes its.

    Returns:
        Of each, losses and norms of gradients, and weights.
    """
    figures: dict[str, list[float]] = {name: [] for name in models}
    for name, config in models.items():
        ranked.add_model(name, config)
    for data, _ in ten_changing_steps(LENGTHS)[:2]:
        for name in models:
            figures[name].append(run(ranked, data, model_id=name).metrics["loss:sum"])
        for name in models:
            figures[name].append(ranked.optim_step(name, CLIPPED)["grad_norm"])
    return {name: (figures[name], ranked.copy_weights(name).tensors) for name in models}


def test_adapters_and_a_full_model_take_steps_by_turns_as_each_does_alone_bit_for_bit(
    trainers: Trainers,
) -> None:
    ranked, _ = trainers
    models = {"m": LORA, "other": OF_ANOTHER_RANK, "whole": None}
    for name in tuple(ranked.group.held.names):
        ranked.remove_model(name)
    alone: dict[str, tuple[list[float], Mapping[str, Tensor]]] = {}
    for name, config in models.items():
        alone |= by_turns(ranked, {name: config})
        ranked.remove_model(name)

    together = by_turns(ranked, models)

    for name, (figures, weights) in together.items():
        assert figures == alone[name][0]
        assert_close(weights, alone[name][1], rtol=0)


def test_a_state_of_sharded_ranks_continues_at_the_torch_trainer(trainers: Trainers) -> None:
    ranked, single = trainers
    ranked.add_model("m", LORA)
    run(ranked, random_data(LENGTHS))
    ranked.optim_step("m", ADAM)
    run(ranked, random_data(LENGTHS, seed=2))
    single.add_model("m", LORA)
    single.import_state("m", ranked.export_state("m"))
    single.import_gradient("m", gradient_of(ranked))

    norms = [trainer.optim_step("m", ADAM) for trainer in (ranked, single)]

    assert norms[0] == pytest.approx(norms[1])
    assert_close(ranked.copy_weights("m").tensors, single.copy_weights("m").tensors, rtol=1e-6)


def test_every_weight_of_a_full_model_has_the_torch_trainers_gradient(trainers: Trainers) -> None:
    for trainer in trainers:
        trainer.add_model("m", None)

    got, expected = (run(trainer, random_data(LENGTHS)) for trainer in trainers)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    gradients = [gradient_of(trainer) for trainer in trainers]
    assert_close(*gradients, rtol=1e-4)
    ranked, _ = trainers
    ranked.import_gradient("m", gradients[1])
    assert_close(gradient_of(ranked), gradients[1], rtol=0)


def test_ten_clipped_steps_of_a_full_model_go_as_the_torch_trainers(trainers: Trainers) -> None:
    steps: list[list[tuple[float, float]]] = []
    for trainer in trainers:
        trainer.add_model("m", None)
        steps.append([])
        for seed in range(10):
            output = run(trainer, random_data([*LENGTHS, 1 + seed], seed=seed))
            norm = trainer.optim_step("m", CLIPPED)["grad_norm"]
            steps[-1].append((output.metrics["loss:sum"], norm))

    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)
    states = [trainer.export_state("m") for trainer in trainers]
    assert states[0].step == states[1].step == 10
    assert_close(states[0].weights.tensors, states[1].weights.tensors, rtol=1e-3)


def test_a_full_model_continues_at_the_torch_trainer_and_comes_back_bit_for_bit(
    trainers: Trainers,
) -> None:
    ranked, single = trainers
    for trainer in trainers:
        trainer.add_model("m", None)
    run(ranked, random_data(LENGTHS))
    ranked.optim_step("m", CLIPPED)
    state = ranked.export_state("m")

    single.import_state("m", state)
    ranked.import_state("m", single.export_state("m"))

    returned = ranked.export_state("m")
    assert_close(returned.weights.tensors, state.weights.tensors, rtol=0)
    assert_close(moments_of(returned), moments_of(state), rtol=0)
    steps = []
    for trainer in trainers:
        run(trainer, random_data(LENGTHS, seed=1))
        steps.append(trainer.optim_step("m", CLIPPED))
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)
    assert steps[0]["step"] == 2


def test_one_example_leaves_other_replicas_without_work(trainers: Trainers) -> None:
    ranked, single = trainers
    for trainer in trainers:
        trainer.add_model("m", LORA)

    got, expected = run(ranked, random_data([9])), run(single, random_data([9]))

    np.testing.assert_allclose(got.logprobs[0], expected.logprobs[0], atol=1e-5)
    assert ranked.optim_step("m", ADAM) == pytest.approx(single.optim_step("m", ADAM), rel=1e-4)
