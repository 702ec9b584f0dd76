"""Models that share passes and optimizer steps at the ranks of a torch trainer."""

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, TrainerConfig
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.ranks.ranks import (
    BATCH_TOKENS,
    MeasuredTrainer,
    MortalTrainer,
    TrainerOf,
    actors_of,
    often,
)
from tinkercloud_testing.small_models.data import a_request, counting_every_token, random_data
from tinkercloud_testing.small_models.models import save, tiny_llama, tiny_qwen3_moe
from tinkercloud_testing.training.trainers import assert_close, assert_equal, gradient_of, together
from tinkercloud_testing.training.uploaded_losses import processes, uploaded
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, RanksLost
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.build_trainer import torch_rank
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.ranks import SharedPassFailed
from tinkercloud_worker.engine.trainer import GradientLost, LossOutput, OptimizerStep, TrainingPass
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground, Pieces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
ADAPTERS = {
    "small": LoraConfig(rank=2, seed=2, train_attn=False, train_mlp=False),
    "middle": LoraConfig(rank=4, seed=4, train_mlp=False),
    "large": LoraConfig(rank=8, seed=8),
}
"""The adapters that share passes. The small one trains the LM head only, and has no backward pass
through layers."""
LOSSES = {"small": "cross_entropy", "middle": "importance_sampling", "large": "ppo"}
KINDS: dict[str, tuple[int, Callable[[], Any]]] = {
    "replicas": (2, MortalTrainer),
    "sharded": (2, MeasuredTrainer),
    "sharded mixture": (3, partial(MeasuredTrainer, 0, make=tiny_qwen3_moe)),
}
"""How many ranks there are, and what makes the trainer of one. Those of the mixture compute layers
again in the backward pass."""
SHARDED = [kind for kind in KINDS if kind != "replicas"]


@pytest.fixture(scope="module", params=often(KINDS, ("replicas",)))
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def started(cluster: None, kind: str) -> Iterator[RankedTrainer]:
    ranks, factory = KINDS[kind]
    trainer = RankedTrainer(lambda _: RankGroup(GroupShape(ranks), factory))
    yield trainer
    trainer.close()


@pytest.fixture
def ranked(started: RankedTrainer) -> Iterator[RankedTrainer]:
    """A trainer with each adapter twice: one shares passes, the other runs alone."""
    models = {alias: lora for name, lora in ADAPTERS.items() for alias in (name, alone(name))}
    for model_id, lora in models.items():
        started.add_model(model_id, lora)
        run(started, a_pass(started, model_id, [4, 6], seed=9))
        started.optim_step(model_id, ADAM)
    yield started
    for model_id in models:
        started.remove_model(model_id)


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread(on_crash=lambda error: pytest.fail(repr(error)))
    thread.start(NoBackground())
    yield thread
    thread.stop()


def alone(name: str) -> str:
    return f"{name}-alone"


def a_pass(
    trainer: RankedTrainer,
    model_id: str,
    lengths: Sequence[int],
    *,
    seed: int = 1,
    loss_fn: str = "cross_entropy",
    forward_only: bool = False,
) -> TrainingPass:
    data = random_data(lengths, seed=seed, policy=loss_fn != "cross_entropy")
    request = a_request(data, loss_fn, forward_only=forward_only)
    return TrainingPass(model_id, prepare(request, trainer.limits))


def run(trainer: RankedTrainer, item: TrainingPass) -> LossOutput:
    return trainer.forward_backward(item.model_id, item.batch)


def shared(
    trainer: RankedTrainer, lengths: Sequence[Sequence[int]], *, forward_only: bool = False
) -> list[TrainingPass]:
    return [
        a_pass(trainer, name, own, loss_fn=LOSSES[name], forward_only=forward_only)
        for name, own in zip(ADAPTERS, lengths, strict=False)
    ]


def same_alone(items: Sequence[TrainingPass]) -> list[TrainingPass]:
    return [TrainingPass(alone(item.model_id), item.batch) for item in items]


def nothing() -> None: ...


def assert_fit(trainer: RankedTrainer, items: Sequence[TrainingPass]) -> None:
    assert trainer.batcher.can_batch(items[:-1], items[-1])


def assert_alike(ours: LossOutput, theirs: LossOutput) -> None:
    for logprobs, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    np.testing.assert_array_equal(ours.expert_tokens, theirs.expert_tokens)


def run_in_pieces(pieces: Pieces[LossOutput], between: Callable[[], Any]) -> LossOutput:
    while True:
        try:
            next(pieces)
        except StopIteration as stop:
            output: LossOutput = stop.value
            return output
        between()


