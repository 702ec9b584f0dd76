"""The torch trainer on ranks that shard the base, against one rank."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, TrainerConfig
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, MeasuredTrainer, TrainerOf, Trainers
from tinkercloud_testing.small_models.data import a_datum, a_request, random_data
from tinkercloud_testing.small_models.models import (
    in_dtype,
    save,
    tiny_deepseek_v3,
    tiny_gemma2,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.small_models.wrong_folders import UP, Fault, prefixed, value
from tinkercloud_testing.training.trainers import (
    assert_close,
    assert_equal,
    base_of,
    gradient_of,
    moments_of,
    run,
)
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, RanksUnavailable
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.build_trainer import build_trainer, torch_rank
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import DirectTrainer, WeightsCopy
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)
CLIPPED = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=5)


@pytest.fixture(scope="module", params=[None, 0], ids=["activations kept", "computed again"])
def trainers(request: pytest.FixtureRequest, trainer_of: TrainerOf) -> Trainers:
    sharded = trainer_of(2, partial(MeasuredTrainer, request.param))
    return sharded, TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)


def step(
    trainer: DirectTrainer, lengths: list[int], seed: int, adam: AdamParams = CLIPPED
) -> tuple[float, float]:
    output = run(trainer, random_data(lengths, seed=seed))
    return output.metrics["loss:sum"], trainer.optim_step("m", adam)["grad_norm"]


@pytest.mark.parametrize("lengths", [[5, 20, 3, 11, 8], [9], [30, 1, 28, 30]], ids=str)
def test_logprobs_and_gradients_equal_one_ranks_however_unequal_the_shares(
    trainers: Trainers, lengths: list[int]
) -> None:
    for trainer in trainers:
        trainer.add_model("m", LORA)
        run(trainer, random_data([4, 6], seed=9))
        trainer.optim_step("m", ADAM)

    got, expected = (run(trainer, random_data(lengths, seed=1)) for trainer in trainers)

    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    gradients = [gradient_of(trainer) for trainer in trainers]
    for name, theirs in gradients[1].items():
        error = (gradients[0][name] - theirs).norm() / theirs.norm()
        assert error <= 1e-4, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("config", [LORA, None], ids=["adapter", "whole model"])
def test_gradients_add_up_over_requests_as_if_their_data_had_come_at_once(
    trainers: Trainers, config: LoraConfig | None
) -> None:
    sharded, _ = trainers
    data = random_data([5, 20, 3, 11, 8], seed=1)
    gradients = []
    for requests in ([data], [data[:2], data[2:3], data[3:]]):
        sharded.add_model("m", config)
        step(sharded, [4, 6], seed=9)
        for request in requests:
            run(sharded, request)
        gradients.append(gradient_of(sharded))

    assert_equal(gradients[1], gradients[0], atol=1e-5)


def test_an_example_of_zero_weight_does_not_block_other_ranks(trainers: Trainers) -> None:
    data = [a_datum([1, 2, 3], weights=np.zeros(3, np.float32)), a_datum([4, 5, 6, 7])]
    for trainer in trainers:
        trainer.add_model("m", LORA)

    got, expected = (run(trainer, data) for trainer in trainers)

    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    steps = [trainer.optim_step("m", ADAM) for trainer in trainers]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


def test_scoring_changes_nothing_and_an_empty_share_is_scored_along(trainers: Trainers) -> None:
    sharded, _ = trainers
    sharded.add_model("m", LORA)

    batch = prepare(a_request(random_data([9])), sharded.limits)
    output = sharded.forward("m", batch)

    assert [len(logprobs) for logprobs in output.logprobs] == [9]
    assert sharded.export_gradient("m") is None


def test_each_rank_holds_its_part_of_the_layers_only(trainers: Trainers) -> None:
    sharded, single = trainers
    weights = base_of(single).named_weights()
    layers = sum(weight.numel() for name, weight in weights.items() if ".layers." in name)

    held = sharded.group.current.call_each("layer_elements", [(), ()])

    assert sum(held) == layers
    assert max(held) - min(held) <= layers // 100


def test_no_rank_ever_has_more_than_one_layer_of_the_base_that_is_whole(
    trainer_of: TrainerOf,
) -> None:
    sharded = trainer_of(2, partial(MeasuredTrainer, make=partial(tiny_llama, layers=4)))

    whole = sharded.group.current.call_each("most_whole_layers", [(), ()])

    assert whole == [1, 1]


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3_moe, tiny_deepseek_v3])
def test_a_model_thon_one_rank_reads_is_the_same_at_all(
    make: Callable[[], PreTrainedModel], trainer_of: TrainerOf, tmp_path: Path
) -> None:
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(save(make(), tmp_path / "model"))),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
        trainer=TrainerConfig(ranks=2, sharded=True, max_batch_tokens=BATCH_TOKENS),
    )
    sharded = trainer_of(2, partial(torch_rank, config))
    single = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=BATCH_TOKENS)

    steps = []
    for trainer in (sharded, single):
        trainer.add_model("m", LORA)
        steps.append([step(trainer, [5, 9, 3, 30], seed) for seed in range(3)])

    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)


def ten_steps(
    trainers: Iterable[DirectTrainer], config: LoraConfig | None
) -> list[list[tuple[float, float]]]:
    """Return losses and norms of gradients, of both trainers."""
    batches = [[5, 9, 3 + seed, 30][seed % 3 :] for seed in range(10)]
    # An adapter's first gradient has an element that is rounding alone: with CLIPPED's epsilon each
    # trainer would move that weight by a step of its own length.
    adam = CLIPPED if config is None else ADAM
    steps = []
    for trainer in trainers:
        trainer.add_model("m", config)
        steps.append([step(trainer, lengths, seed, adam) for seed, lengths in enumerate(batches)])
    return steps


def test_ten_steps_of_an_adapter_equal_one_ranks_however_unequal_the_shares(
    trainers: Trainers,
) -> None:
    sharded, single = ten_steps(trainers, LORA)

    np.testing.assert_allclose(sharded, single, rtol=1e-5)


def test_ten_steps_of_a_full_model_equal_one_ranks_however_unequal_the_shares(
    trainers: Trainers,
) -> None:
    sharded, single = ten_steps(trainers, None)

    np.testing.assert_allclose(sharded, single, rtol=1e-5)
    states = [trainer.export_state("m") for trainer in trainers]
    assert states[0].step == states[1].step == 10
    assert_equal(states[0].weights.tensors, states[1].weights.tensors, atol=1e-4)


def test_three_ranks_hold_layers_in_unequal_parts_and_train_adapters_as_one_does(
    trainer_of: TrainerOf,
) -> None:
    sharded = trainer_of(3, MeasuredTrainer)
    single = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)

    held = sharded.group.current.call_each("layer_elements", [()] * 3)
    steps = ten_steps((sharded, single), LORA)

    assert held[0] == held[1] > held[2]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)


def test_a_full_model_that_ranks_cannot_shard_is_rejected_by_name_and_they_continue(
    trainer_of: TrainerOf,
) -> None:
    sharded = trainer_of(3, MeasuredTrainer)
    sharded.add_model("adapter", LORA)
    weight = re.escape("model.layers.0.self_attn.q_proj.weight has shape [32, 32]")

    with pytest.raises(InvalidRequest, match=rf"on 3 ranks .* divisible by 3 .* {weight}; "):
        sharded.add_model("m", None)

    output = run(sharded, random_data([5, 9, 3, 30]), model_id="adapter")
    assert [len(logprobs) for logprobs in output.logprobs] == [5, 9, 3, 30]


def test_ten_steps_of_a_full_model_on_three_ranks_equal_one_ranks(trainer_of: TrainerOf) -> None:
    make = partial(tiny_llama, hidden_size=24)
    single = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=BATCH_TOKENS)
    sharded = trainer_of(3, partial(MeasuredTrainer, make=make))

    steps = ten_steps((sharded, single), None)

    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)
    weights = [trainer.copy_weights("m").tensors for trainer in (sharded, single)]
    assert_equal(weights[0], weights[1], atol=1e-4)


def test_a_full_model_of_many_ranks_continues_at_one_and_comes_back(trainers: Trainers) -> None:
    sharded, single = trainers
    for trainer in trainers:
        trainer.add_model("m", None)
    step(sharded, [5, 9, 3], seed=0)
    run(sharded, random_data([8, 3, 4], seed=1))
    state, gradient = sharded.export_state("m"), gradient_of(sharded)

    single.import_state("m", state)
    single.import_gradient("m", gradient)
    norms = [sharded.optim_step("m", CLIPPED), single.optim_step("m", CLIPPED)]
    sharded.import_state("m", single.export_state("m"))

    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_equal(sharded.copy_weights("m").tensors, single.copy_weights("m").tensors, atol=0)
    steps = [step(trainer, [6, 2], seed=2) for trainer in trainers]
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)
    assert_equal(
        moments_of(sharded.export_state("m")), moments_of(single.export_state("m")), atol=1e-4
    )


def test_a_state_that_does_not_fit_is_rejected_by_all_ranks_and_changes_nothing(
    trainers: Trainers,
) -> None:
    sharded, single = trainers
    sharded.add_model("m", None)
    before = sharded.copy_weights("m").tensors
    single.add_model("m", LORA)

    with pytest.raises(InvalidRequest, match="checkpoint does not match this model"):
        sharded.import_state("m", single.export_state("m"))

    assert_equal(sharded.copy_weights("m").tensors, before, atol=0)


def test_full_models_and_adapters_of_one_base_stay_apart(trainers: Trainers) -> None:
    sharded, _ = trainers
    sharded.add_model("other", LORA)
    sharded.add_model("m", None)
    data = random_data([9, 4])
    batch = prepare(a_request(data), sharded.limits)
    before = sharded.forward("other", batch)

    step(sharded, [5, 9, 3], seed=0)

    after = sharded.forward("other", batch)
    trained = sharded.forward("m", batch)
    assert np.array_equal(np.concatenate(after.logprobs), np.concatenate(before.logprobs))
    assert not np.allclose(trained.logprobs[0], before.logprobs[0], atol=1e-3)


def test_each_rank_holds_its_part_of_a_full_model_and_its_moments(trainers: Trainers) -> None:
    sharded, single = trainers
    sharded.add_model("m", None)
    step(sharded, [5, 9], seed=0)
    elements = sum(weight.numel() for weight in base_of(single).named_weights().values())

    held = sharded.group.current.call_each("trained_elements", [("m",), ("m",)])

    assert held == [4 * elements // 2] * 2


@pytest.mark.parametrize(
    "make", [tiny_gemma2, tiny_qwen3, tiny_qwen3_moe], ids=["capped logits", "tied", "mixture"]
)
def test_a_full_model_has_one_ranks_gradients(
    make: Callable[[], PreTrainedModel], trainer_of: TrainerOf
) -> None:
    single = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=BATCH_TOKENS)
    sharded = trainer_of(2, partial(MeasuredTrainer, make=make))
    outputs = []
    for trainer in (sharded, single):
        trainer.add_model("m", None)
        outputs.append(run(trainer, random_data([5, 20, 3, 11, 8])))

    gradients = [gradient_of(trainer) for trainer in (sharded, single)]

    assert_equal(*gradients, atol=1e-4)
    np.testing.assert_array_equal(outputs[0].expert_tokens, outputs[1].expert_tokens)


def a_tied_llama_in_half() -> PreTrainedModel:
    return in_dtype(tiny_llama(tied=True), torch.bfloat16)


def test_a_full_model_over_a_base_in_bfloat16_is_computed_in_it_as_on_one_rank(
    trainer_of: TrainerOf,
) -> None:
    single = TorchTrainer(TorchBaseModel(a_tied_llama_in_half()), max_batch_tokens=BATCH_TOKENS)
    sharded = trainer_of(2, partial(MeasuredTrainer, 0, make=a_tied_llama_in_half))
    batch = prepare(a_request(random_data([5, 20, 3, 11, 8])), sharded.limits)

    first, _ = ten_steps((sharded, single), None)
    single.import_state("m", sharded.export_state("m"))
    run(single, random_data([9, 4]))
    run(sharded, random_data([9, 4]))

    assert first[-1] != first[0]
    outputs = (trainer.forward("m", batch) for trainer in (sharded, single))
    ours, theirs = (np.concatenate(output.logprobs) for output in outputs)
    np.testing.assert_array_equal(ours, theirs)
    assert_close(*(gradient_of(trainer) for trainer in (sharded, single)), rtol=0.02)


def test_a_full_model_over_a_base_in_bfloat16_is_published_in_it(trainer_of: TrainerOf) -> None:
    sharded = trainer_of(2, partial(MeasuredTrainer, 0, make=a_tied_llama_in_half))
    sharded.add_model("m", None)
    step(sharded, [5, 9], seed=0)

    saved, published = sharded.copy_weights("m"), sharded.publication("m")()

    assert isinstance(published, WeightsCopy)
    rounded = {name: each.to(torch.bfloat16) for name, each in saved.tensors.items()}
    assert {each.dtype for each in published.tensors.values()} == {torch.bfloat16}
    assert_equal(published.tensors, rounded, atol=0)
    assert any(not torch.equal(saved.tensors[name], each) for name, each in rounded.items())


def test_a_full_model_that_is_removed_frees_its_memory(trainers: Trainers) -> None:
    sharded, _ = trainers
    sharded.add_model("m", None)
    step(sharded, [5, 9], seed=0)
    sharded.remove_model("m")
    sharded.group.current.call("count_without_collecting")
    before = sharded.group.current.call("tensors_alive")

    sharded.add_model("m", None)
    step(sharded, [5, 9], seed=0)
    held = sharded.group.current.call("tensors_alive")
    sharded.remove_model("m")

    assert sharded.group.current.call("tensors_alive") == before < held


def test_a_full_model_that_no_surviving_rank_holds_is_lost_and_can_be_restored(
    cluster: None,
) -> None:
    sharded = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), MeasuredTrainer))
    sharded.add_model("m", None)
    step(sharded, [5, 9], seed=0)
    saved = sharded.export_state("m")
    sharded.group.current.call("die_in", "forward_backward", 1)

    with pytest.raises(StateLost, match=r"model m was lost .* from its last checkpoint"):
        step(sharded, [5, 9], seed=1)
    sharded.add_model("m", None)
    sharded.import_state("m", saved)

    assert_equal(sharded.copy_weights("m").tensors, saved.weights.tensors, atol=0)
    sharded.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [(prefixed("_orig_mod."), "_orig_mod"), (value(UP, float("nan")), f"NaN .*{UP}")],
    ids=["names", "values"],
)
def test_files_that_do_not_hold_the_model_are_rejected_at_the_rank_that_reads_them(
    cluster: None, tmp_path: Path, fault: Fault, message: str
) -> None:
    folder = save(tiny_llama(), tmp_path / "model")
    fault(folder)
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(folder)),
        token_file="",
        checkpoint_root=tmp_path.as_uri(),
        scratch_dir=str(tmp_path),
        trainer=TrainerConfig(ranks=2, sharded=True, start_timeout_seconds=120),
    )

    with pytest.raises(RanksUnavailable, match=message):
        build_trainer(config, refuse_to_load, None)


def refuse_to_load() -> TorchBaseModel:
    raise AssertionError("the head needs no copy")
