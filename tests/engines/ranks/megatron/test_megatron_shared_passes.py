"""Adapters that share passes at megatron-core ranks get what each gets alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.ranks.megatron import megatron_factory
from tinkercloud_testing.ranks.ranks import TrainerOf, often
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v3,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import assert_close, gradient_of
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, RanksLost
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

BATCH_TOKENS = 64
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
ADAPTERS = {
    "head": LoraConfig(rank=2, seed=2, train_attn=False, train_mlp=False),
    "attention": LoraConfig(rank=4, seed=4, train_mlp=False),
    "all": LoraConfig(rank=8, seed=8),
    "mlp": LoraConfig(rank=3, seed=3, train_attn=False, train_unembed=False),
}
"""The adapters that share passes. That of the LM head has no backward pass through layers."""
LOSSES = {"attention": "importance_sampling", "all": "ppo"}
"""Losses of the adapters; that of the others is cross_entropy."""
SEVERAL = {"head": [9], "attention": [3, 4], "all": [7, 2, 8], "mlp": [5]}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "mixture": tiny_qwen3_moe,
    "deepseek": partial(tiny_deepseek_v3, num_hidden_layers=4),
}
Shape = tuple[str, int, int, int, int, int]
"""Model; tensor, pipeline, context and expert parallelism; ranks."""
SHAPES: dict[str, Shape] = {
    "tp2": ("llama", 2, 1, 1, 1, 2),
    "pp2": ("llama", 1, 2, 1, 1, 2),
    "mixture tp2": ("mixture", 2, 1, 1, 1, 2),
    "dp4": ("llama", 1, 1, 1, 1, 4),
    "tp2 cp2": ("qwen3", 2, 1, 2, 1, 4),
    "mixture ep2 dp4": ("mixture", 1, 1, 1, 2, 4),
    "mixture pp2 ep2": ("mixture", 1, 2, 1, 2, 4),
    "deepseek tp2 ep2": ("deepseek", 2, 1, 1, 2, 4),
}
OFTEN = ("tp2 cp2", "mixture ep2 dp4")
"""The shapes that CI tries; `make test-long` tries the others."""
KEPT = {2: None, 4: 0}
"""By ranks: four compute their layers again in the backward pass."""


def test_a_rank_that_rejects_a_shared_pass_loses_the_group_and_each_runs_alone(
    cluster: None, tmp_path: Path
) -> None:
    factory = megatron_factory(str(save(tiny_llama(), tmp_path)), tensor=2, pipeline=1)
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), factory))
    items = [a_pass(ranked, name, [4]) for name in ("attention", "all")]
    for item in items:
        ranked.add_model(item.model_id, ADAPTERS[item.model_id])
    # The other rank has succeeded, or waits for this one.
    ranked.group.current.call("fail_in", "_shared_pass", InvalidRequest, [1])

    with pytest.raises(RanksLost, match=r"rank 1 of 2 failed in shared_pass: .* no room for it"):
        run_together(ranked, items)

    for item in items:
        assert run(ranked, item).metrics["tokens:sum"] == 4
    ranked.close()


@pytest.fixture(scope="module", params=often(SHAPES, OFTEN))
def started(
    request: pytest.FixtureRequest, trainer_of: TrainerOf, tmp_path_factory: pytest.TempPathFactory
) -> RankedTrainer:
    """A trainer with each adapter twice: one shares passes, the other runs alone."""
    name, tensor, pipeline, context, expert, ranks = SHAPES[request.param]
    folder = save(MODELS[name](), tmp_path_factory.mktemp("model"))
    factory = megatron_factory(
        str(folder),
        tensor,
        pipeline,
        context,
        expert,
        max_kept_tokens=KEPT[ranks],
        max_batch_tokens=BATCH_TOKENS,
    )
    trainer = trainer_of(ranks, factory)
    for adapter, lora in ADAPTERS.items():
        for model_id in (adapter, alone(adapter)):
            trainer.add_model(model_id, lora)
            run(trainer, replace(a_pass(trainer, adapter, [4, 6], seed=9), model_id=model_id))
            trainer.optim_step(model_id, ADAM)
    return trainer


@pytest.fixture
def ranked(started: RankedTrainer) -> RankedTrainer:
    """The trainer, without gradients."""
    for adapter in ADAPTERS:
        for model_id in (adapter, alone(adapter)):
            started.discard_gradient(model_id)
    return started


@contextmanager
def restored_afterwards(trainer: RankedTrainer) -> Iterator[None]:
    """Give all adapters their weights and moments back."""
    names = [model_id for adapter in ADAPTERS for model_id in (adapter, alone(adapter))]
    states = {model_id: trainer.export_state(model_id) for model_id in names}
    yield
    for model_id, state in states.items():
        trainer.import_state(model_id, state)


def alone(name: str) -> str:
    return f"{name}-alone"


def a_pass(
    trainer: RankedTrainer,
    name: str,
    lengths: Sequence[int],
    *,
    seed: int = 1,
    forward_only: bool = False,
) -> TrainingPass:
    loss_fn = LOSSES.get(name, "cross_entropy")
    data = random_data(lengths, seed=seed, policy=name in LOSSES)
    request = a_request(data, loss_fn, forward_only=forward_only)
    return TrainingPass(name, prepare(request, trainer.limits))


def run(trainer: RankedTrainer, item: TrainingPass) -> LossOutput:
    compute = trainer.forward if item.batch.forward_only else trainer.forward_backward
    return compute(item.model_id, item.batch)


def nothing() -> None: ...


def run_together(trainer: RankedTrainer, items: Sequence[TrainingPass]) -> Sequence[LossOutput]:
    assert trainer.batcher.can_batch(items[:-1], items[-1])
    return trainer.batcher.run_batch(items, nothing)


def assert_as_alone(trainer: RankedTrainer, item: TrainingPass, output: LossOutput) -> None:
    """Run the same at the adapter's twin, and compare outputs and, if there are any, gradients."""
    expected = run(trainer, replace(item, model_id=alone(item.model_id)))
    for logprobs, others in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-5)
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    np.testing.assert_array_equal(output.expert_tokens, expected.expert_tokens)
    if not item.batch.forward_only:
        gradients = (gradient_of(trainer, name) for name in (item.model_id, alone(item.model_id)))
        assert_close(*gradients, rtol=1e-4)