def test_a_large_request_in_company_runs_in_pieces_with_the_results_of_one_that_is_alone(
    ranked: RankedTrainer,
) -> None:
    item = a_pass(ranked, "large", [100] * 16, loss_fn="ppo")
    [whole] = same_alone([item])
    [other] = shared(ranked, [[5]])
    turns_of_others: list[LossOutput] = []

    output = run_in_pieces(
        ranked.batcher.pieces(item, lambda: 1), lambda: turns_of_others.append(run(ranked, other))
    )

    assert turns_of_others
    assert_alike(output, run(ranked, whole))
    ours, theirs = gradient_of(ranked, "large"), gradient_of(ranked, alone("large"))
    assert_close(ours, theirs, rtol=1e-5)


def test_a_large_request_without_company_runs_in_one_piece(ranked: RankedTrainer) -> None:
    item = a_pass(ranked, "large", [100] * 16)

    output = run_in_pieces(
        ranked.batcher.pieces(item, lambda: None), lambda: pytest.fail("a second piece")
    )

    assert len(output.logprobs) == 16


@pytest.mark.parametrize(
    "lengths",
    [([5, 9], [3], [7, 2, 8]), ([4], [4], [4]), ([9], [6], [6]), ([4], [4])],
    ids=["several", "one example each", "one rank trains the LM head only", "two examples"],
)
def test_models_of_mixed_ranks_get_what_each_gets_alone(
    ranked: RankedTrainer, lengths: Sequence[Sequence[int]]
) -> None:
    items = shared(ranked, lengths)
    assert_fit(ranked, items)

    outputs = ranked.batcher.run_batch(items, nothing)

    for item, same, output in zip(items, same_alone(items), outputs, strict=True):
        assert_alike(output, run(ranked, same))
        gradients = (gradient_of(ranked, each.model_id) for each in (item, same))
        assert_close(*gradients, rtol=1e-5)


def test_company_leaves_a_pass_that_runs_alone_its_bits(ranked: RankedTrainer) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    before = run(ranked, same_alone(items)[2])
    gradient = gradient_of(ranked, alone("large"))
    ranked.discard_gradient(alone("large"))

    ranked.batcher.run_batch(items, nothing)
    after = run(ranked, same_alone(items)[2])

    assert after.metrics == before.metrics
    np.testing.assert_array_equal(np.concatenate(after.logprobs), np.concatenate(before.logprobs))
    assert_equal(gradient_of(ranked, alone("large")), gradient, atol=0)


@pytest.mark.parametrize("lengths", [([5, 9], [3], [7, 2, 8]), ([4], [4])], ids=str)
def test_forward_passes_are_shared_and_change_no_gradient(
    ranked: RankedTrainer, lengths: Sequence[Sequence[int]]
) -> None:
    items = shared(ranked, lengths, forward_only=True)
    assert_fit(ranked, items)

    outputs = ranked.batcher.run_batch(items, nothing)

    for item, output in zip(items, outputs, strict=True):
        assert_alike(output, ranked.forward(item.model_id, item.batch))
        assert ranked.export_gradient(item.model_id) is None


def test_a_diverged_adapter_changes_nothing_of_others(ranked: RankedTrainer) -> None:
    state = ranked.export_state("middle")
    nan = {name: each * float("nan") for name, each in state.weights.tensors.items()}
    ranked.import_state("middle", replace(state, weights=replace(state.weights, tensors=nan)))
    items = shared(ranked, ([9], [6], [6]))

    outputs = ranked.batcher.run_batch(items, nothing)

    assert np.isnan(outputs[1].logprobs[0]).all()
    for item, same, output in zip(items, same_alone(items), outputs, strict=True):
        if item.model_id != "middle":
            assert_alike(output, run(ranked, same))
            gradients = (gradient_of(ranked, each.model_id) for each in (item, same))
            assert_close(*gradients, rtol=1e-5)


def test_steps_taken_together_have_the_bits_of_steps_taken_alone(ranked: RankedTrainer) -> None:
    for name in ADAPTERS:
        for model_id in (name, alone(name)):
            run(ranked, a_pass(ranked, model_id, [5, 9, 3]))
    steps = [OptimizerStep(name, ADAM) for name in ADAPTERS]
    assert ranked.stepper.can_batch(steps[:-1], steps[-1])

    metrics = ranked.stepper.run_batch(steps, nothing)

    assert metrics == [ranked.optim_step(alone(name), ADAM) for name in ADAPTERS]
    for name in ADAPTERS:
        assert_equal(
            ranked.copy_weights(name).tensors, ranked.copy_weights(alone(name)).tensors, atol=0
        )


