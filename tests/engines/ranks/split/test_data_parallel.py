"""The torch trainer on several ranks against one rank."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, MortalTrainer, TrainerOf, weights_at_ranks
from tinkercloud_testing.small_models.data import (
    a_datum,
    a_request,
    counting_every_token,
    random_data,
)
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import (
    assert_close,
    assert_equal,
    gradient_of,
    moments_of,
    run,
)
from tinkercloud_worker.actors.rank_group import (
    GroupShape,
    GroupTimings,
    RankGroup,
    RanksLost,
    RanksUnavailable,
)
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import DirectTrainer, GradientLost
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
RANKS = 2


@pytest.fixture(scope="module")
def ranked(cluster: None) -> Iterator[RankedTrainer]:
    trainer = RankedTrainer(lambda _: RankGroup(GroupShape(RANKS), MortalTrainer))
    yield trainer
    trainer.close()


@pytest.fixture
def single() -> TorchTrainer:
    return TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)


def step(
    trainer: DirectTrainer, model_id: str, lengths: list[int], seed: int
) -> tuple[float, float]:
    output = run(trainer, random_data(lengths, seed=seed), model_id=model_id)
    metrics = trainer.optim_step(model_id, ADAM)
    return output.metrics["loss:sum"], metrics["grad_norm"]


@pytest.mark.parametrize(
    "lengths", [[5, 20, 3, 11, 8], [9], [40, 1], [6, 6, 6, 6, 6, 6, 6]], ids=str
)
def test_logprobs_loss_and_gradient_equal_one_ranks_whatever_the_batch(
    ranked: RankedTrainer, single: TorchTrainer, lengths: list[int]
) -> None:
    data = random_data(lengths, seed=1)
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
        step(trainer, "m", [4, 6], seed=9)

    got, expected = run(ranked, data), run(single, data)

    assert [len(logprobs) for logprobs in got.logprobs] == lengths
    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    assert got.metrics == pytest.approx(expected.metrics, abs=1e-4)
    assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-5)


def test_equal_requests_give_equal_bits(ranked: RankedTrainer) -> None:
    data = random_data([30, 2, 17, 9, 4], seed=2)
    for name in ("one", "other"):
        ranked.add_model(name, LORA)
        step(ranked, name, [4, 6], seed=9)

    one, other = run(ranked, data, model_id="one"), run(ranked, data, model_id="other")

    assert np.array_equal(np.concatenate(one.logprobs), np.concatenate(other.logprobs))
    assert one.metrics == other.metrics
    assert_equal(gradient_of(ranked, "one"), gradient_of(ranked, "other"), atol=0)


def test_a_loss_over_whole_sequences_equals_one_ranks(
    ranked: RankedTrainer, single: TorchTrainer
) -> None:
    data = counting_every_token(random_data([7, 13, 5], policy=True))
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
        run(trainer, data, "gspo", bounds)

    assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-5)


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "whole model"])
def test_ten_steps_equal_one_ranks_and_the_replicas_stay_equal_bit_for_bit(
    ranked: RankedTrainer, single: TorchTrainer, lora: LoraConfig | None
) -> None:
    losses = []
    for trainer in (ranked, single):
        trainer.add_model("m", lora)
        losses.append([step(trainer, "m", [5, 9, 3 + seed], seed) for seed in range(10)])

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    first, second = weights_at_ranks(ranked.group.current, "m")
    assert_equal(first, second, atol=0)


def test_ten_steps_of_three_ranks_equal_one_ranks_whatever_number_of_examples_they_share(
    trainer_of: TrainerOf, single: TorchTrainer
) -> None:
    ranked = trainer_of(3, MortalTrainer)
    lengths = [30, 5, 9, 3, 8]
    losses = []
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
        losses.append([step(trainer, "m", lengths[seed % 5 :], seed) for seed in range(10)])

    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    first, *copies = weights_at_ranks(ranked.group.current, "m")
    assert len(copies) == 2
    for copy in copies:
        assert_equal(first, copy, atol=0)


def test_models_without_a_seed_start_equal_on_all_ranks(ranked: RankedTrainer) -> None:
    ranked.add_model("m", LoraConfig(rank=4))

    first, second = weights_at_ranks(ranked.group.current, "m")

    assert_equal(first, second, atol=0)


def test_gradients_add_up_over_requests_until_the_step_and_can_be_dropped(
    ranked: RankedTrainer, single: TorchTrainer
) -> None:
    parts = [random_data([6, 4, 8], seed=1), random_data([9], seed=2)]
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
    run(ranked, random_data([30, 2], seed=7))
    ranked.discard_gradient("m")

    for part in parts:
        run(ranked, part)
    run(single, [*parts[0], *parts[1]])

    assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-5)
    ranked.optim_step("m", ADAM)
    assert ranked.export_gradient("m") is None


def test_a_state_of_many_ranks_continues_on_one_and_comes_back(
    ranked: RankedTrainer, single: TorchTrainer
) -> None:
    ranked.add_model("m", LORA)
    step(ranked, "m", [5, 9, 3], seed=0)
    run(ranked, random_data([8, 3, 4], seed=1))
    single.add_model("m", LORA)
    single.import_state("m", ranked.export_state("m"))
    single.import_gradient("m", gradient_of(ranked))
    ranked.add_model("back", LORA)
    ranked.import_state("back", single.export_state("m"))
    ranked.import_gradient("back", gradient_of(single))

    norms = [t.optim_step(m, ADAM) for t, m in ((ranked, "m"), (single, "m"), (ranked, "back"))]

    assert norms[0] == norms[2] == pytest.approx(norms[1])
    assert norms[0]["step"] == 2
    states = [ranked.export_state("m"), single.export_state("m"), ranked.export_state("back")]
    assert_equal(states[2].weights.tensors, states[0].weights.tensors, atol=0)
    assert_equal(states[1].weights.tensors, states[0].weights.tensors, atol=0)
    assert_equal(moments_of(states[1]), moments_of(states[0]), atol=0)


def test_a_gradient_that_is_not_finite_on_one_rank_is_rejected_at_all(
    ranked: RankedTrainer,
) -> None:
    ranked.add_model("m", LORA)
    step(ranked, "m", [5, 3], seed=0)
    run(ranked, [a_datum([1, 2, 3], weights=np.full(3, 3e38, np.float32))])

    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        ranked.optim_step("m", ADAM)

    assert np.isfinite(step(ranked, "m", [5, 3], seed=1)).all()


def test_forward_changes_nothing(ranked: RankedTrainer) -> None:
    ranked.add_model("m", LORA)

    batch = prepare(a_request(random_data([8, 2, 5])), ranked.limits)
    output = ranked.forward("m", batch)

    assert [len(logprobs) for logprobs in output.logprobs] == [8, 2, 5]
    assert ranked.export_gradient("m") is None


@pytest.fixture
def mortal(ranked: RankedTrainer) -> Iterator[RankedTrainer]:
    yield ranked
    for model_id in tuple(ranked.group.held.names):
        ranked.remove_model(model_id)


def kill_in(mortal: RankedTrainer, method: str, *ranks: int) -> None:
    mortal.group.current.call("die_in", method, *ranks)


@pytest.mark.parametrize("method", ["forward_backward", "sum_gradient"])
def test_after_a_rank_is_killed_a_model_continues_from_its_last_step(
    mortal: RankedTrainer, method: str
) -> None:
    mortal.add_model("m", LORA)
    mortal.add_model("undisturbed", LORA)
    for name in ("m", "undisturbed"):
        step(mortal, name, [5, 3], seed=0)
    expected = step(mortal, "undisturbed", [4, 6], seed=1)
    kill_in(mortal, method, 0)

    with pytest.raises(GradientLost, match=rf"failed in {method}: its process ended; .* again"):
        step(mortal, "m", [4, 6], seed=1)

    assert step(mortal, "m", [4, 6], seed=1) == expected
    state, other = mortal.export_state("m"), mortal.export_state("undisturbed")
    assert state.step == other.step == 2
    assert_equal(state.weights.tensors, other.weights.tensors, atol=0)
    assert_equal(moments_of(state), moments_of(other), atol=0)


def test_a_step_that_ranks_apply_when_one_is_killed_is_applied(mortal: RankedTrainer) -> None:
    mortal.add_model("m", LORA)
    mortal.add_model("undisturbed", LORA)
    expected = step(mortal, "undisturbed", [4, 6], seed=1)
    kill_in(mortal, "optim_step", 1)

    got = step(mortal, "m", [4, 6], seed=1)

    assert got == expected
    assert not mortal.group.current.is_alive
    weights = [mortal.copy_weights(name).tensors for name in ("m", "undisturbed")]
    assert_equal(*weights, atol=0)


@pytest.mark.parametrize("lost", [(1,), (0, 1)], ids=["one", "all"])
def test_ranks_lost_while_memory_is_released_are_reported_by_the_next_step(
    mortal: RankedTrainer, lost: tuple[int, ...]
) -> None:
    mortal.add_model("m", LORA)
    run(mortal, random_data([5, 3]), model_id="m")
    mortal.release_memory()
    kill_in(mortal, "release_memory", *lost)

    mortal.release_memory()

    assert not mortal.group.current.is_alive
    mortal.release_memory()
    with pytest.raises(GradientLost if lost == (1,) else StateLost):
        mortal.optim_step("m", ADAM)


def test_the_lost_gradient_of_another_model_is_reported_once_and_never_applied_in_part(
    mortal: RankedTrainer,
) -> None:
    for name in ("undisturbed", "one", "other", "idle"):
        mortal.add_model(name, LORA)
    expected = step(mortal, "undisturbed", [5, 3], seed=0)
    run(mortal, random_data([5, 3]), model_id="other")
    kill_in(mortal, "forward_backward", 1)
    with pytest.raises(GradientLost):
        run(mortal, random_data([5, 3]), model_id="one")

    with pytest.raises(GradientLost, match="send the data of this step again"):
        mortal.export_gradient("other")
    with pytest.raises(GradientLost, match="send the data of this step again"):
        mortal.optim_step("other", ADAM)

    for name in ("one", "other", "idle"):
        assert step(mortal, name, [5, 3], seed=0) == expected


def test_a_step_that_fails_on_all_ranks_loses_its_gradient_but_no_model(
    mortal: RankedTrainer,
) -> None:
    for name in ("one", "other"):
        mortal.add_model(name, LORA)
        step(mortal, name, [5, 3], seed=0)
    before = mortal.copy_weights("other").tensors
    mortal.group.current.call("fail_in", "optim_step")

    with pytest.raises(GradientLost, match="failed in optim_step: MemoryError: no room for it"):
        step(mortal, "one", [4, 6], seed=1)

    assert_equal(mortal.copy_weights("other").tensors, before, atol=0)
    assert step(mortal, "one", [4, 6], seed=1) == step(mortal, "other", [4, 6], seed=1)


def test_salvaged_models_can_be_saved_without_ranks(mortal: RankedTrainer) -> None:
    for name in ("one", "other"):
        mortal.add_model(name, LORA)
        step(mortal, name, [5, 3], seed=0)
    expected = mortal.export_state("one")
    run(mortal, random_data([4, 6]), model_id="other")
    kill_in(mortal, "share_state", 1)

    found_lost, kept = mortal.export_state("one"), mortal.export_state("other")

    for state in (found_lost, kept):
        assert state.step == 1
        assert_equal(state.weights.tensors, expected.weights.tensors, atol=0)
        assert_equal(moments_of(state), moments_of(expected), atol=0)
    assert_equal(mortal.copy_weights("one").tensors, expected.weights.tensors, atol=0)
    assert mortal.export_gradient("one") is None
    with pytest.raises(GradientLost, match="failed in share_state"):
        mortal.export_gradient("other")
    assert not mortal.group.current.is_alive


def test_no_gradient_is_requested_for_a_model_that_has_none(
    mortal: RankedTrainer,
) -> None:
    mortal.add_model("m", LORA)
    step(mortal, "m", [5, 3], seed=0)
    kill_in(mortal, "share_gradient", 0)

    assert mortal.export_gradient("m") is None
    assert mortal.group.current.is_alive


def test_without_a_surviving_rank_models_are_lost_and_new_ones_can_start(
    mortal: RankedTrainer,
) -> None:
    mortal.add_model("m", LORA)
    saved = mortal.export_state("m")
    kill_in(mortal, "forward_backward", 0, 1)

    with pytest.raises(StateLost, match=r"model m was lost .* from its last checkpoint"):
        run(mortal, random_data([4, 5]))
    mortal.discard_gradient("m")
    mortal.add_model("restored", LORA)
    mortal.import_state("restored", saved)

    with pytest.raises(StateLost, match=r"model m was lost .*failed in forward_backward"):
        run(mortal, random_data([4, 5]))
    mortal.discard_gradient("m")
    assert mortal.group.current.is_alive
    assert_equal(mortal.copy_weights("restored").tensors, saved.weights.tensors, atol=0)


def test_models_are_kept_until_a_group_can_be_started(cluster: None) -> None:
    possible, impossible = (GroupShape(RANKS, cpus_per_rank=cores) for cores in (0.1, 1000))
    starts = iter([(possible, None), (impossible, GroupTimings(start=1)), (possible, None)])

    def start(cancelled: threading.Event) -> RankGroup:
        shape, timings = next(starts)
        return RankGroup(shape, MortalTrainer, timings, cancelled)

    trainer = RankedTrainer(start)
    trainer.add_model("m", LORA)
    before = trainer.copy_weights("m").tensors
    kill_in(trainer, "forward_backward", 0)
    with pytest.raises(GradientLost):
        run(trainer, random_data([4, 5]))

    with pytest.raises(RanksUnavailable, match="insufficient capacity"):
        run(trainer, random_data([4, 5]))

    run(trainer, random_data([4, 5]))
    assert_equal(trainer.copy_weights("m").tensors, before, atol=0)
    trainer.close()


def test_a_model_can_be_saved_while_a_request_waits_for_a_new_group(
    cluster: None,
) -> None:
    possible, impossible = (GroupShape(RANKS, cpus_per_rank=cores) for cores in (0.1, 1000))
    shapes, starts_again = [impossible, possible], threading.Event()

    def start(cancelled: threading.Event) -> RankGroup:
        shape = shapes.pop()
        if not shapes:
            starts_again.set()
        return RankGroup(shape, MortalTrainer, GroupTimings(start=600), cancelled)

    trainer = RankedTrainer(start)
    for name in ("m", "other"):
        trainer.add_model(name, LORA)
    before = trainer.copy_weights("m").tensors
    kill_in(trainer, "forward_backward", 0)
    with pytest.raises(GradientLost):
        run(trainer, random_data([4, 5]))

    with ThreadPoolExecutor(1) as engine_thread:
        waiting = engine_thread.submit(run, trainer, random_data([4, 5]))
        assert starts_again.wait(timeout=60)
        trainer.stop_waiting()
        saving = engine_thread.submit(trainer.export_state, "m")

        with pytest.raises(RanksUnavailable, match="head is stopping"):
            waiting.result(timeout=60)
        assert_equal(saving.result(timeout=60).weights.tensors, before, atol=0)
    trainer.remove_model("m")
    trainer.remove_model("other")
    assert trainer.group.held.salvaged == {}
    trainer.close()


def test_a_model_whose_creation_is_interrupted_does_not_exist_and_others_continue(
    mortal: RankedTrainer,
) -> None:
    mortal.add_model("m", LORA)
    before = mortal.copy_weights("m").tensors
    kill_in(mortal, "add_model", 1)

    with pytest.raises(RanksLost, match="failed in add_model"):
        mortal.add_model("half", LORA)

    assert_equal(mortal.copy_weights("m").tensors, before, atol=0)
    with pytest.raises(StateLost):
        mortal.copy_weights("half")