@pytest.mark.parametrize(
    "lengths",
    [SEVERAL, {"all": [9], "mlp": [9]}, {"head": [16], "attention": [14]}],
    ids=["several", "one example each", "no adapter of mlps"],
)
def test_adapters_of_mixed_ranks_layers_and_losses_get_what_each_gets_alone(
    ranked: RankedTrainer, lengths: dict[str, list[int]]
) -> None:
    items = [a_pass(ranked, name, own) for name, own in lengths.items()]

    outputs = run_together(ranked, items)

    for item, output in zip(items, outputs, strict=True):
        assert_as_alone(ranked, item, output)


def test_forward_passes_are_shared_and_change_no_gradient(ranked: RankedTrainer) -> None:
    items = [a_pass(ranked, name, own, forward_only=True) for name, own in SEVERAL.items()]

    outputs = run_together(ranked, items)

    for item, output in zip(items, outputs, strict=True):
        assert_as_alone(ranked, item, output)
        assert ranked.export_gradient(item.model_id) is None


def test_steps_behind_shared_passes_go_as_those_of_each_alone(ranked: RankedTrainer) -> None:
    with restored_afterwards(ranked):
        for seed in range(2):
            items = [a_pass(ranked, name, own, seed=seed) for name, own in SEVERAL.items()]
            run_together(ranked, items)
            for item in items:
                run(ranked, replace(item, model_id=alone(item.model_id)))
            for name in SEVERAL:
                norms = [ranked.optim_step(each, ADAM)["grad_norm"] for each in (name, alone(name))]
                assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_diverged_adapter_changes_nothing_of_others(ranked: RankedTrainer) -> None:
    items = [a_pass(ranked, name, own) for name, own in SEVERAL.items()]
    with restored_afterwards(ranked):
        state = ranked.export_state("all")
        nan = {name: each * float("nan") for name, each in state.weights.tensors.items()}
        ranked.import_state("all", replace(state, weights=replace(state.weights, tensors=nan)))

        outputs = run_together(ranked, items)

        for item, output in zip(items, outputs, strict=True):
            if item.model_id == "all":
                assert all(np.isnan(logprobs).all() for logprobs in output.logprobs)
            else:
                assert_as_alone(ranked, item, output)


def test_the_padding_of_examples_counts_towards_the_size_of_a_pass(ranked: RankedTrainer) -> None:
    replicas = 1 + max(membership.replica for membership in ranked.memberships())
    multiple = ranked.memberships()[0].pad_to_multiple_of
    first = a_pass(ranked, "all", [1])
    most = replicas * BATCH_TOKENS // multiple

    assert ranked.batcher.can_batch([first], a_pass(ranked, "mlp", [1] * (most - 1)))
    assert not ranked.batcher.can_batch([first], a_pass(ranked, "mlp", [1] * most))
