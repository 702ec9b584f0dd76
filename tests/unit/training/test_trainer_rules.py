"""Invariants of a trainer: sums, accumulation, independence and exact restoration."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_datum, a_request, random_data
from tinkercloud_testing.small_models.models import (
    save,
    smollm2,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import (
    assert_equal,
    base_of,
    held_models,
    moments_of,
    run,
)
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer import logprobs
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = pytest.mark.timeout(120)

ADAM = AdamParams(learning_rate=1e-2)
LORA = LoraConfig(rank=4, seed=1)


def a_trainer(*models: str, max_batch_tokens: int = 64) -> TorchTrainer:
    trainer = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=max_batch_tokens)
    for name in models:
        trainer.add_model(name, LORA)
    return trainer


def gradient(trainer: TorchTrainer, model_id: str) -> torch.Tensor:
    return held_models(trainer)[model_id].trainable.gradient.clone()


def step(trainer: TorchTrainer, model_id: str, seed: int) -> float:
    output = run(trainer, random_data([5, 9, 3], seed=seed), model_id=model_id)
    trainer.optim_step(model_id, ADAM)
    return output.metrics["loss:sum"]


def test_a_fresh_adapter_is_the_base_model_exactly() -> None:
    trainer = a_trainer("m")
    data = random_data([7, 12])
    base = tiny_llama().eval()

    output = trainer.forward("m", prepare(a_request(data), trainer.limits))

    for got, datum in zip(output.logprobs, data, strict=True):
        logits = base(torch.tensor(datum.tokens[None].astype(np.int64))).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        expected = torch.log_softmax(logits.detach(), -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(got, expected, atol=2e-6)
    tensors = trainer.copy_weights("m").tensors
    assert all(not tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    trainer = a_trainer()
    for name, config in {
        "one": LORA,
        "same": LORA,
        "other seed": replace(LORA, seed=2),
        "attention only": replace(LORA, train_mlp=False, train_unembed=False),
    }.items():
        trainer.add_model(name, config)
    one, same, other, attention = (
        trainer.copy_weights(name).tensors
        for name in ("one", "same", "other seed", "attention only")
    )

    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        if "lora_A" in name:
            bound = 1 / np.sqrt(tensor.shape[1])
            assert not torch.equal(tensor, other[name])
            assert tensor.abs().max() <= bound
            assert tensor.std() == pytest.approx(bound / np.sqrt(3), rel=0.2)
    assert attention
    assert all(torch.equal(tensor, one[name]) for name, tensor in attention.items())


def test_switches_choose_which_layers_have_adapters() -> None:
    trainer = a_trainer()
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    expected = {"train_attn": "self_attn", "train_mlp": "mlp", "train_unembed": "lm_head"}

    for switch, part in expected.items():
        trainer.add_model(switch, LoraConfig(rank=2, **{**off, switch: True}))
        names = trainer.copy_weights(switch).tensors

        assert names
        assert all(part in name for name in names)


def test_an_adapter_of_a_tied_lm_head_leaves_the_embedding_alone() -> None:
    trainer = TorchTrainer(TorchBaseModel(tiny_qwen3()), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=2, seed=1, train_attn=False, train_mlp=False))
    before = base_of(trainer).named_weights()["model.embed_tokens.weight"].clone()

    step(trainer, "m", seed=0)

    assert torch.equal(base_of(trainer).named_weights()["model.embed_tokens.weight"], before)
    assert set(trainer.copy_weights("m").tensors) == {
        "lm_head.lora_A.weight",
        "lm_head.lora_B.weight",
    }


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_a_batch_split_in_parts_has_the_gradient_of_the_whole(parts: int) -> None:
    trainer = a_trainer("whole", "parts")
    for name in ("whole", "parts"):
        step(trainer, name, seed=9)
    data = random_data([5, 20, 3, 11, 8, 2], seed=1)

    run(trainer, data, model_id="whole")
    for start in range(0, len(data), len(data) // parts):
        run(trainer, data[start : start + len(data) // parts], model_id="parts")

    whole, split = gradient(trainer, "whole"), gradient(trainer, "parts")
    assert (whole - split).norm() <= 1e-5 * whole.norm()


def test_padding_and_micro_batches_change_nothing() -> None:
    data = random_data([40, 3, 17, 5, 29, 2], seed=1)
    results = []
    for budget in (1, 64, 10_000):
        trainer = a_trainer("m", max_batch_tokens=budget)
        step(trainer, "m", seed=9)
        output = run(trainer, data)
        results.append((np.concatenate(output.logprobs), gradient(trainer, "m")))

    for others, grad in results[1:]:
        np.testing.assert_allclose(others, results[0][0], atol=1e-5)
        assert (grad - results[0][1]).norm() <= 1e-5 * grad.norm()


def test_gradients_add_up_over_requests_and_zero_weights_add_nothing() -> None:
    trainer = a_trainer("sum", "all")
    first, second = random_data([6], seed=1), random_data([9], seed=2)
    nothing = [a_datum([1, 2, 3], weights=np.zeros(3, np.float32))]

    for part in (first, second, nothing):
        run(trainer, part, model_id="sum")
    run(trainer, [*first, *second], model_id="all")

    expected = gradient(trainer, "all")
    assert (gradient(trainer, "sum") - expected).norm() <= 1e-5 * expected.norm()


def test_two_models_stepping_in_turn_stay_equal_bit_for_bit() -> None:
    trainer = a_trainer("one", "other", "alone")
    turns = [[step(trainer, name, seed) for name in ("one", "other")] for seed in range(5)]
    alone = [step(trainer, "alone", seed) for seed in range(5)]

    assert [one for one, _ in turns] == [other for _, other in turns] == alone
    weights = [held_models(trainer)[name].trainable.flat for name in ("one", "other", "alone")]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_forward_changes_neither_gradient_nor_weights() -> None:
    trainer = a_trainer("m")
    run(trainer, random_data([5]))
    before = gradient(trainer, "m")

    trainer.forward("m", prepare(a_request(random_data([8])), trainer.limits))

    assert torch.equal(gradient(trainer, "m"), before)


def test_a_restored_state_continues_bit_for_bit() -> None:
    trainer = a_trainer("m")
    for seed in range(3):
        step(trainer, "m", seed)
    files = formats.encode_state(trainer.export_state("m"), "tiny")
    expected = [step(trainer, "m", seed) for seed in range(3, 6)]

    other = a_trainer("restored")
    manifest = CheckpointManifest(
        tinker_path="tinker://s:train:0/weights/x",
        owner="somebody",
        base_model="tiny",
        lora=LORA,
        step=3,
        created_at=datetime.now(UTC),
        files={},
    )
    other.import_state("restored", formats.decode_state(manifest, files))

    assert [step(other, "restored", seed) for seed in range(3, 6)] == expected


def test_a_state_of_different_shape_is_rejected_and_changes_nothing() -> None:
    trainer = a_trainer("m")
    trainer.add_model("wider", LoraConfig(rank=8, seed=1))
    trainer.add_model("fewer", LoraConfig(rank=4, seed=1, train_mlp=False))
    before = trainer.copy_weights("m").tensors

    for name in ("wider", "fewer"):
        with pytest.raises(InvalidRequest, match="checkpoint"):
            trainer.import_state("m", trainer.export_state(name))

    after = trainer.copy_weights("m").tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_state_whose_moments_do_not_match_is_rejected_and_changes_nothing() -> None:
    trainer = a_trainer("m", "other")
    trainer.add_model("wider", LoraConfig(rank=8, seed=1))
    step(trainer, "m", seed=0)
    before = trainer.export_state("m")
    state = replace(trainer.export_state("other"), moments=trainer.export_state("wider").moments)

    with pytest.raises(InvalidRequest, match="optimizer state"):
        trainer.import_state("m", state)

    after = trainer.export_state("m")
    assert after.step == before.step == 1
    assert_equal(after.weights.tensors, before.weights.tensors, atol=0)
    assert_equal(moments_of(after), moments_of(before), atol=0)


def test_a_state_is_loaded_into_the_memory_that_the_model_has() -> None:
    trainer = a_trainer("m", "other")
    for name in ("m", "other"):
        step(trainer, name, seed=0)
    before = [vector.data_ptr() for vector in held_models(trainer)["m"].vectors]

    trainer.import_state("m", trainer.export_state("other"))

    assert [vector.data_ptr() for vector in held_models(trainer)["m"].vectors] == before
    assert len(before) == 4


def test_a_gradient_that_is_not_finite_is_rejected_and_dropped() -> None:
    trainer = a_trainer("m")
    step(trainer, "m", seed=0)
    before = trainer.copy_weights("m").tensors
    run(trainer, [a_datum([1, 2, 3], weights=np.full(3, 3e38, np.float32))])

    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        trainer.optim_step("m", ADAM)

    after = trainer.copy_weights("m").tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert np.isfinite(step(trainer, "m", seed=1))


def test_a_step_without_a_gradient_moves_as_adamw_with_zeros_does() -> None:
    trainer = a_trainer("m")
    step(trainer, "m", seed=0)
    flat = torch.nn.Parameter(held_models(trainer)["m"].trainable.flat.detach().clone())
    reference = torch.optim.AdamW([flat], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    state = held_models(trainer)["m"].optimizer.state[held_models(trainer)["m"].trainable.flat]
    reference.state[flat] = {key: value.clone() for key, value in state.items()}
    flat.grad = torch.zeros_like(flat)

    trainer.optim_step("m", ADAM)
    reference.step()

    torch.testing.assert_close(held_models(trainer)["m"].trainable.flat.detach(), flat.detach())


@pytest.mark.parametrize(
    "make", [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_gpt2, tiny_qwen3_moe, tiny_mixtral]
)
def test_full_fine_tuning_has_the_gradient_of_autograd(make: Callable[[], PreTrainedModel]) -> None:
    trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=64)
    trainer.add_model("m", None)
    reference = make().eval()
    data = random_data([5, 9])

    run(trainer, data)
    for datum in data:
        logits = reference(torch.tensor(datum.tokens[None].astype(np.int64))).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        lp = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        (-lp * torch.tensor(datum.inputs["weights"])).sum().backward()

    tensors = held_models(trainer)["m"].trainable.tensors
    for name, parameter in reference.named_parameters():
        error = (tensors[name].grad - parameter.grad).norm() / parameter.grad.norm()
        assert error <= 1e-4, name


def test_full_fine_tuning_leaves_the_shared_base_alone() -> None:
    trainer = a_trainer("lora")
    trainer.add_model("full", None)
    data = random_data([5])
    before = run(trainer, data, model_id="lora").metrics["loss:sum"]

    for seed in range(3):
        step(trainer, "full", seed)

    assert run(trainer, data, model_id="lora").metrics["loss:sum"] == before


def test_the_logits_of_a_full_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = LMHead.logits

    def watched(self: LMHead, hidden: Tensor) -> Tensor:
        logits = original(self, hidden)
        sizes.append(logits.nbytes)
        return logits

    trainer = a_trainer("m", max_batch_tokens=10_000)
    data = random_data([100, 120, 90], seed=1)
    whole = run(trainer, data)
    expected = gradient(trainer, "m")
    trainer.discard_gradient("m")
    monkeypatch.setattr(logprobs, "_LOGITS_BYTES", 16 * 4 * 264)
    monkeypatch.setattr(LMHead, "logits", watched)
    chunked = run(trainer, data)

    assert max(sizes) <= 16 * 4 * 264
    np.testing.assert_allclose(
        np.concatenate(chunked.logprobs), np.concatenate(whole.logprobs), atol=1e-5
    )
    assert (gradient(trainer, "m") - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_an_exported_adapter_is_loaded_by_peft_as_it_is(tmp_path: Path) -> None:
    trainer = a_trainer("m")
    for seed in range(3):
        step(trainer, "m", seed)
    data = random_data([12], seed=5)
    expected = trainer.forward("m", prepare(a_request(data), trainer.limits))
    for name, content in formats.encode_weights(trainer.copy_weights("m"), "tiny").items():
        (tmp_path / name).write_bytes(content)

    model = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()

    logits = model(torch.tensor(data[0].tokens[None].astype(np.int64))).logits[0]
    targets = torch.tensor(data[0].inputs["target_tokens"])[:, None]
    lp = torch.log_softmax(logits.detach(), -1).gather(1, targets)[:, 0]
    np.testing.assert_allclose(lp, expected.logprobs[0], atol=1e-5)


def test_peft_names_round_trip() -> None:
    tensors = a_trainer("m").copy_weights("m").tensors

    assert adapters.from_peft_names(adapters.to_peft_names(tensors)).keys() == tensors.keys()


def test_a_model_whose_logits_we_would_get_wrong_is_rejected() -> None:
    model = tiny_llama()
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * original(hidden)

    with pytest.raises(UnsupportedModelError, match="does not reproduce"):
        TorchBaseModel(model)


def test_a_model_with_tied_configuration_but_different_weights_is_rejected(
    tmp_path: Path,
) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = True

    with pytest.raises(UnsupportedModelError, match=r"tie_word_embeddings.*two different weights"):
        TorchBaseModel.load(str(save(model, tmp_path)), torch.float32)


def test_a_saved_file_is_safetensors(tmp_path: Path) -> None:
    snapshot = a_trainer("m").copy_weights("m")

    save_file(dict(snapshot.tensors), tmp_path / "x.safetensors")

    assert formats.encode_weights(snapshot, "tiny")["adapter_config.json"]


def test_a_real_model_is_served_in_bfloat16() -> None:
    base = TorchBaseModel.load(str(smollm2()), torch.bfloat16)

    assert base.dtype == torch.bfloat16