def test_a_gradient_that_is_not_finite_fails_its_own_step_only(ranked: RankedTrainer) -> None:
    for name in ("small", alone("small"), "middle"):
        run(ranked, a_pass(ranked, name, [5, 9]))
    broken = ranked.export_gradient("middle")
    assert broken is not None
    ranked.import_gradient("middle", {name: each * float("nan") for name, each in broken.items()})
    steps = [OptimizerStep(name, ADAM) for name in ("small", "middle")]

    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        ranked.stepper.run_batch(steps, nothing)

    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        ranked.optim_step("middle", ADAM)
    assert ranked.optim_step("small", ADAM) == ranked.optim_step(alone("small"), ADAM)


@pytest.mark.parametrize("kind", ["replicas"], indirect=True, scope="module")
def test_a_replica_that_fails_leaves_all_gradients_as_they_were(ranked: RankedTrainer) -> None:
    for name in ("small", alone("small")):
        run(ranked, a_pass(ranked, name, [5, 9], seed=2))
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked.group.current.call("fail_in", "_in_one_pass", MemoryError, [1])

    with pytest.raises(SharedPassFailed):
        ranked.batcher.run_batch(items, nothing)

    assert ranked.group.current.is_alive
    for item in (*items, *same_alone(items)):
        run(ranked, item)
    for name in ADAPTERS:
        assert_equal(gradient_of(ranked, name), gradient_of(ranked, alone(name)), atol=0)


@pytest.mark.parametrize("kind", often(SHARDED, ["sharded"]), indirect=True, scope="module")
@pytest.mark.parametrize(
    "error", [MemoryError, pytest.param(InvalidRequest, marks=pytest.mark.long)]
)
def test_a_rank_that_fails_while_others_need_it_loses_the_group_at_once(
    ranked: RankedTrainer, error: type[Exception]
) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked.group.current.call("fail_in", "_in_one_pass", error, [1])

    with pytest.raises(RanksLost, match=r"rank 1 of . failed in shared_pass: .* no room for it"):
        ranked.batcher.run_batch(items, nothing)

    for item, same in zip(items, same_alone(items), strict=True):
        assert run(ranked, item).metrics == run(ranked, same).metrics


@pytest.mark.parametrize("kind", ["replicas", "sharded"], indirect=True, scope="module")
def test_what_cannot_share_a_pass_runs_alone(ranked: RankedTrainer) -> None:
    first = a_pass(ranked, "small", [BATCH_TOKENS])
    sequence_loss = a_request(counting_every_token(random_data([3], policy=True)), "gspo")
    ranked.add_model("whole", None)

    can_batch = ranked.batcher.can_batch
    assert can_batch([first], a_pass(ranked, "middle", [BATCH_TOKENS]))
    assert not can_batch([first], a_pass(ranked, "middle", [BATCH_TOKENS, 1]))
    assert not can_batch([first], a_pass(ranked, "middle", [BATCH_TOKENS + 1]))
    assert not can_batch([first], a_pass(ranked, "small", [1]))
    assert not can_batch([first], a_pass(ranked, "whole", [1]))
    assert not can_batch([first], TrainingPass("middle", prepare(sequence_loss, ranked.limits)))
    custom = a_pass(ranked, "middle", [1]).batch
    assert can_batch([first], TrainingPass("middle", custom))
    definition = uploaded(lambda logprobs: (logprobs.sum(), {}))
    custom = replace(custom, uploaded=UploadedLoss(processes(), "owner", definition))
    assert not can_batch([first], TrainingPass("middle", custom))
    assert not can_batch([TrainingPass("middle", custom)], first)
    ranked.remove_model("whole")


def test_examples_with_different_numbers_of_targets_share_no_pass(ranked: RankedTrainer) -> None:
    first, [narrow] = a_pass(ranked, "small", [4]), a_pass(ranked, "middle", [4]).batch.examples
    wide = replace(
        narrow,
        targets=narrow.targets.repeat(2, axis=1),
        inputs={name: each.repeat(2, axis=1) for name, each in narrow.inputs.items()},
    )
    both, twice = (
        TrainingPass(model_id, replace(first.batch, examples=examples))
        for model_id, examples in (("middle", [narrow, wide]), ("small", [wide]))
    )

    # One rank might get the narrow example of one model and the wide one of the other.
    assert not ranked.batcher.can_batch([both], twice)
    assert not ranked.batcher.can_batch([twice], both)
    assert run(ranked, both).metrics["tokens:sum"] == 8


