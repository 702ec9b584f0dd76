"""Full fine-tuning over a bfloat16 base: passes use its dtype, trained weights are float32."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_datum, a_request, random_data
from tinkercloud_testing.small_models.families import SLOTTED
from tinkercloud_testing.small_models.models import (
    in_dtype,
    save,
    tiny_gemma2,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.engines import a_sampling_request, an_engine
from tinkercloud_testing.training.lookups import gradient_of_lookups
from tinkercloud_testing.training.trainers import base_of, gradient_of, run
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler

LENGTHS = [5, 9, 12]
every_model = pytest.mark.parametrize(
    "make", [tiny_llama, tiny_qwen3, tiny_gpt2, tiny_gemma2, tiny_qwen3_moe, SLOTTED["sinks"]]
)


def in_half(model: PreTrainedModel) -> PreTrainedModel:
    return in_dtype(model, torch.bfloat16)


def a_trainer(model: PreTrainedModel, max_kept_tokens: int | None = None) -> TorchTrainer:
    trainer = TorchTrainer(
        TorchBaseModel(model), max_batch_tokens=64, max_kept_tokens=max_kept_tokens
    )
    trainer.add_model("m", None)
    return trainer


def scores(trainer: TorchTrainer) -> np.ndarray:
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    return np.concatenate(trainer.forward("m", batch).logprobs)


def tiny_ernie() -> PreTrainedModel:
    """Return a random ERNIE 4.5, whose routers transformers keeps in float32."""
    torch.manual_seed(7)
    return Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            moe_num_experts=4,
            moe_k=2,
            moe_layer_start_index=0,
        )
    )


def with_weights_of(trainer: TorchTrainer, model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that has a trained one's weights, rounded as its own."""
    model.load_state_dict(trainer.copy_weights("m").tensors, strict=False)
    return model


@every_model
def test_a_pass_is_that_of_a_base_with_the_same_weights_to_the_last_bit(
    make: Callable[[], PreTrainedModel],
) -> None:
    trainer = a_trainer(in_half(make()))
    for seed in range(3):
        run(trainer, random_data(LENGTHS, seed=seed))
        trainer.optim_step("m", AdamParams(learning_rate=1e-2))

    copy = a_trainer(with_weights_of(trainer, in_half(make())))

    assert np.array_equal(scores(trainer), scores(copy))
    assert not np.array_equal(scores(trainer), scores(a_trainer(in_half(make()))))


@every_model
@pytest.mark.parametrize("max_kept_tokens", [None, 0], ids=["kept", "computed again"])
def test_gradients_are_as_near_to_float32_as_the_rounding_allows(
    make: Callable[[], PreTrainedModel], max_kept_tokens: int | None
) -> None:
    exact, half = a_trainer(make()), a_trainer(in_half(make()), max_kept_tokens)

    for trainer in (exact, half):
        run(trainer, random_data(LENGTHS))

    theirs = gradient_of(exact)
    for name, ours in gradient_of(half).items():
        assert ours.dtype == torch.float32
        cosine = torch.cosine_similarity(ours.flatten(), theirs[name].flatten(), 0)
        assert cosine > 0.97 or not theirs[name].any(), name


def test_an_embeddings_gradient_is_a_float32_sum_over_all_uses_of_a_token() -> None:
    trainer = a_trainer(in_half(tiny_llama()))
    lookups = gradient_of_lookups(base_of(trainer)._model.get_input_embeddings())

    run(trainer, [a_datum([1, 2] * 200)])

    gradient, expected = gradient_of(trainer)["model.embed_tokens.weight"], lookups()
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_steps_that_bfloat16_would_round_away_add_up() -> None:
    trainer = a_trainer(in_half(tiny_llama()))
    name = "model.norm.weight"
    before = trainer.copy_weights("m").tensors[name]

    for _ in range(8):
        run(trainer, random_data(LENGTHS))
        trainer.optim_step("m", AdamParams(learning_rate=1e-5))

    moved = (trainer.copy_weights("m").tensors[name] - before).abs()
    assert moved.max() == pytest.approx(8e-5, rel=0.1)
    assert torch.finfo(torch.bfloat16).eps / 4 > 8e-5


every_trainer = pytest.mark.parametrize("kind", [TorchTrainer, TorchTrainerWithSampler])


@every_trainer
def test_a_full_model_is_published_as_passes_compute_with_it_and_saved_as_it_is_trained(
    kind: type[TorchTrainer],
) -> None:
    trainer = kind(TorchBaseModel(in_half(tiny_llama())), max_batch_tokens=64)
    trainer.add_model("m", None)
    run(trainer, random_data(LENGTHS))
    trainer.optim_step("m", AdamParams(learning_rate=1e-4))

    saved, published = trainer.copy_weights("m"), trainer.publication("m")()

    assert {each.dtype for each in saved.tensors.values()} == {torch.float32}
    assert isinstance(published, WeightsCopy)
    assert published.size_bytes == saved.size_bytes // 2
    assert published.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(published.tensors[name], tensor.to(torch.bfloat16)), name


@every_trainer
def test_an_adapter_is_published_in_float32_whatever_the_dtype_of_the_base(
    kind: type[TorchTrainer],
) -> None:
    trainer = kind(TorchBaseModel(in_half(tiny_llama())), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=4))

    published = trainer.publication("m")()

    assert isinstance(published, WeightsCopy)
    assert {each.dtype for each in published.tensors.values()} == {torch.float32}


@pytest.mark.parametrize("room", [1 << 30, 0], ids=["in memory", "on disk"])
async def test_a_sampler_exports_its_weights_unchanged(room: int, tmp_path: Path) -> None:
    with an_engine(in_half(tiny_llama()), tmp_path, max_sampler_bytes=room) as engine:
        engine.trainer.add_model("m", None)
        published = engine.trainer.published("m")
        for name in ("whole", "another"):
            await engine.sampler.publish(name, published)

        exported = await engine.sampler.export("whole")

        assert exported is not None
        assert exported.size_bytes == published.size_bytes
        for name, tensor in published.tensors.items():
            assert torch.equal(exported.tensors[name], tensor), name


@pytest.mark.parametrize("room", [1 << 30, 0], ids=["in memory", "on disk"])
async def test_samples_equal_those_of_a_base_with_the_same_weights(
    room: int, tmp_path: Path
) -> None:
    with an_engine(in_half(tiny_llama()), tmp_path, max_sampler_bytes=room) as engine:
        engine.trainer.add_model("m", None)
        run(engine.trainer, random_data(LENGTHS))
        engine.trainer.optim_step("m", AdamParams(learning_rate=1e-2))
        for name in ("whole", "another"):
            await engine.sampler.publish(name, engine.trainer.copy_weights("m"))
        copy = with_weights_of(engine.trainer, in_half(tiny_llama()))

        whole = await engine.sampler.sample("whole", a_sampling_request([3, 1, 4, 1, 5]))

        with an_engine(copy, tmp_path / "copy") as expected:
            await expected.sampler.publish("base", None)
            base = await expected.sampler.sample("base", a_sampling_request([3, 1, 4, 1, 5]))
        assert whole.sequences == base.sequences


def test_a_base_that_keeps_some_weights_in_float32_is_not_fully_fine_tuned(tmp_path: Path) -> None:
    base = TorchBaseModel.load(str(save(tiny_ernie(), tmp_path)), torch.bfloat16)
    trainer = TorchTrainer(base, max_batch_tokens=64)

    with pytest.raises(InvalidRequest, match=r"mlp\.gate\.\S* in torch\.float32; set a LoRA rank"):
        trainer.add_model("m", None)
