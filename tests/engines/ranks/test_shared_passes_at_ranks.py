"""Models that share passes and optimizer steps at the ranks of a torch trainer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.data import a_request, counting_every_token, random_data
from tinkercloud_testing.ranks import BATCH_TOKENS, MortalTrainer
from tinkercloud_testing.trainers import assert_close, assert_equal, gradient_of
from tinkercloud_worker.actors.group import GroupShape, RankGroup, RanksLost
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.ranks import SharedPassFailed
from tinkercloud_worker.engine.trainer import GradientLost, LossOutput, OptimizerStep, TrainingPass

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
RANKS = {"small": 2, "middle": 4, "large": 8}
"""Ranks of the adapters that share passes."""


@pytest.fixture(scope="module")
def started(cluster: None) -> Iterator[RankedTrainer]:
    trainer = RankedTrainer(lambda _: RankGroup(GroupShape(2), MortalTrainer))
    yield trainer
    trainer.close()


@pytest.fixture
def ranked(started: RankedTrainer) -> Iterator[RankedTrainer]:
    """A trainer with each adapter twice: one shares passes, the other runs alone."""
    models = {alias: rank for name, rank in RANKS.items() for alias in (name, alone(name))}
    for model_id, rank in models.items():
        started.add_model(model_id, LoraConfig(rank=rank, seed=rank))
        run(started, a_pass(started, model_id, [4, 6], seed=9))
        started.optim_step(model_id, ADAM)
    yield started
    for model_id in models:
        started.remove_model(model_id)


def alone(name: str) -> str:
    return f"{name}-alone"


def a_pass(
    trainer: RankedTrainer, model_id: str, lengths: Sequence[int], *, seed: int = 1
) -> TrainingPass:
    request = a_request(random_data(lengths, seed=seed))
    return TrainingPass(model_id, prepare(request, trainer.limits))


def run(trainer: RankedTrainer, item: TrainingPass) -> LossOutput:
    return trainer.forward_backward(item.model_id, item.batch, lambda: None)


def shared(trainer: RankedTrainer, lengths: Sequence[Sequence[int]]) -> list[TrainingPass]:
    return [a_pass(trainer, name, own) for name, own in zip(RANKS, lengths, strict=True)]


def same_alone(items: Sequence[TrainingPass]) -> list[TrainingPass]:
    return [TrainingPass(alone(item.model_id), item.batch) for item in items]


def nothing() -> None: ...


def assert_fit(trainer: RankedTrainer, items: Sequence[TrainingPass]) -> None:
    assert trainer.batcher.can_batch(items[:-1], items[-1])


@pytest.mark.parametrize(
    "lengths", [([5, 9], [3], [7, 2, 8]), ([4], [4], [4])], ids=["several", "one example each"]
)
def test_models_of_mixed_ranks_get_what_each_gets_alone(
    ranked: RankedTrainer, lengths: Sequence[Sequence[int]]
) -> None:
    items = shared(ranked, lengths)
    assert_fit(ranked, items)

    outputs = ranked.batcher.run_batch(items, nothing)

    expected = [run(ranked, item) for item in same_alone(items)]
    for ours, theirs, own in zip(outputs, expected, lengths, strict=True):
        assert [len(logprobs) for logprobs in ours.logprobs] == own
        np.testing.assert_allclose(
            np.concatenate(ours.logprobs), np.concatenate(theirs.logprobs), atol=1e-5
        )
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    for name in RANKS:
        assert_close(gradient_of(ranked, name), gradient_of(ranked, alone(name)), rtol=1e-5)


def test_steps_taken_together_have_the_bits_of_steps_taken_alone(ranked: RankedTrainer) -> None:
    for name in RANKS:
        for model_id in (name, alone(name)):
            run(ranked, a_pass(ranked, model_id, [5, 9, 3]))
    steps = [OptimizerStep(name, ADAM) for name in RANKS]
    assert ranked.stepper.can_batch(steps[:-1], steps[-1])

    metrics = ranked.stepper.run_batch(steps, nothing)

    assert metrics == [ranked.optim_step(alone(name), ADAM) for name in RANKS]
    for name in RANKS:
        assert_equal(ranked.snapshot(name).tensors, ranked.snapshot(alone(name)).tensors, atol=0)


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


def test_a_rank_that_fails_leaves_all_gradients_as_they_were(ranked: RankedTrainer) -> None:
    for name in ("small", alone("small")):
        run(ranked, a_pass(ranked, name, [5, 9], seed=2))
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked._group.call_each("fail_in", [("unused",), ("_in_one_pass",)])

    with pytest.raises(SharedPassFailed):
        ranked.batcher.run_batch(items, nothing)

    assert ranked._group.is_alive
    for item in (*items, *same_alone(items)):
        run(ranked, item)
    for name in RANKS:
        assert_equal(gradient_of(ranked, name), gradient_of(ranked, alone(name)), atol=0)


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
    custom = replace(custom, definition=b"{}")
    assert not can_batch([first], TrainingPass("middle", custom))
    assert not can_batch([TrainingPass("middle", custom)], first)
    ranked.remove_model("whole")


def test_a_rank_lost_in_a_shared_pass_costs_only_the_gradients_from_before(
    ranked: RankedTrainer,
) -> None:
    run(ranked, a_pass(ranked, "small", [5, 9], seed=2))
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked._group.call("die_in", "shared_pass", 1)

    with pytest.raises(RanksLost, match="failed in shared_pass"):
        ranked.batcher.run_batch(items, nothing)

    with pytest.raises(GradientLost, match="send the data of this step again"):
        run(ranked, items[0])
    for item, same in zip(items[1:], same_alone(items[1:]), strict=True):
        assert run(ranked, item).metrics == run(ranked, same).metrics
        assert_equal(gradient_of(ranked, item.model_id), gradient_of(ranked, same.model_id), atol=0)


@pytest.mark.parametrize("method", ["sum_gradients", "optim_steps"])
def test_a_lost_rank_costs_all_models_their_step_and_nothing_else(
    ranked: RankedTrainer, method: str
) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    steps = [OptimizerStep(name, ADAM) for name in RANKS]
    before = {name: ranked.snapshot(name).tensors for name in RANKS}
    if method == "optim_steps":
        ranked._group.call("fail_in", method)
    else:
        ranked._group.call("die_in", method, 1)

    def train() -> None:
        ranked.batcher.run_batch(items, nothing)
        ranked.stepper.run_batch(steps, nothing)

    with pytest.raises(RanksLost, match=f"failed in {method}"):
        train()

    for name in RANKS:
        with pytest.raises(GradientLost, match="send the data of this step again"):
            ranked.optim_step(name, ADAM)
        assert_equal(ranked.snapshot(name).tensors, before[name], atol=0)
        assert run(ranked, a_pass(ranked, name, [5])).metrics["tokens:sum"] == 5


def test_a_failure_between_the_commands_of_a_step_costs_the_gradients_and_nothing_else(
    ranked: RankedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = shared(ranked, ([5, 9], [3], [7, 2, 8]))
    ranked.batcher.run_batch(items, nothing)

    def fail(*_: object) -> None:
        raise RuntimeError("the store of objects is full")

    with monkeypatch.context() as broken:
        broken.setattr(ranked._group, "call_independently", fail)
        with pytest.raises(RuntimeError, match="is full"):
            ranked.stepper.run_batch([OptimizerStep(name, ADAM) for name in RANKS], nothing)

    assert ranked._group.is_alive
    for item, same in zip(items, same_alone(items), strict=True):
        with pytest.raises(GradientLost, match="is full"):
            ranked.optim_step(item.model_id, ADAM)
        for each in (item, same):
            run(ranked, each)
        assert ranked.optim_step(item.model_id, ADAM) == ranked.optim_step(same.model_id, ADAM)


def test_a_step_that_one_rank_applies_is_applied_to_all_models(ranked: RankedTrainer) -> None:
    for name in RANKS:
        for model_id in (name, alone(name)):
            run(ranked, a_pass(ranked, model_id, [5, 9, 3]))
    for name in RANKS:
        ranked.optim_step(alone(name), ADAM)
    ranked._group.call("die_in", "optim_steps", 1)

    ranked.stepper.run_batch([OptimizerStep(name, ADAM) for name in RANKS], nothing)

    assert not ranked._group.is_alive
    for name in RANKS:
        assert_equal(ranked.snapshot(name).tensors, ranked.snapshot(alone(name)).tensors, atol=0)
        assert ranked.export_gradient(name) is None