@pytest.mark.parametrize(
    "lost_in",
    [
        "shared_pass",
        pytest.param("_part_of_shared_pass", marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
async def test_a_rank_lost_in_a_shared_pass_costs_only_the_gradients_from_before(
    ranked: RankedTrainer, thread: EngineThread, lost_in: str | None
) -> None:
    run(ranked, a_pass(ranked, "small", [5, 9], seed=2))
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    group = ranked.group.current
    if lost_in is None:
        ray.kill(actors_of(group)[1])
    else:
        group.call("die_in", lost_in, 1)

    lost, *others = await together(thread, ranked, items)

    assert re.search(r"rank 1 of . failed in shared_pass", group.loss or "")
    assert isinstance(lost, GradientLost)
    assert "send the data of this step again" in lost.message
    for item, same, output in zip(items[1:], same_alone(items[1:]), others, strict=True):
        assert isinstance(output, LossOutput)
        assert output.metrics == run(ranked, same).metrics
        assert_equal(gradient_of(ranked, item.model_id), gradient_of(ranked, same.model_id), atol=0)
    assert run(ranked, items[0]).metrics == run(ranked, same_alone(items)[0]).metrics


@pytest.mark.parametrize("method", often(["sum_gradients", "optim_steps"], ["optim_steps"]))
def test_a_lost_rank_costs_all_models_their_step_and_nothing_else(
    ranked: RankedTrainer, method: str
) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    steps = [OptimizerStep(name, ADAM) for name in ADAPTERS]
    before = {name: ranked.copy_weights(name).tensors for name in ADAPTERS}
    if method == "optim_steps":
        ranked.group.current.call("fail_in", method)
    else:
        ranked.group.current.call("die_in", method, 1)

    def train() -> None:
        ranked.batcher.run_batch(items, nothing)
        ranked.stepper.run_batch(steps, nothing)

    with pytest.raises(RanksLost, match=f"failed in {method}"):
        train()

    for name in ADAPTERS:
        with pytest.raises(GradientLost, match="send the data of this step again"):
            ranked.optim_step(name, ADAM)
        assert_equal(ranked.copy_weights(name).tensors, before[name], atol=0)
        assert run(ranked, a_pass(ranked, name, [5])).metrics["tokens:sum"] == 5


def test_a_failure_between_the_commands_of_a_step_costs_the_gradients_and_nothing_else(
    ranked: RankedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked.batcher.run_batch(items, nothing)

    def fail(*_: object) -> None:
        raise RuntimeError("the store of objects is full")

    with monkeypatch.context() as broken:
        broken.setattr(ranked.group.current, "call_independently", fail)
        with pytest.raises(RuntimeError, match="is full"):
            ranked.stepper.run_batch([OptimizerStep(name, ADAM) for name in ADAPTERS], nothing)

    assert ranked.group.current.is_alive
    for item, same in zip(items, same_alone(items), strict=True):
        with pytest.raises(GradientLost, match="is full"):
            ranked.optim_step(item.model_id, ADAM)
        for each in (item, same):
            run(ranked, each)
        assert ranked.optim_step(item.model_id, ADAM) == ranked.optim_step(same.model_id, ADAM)


def test_a_step_that_one_rank_applies_is_applied_to_all_models(ranked: RankedTrainer) -> None:
    for name in ADAPTERS:
        for model_id in (name, alone(name)):
            run(ranked, a_pass(ranked, model_id, [5, 9, 3]))
    for name in ADAPTERS:
        ranked.optim_step(alone(name), ADAM)
    ranked.group.current.call("die_in", "optim_steps", 1)

    ranked.stepper.run_batch([OptimizerStep(name, ADAM) for name in ADAPTERS], nothing)

    assert not ranked.group.current.is_alive
    for name in ADAPTERS:
        assert_equal(
            ranked.copy_weights(name).tensors, ranked.copy_weights(alone(name)).tensors, atol=0
        )
        assert ranked.export_gradient(name) is None


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_share_as_many_tokens_as_the_configuration_says(
    trainer_of: TrainerOf, tmp_path: Path, sharded: bool
) -> None:
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(save(tiny_llama(), tmp_path / "model"))),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
        trainer=TrainerConfig(ranks=2, sharded=sharded, max_batch_tokens=32, max_shared_tokens=8),
    )

    trainer = trainer_of(2, partial(torch_rank, config))

    assert [each.max_shared_tokens for each in trainer.memberships()] == [8, 8]
