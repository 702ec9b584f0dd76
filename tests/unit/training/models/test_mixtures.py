"""Mixtures of experts with the torch trainer: LoRA on attention, or full fine-tuning.

`test_expert_adapters` tests adapters of experts.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import (
    in_dtype,
    save,
    tiny_deepseek_v2,
    tiny_mixtral,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import assert_equal
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.model.architecture import as_in_files, from_files
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer


def a_trainer() -> TorchTrainer:
    return TorchTrainer(TorchBaseModel(tiny_qwen3_moe(normed=False)), max_batch_tokens=64)


def test_logprobs_of_a_fresh_adapter_are_huggingfaces() -> None:
    trainer, reference = a_trainer(), tiny_qwen3_moe(normed=False).eval()
    [datum] = random_data([20])
    trainer.add_model("m", LoraConfig(rank=4, train_mlp=False))

    output = trainer.forward("m", prepare(a_request([datum]), trainer.limits))

    ids = torch.from_numpy(datum.tokens.astype(np.int64))
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids[None]).logits[0], -1)
    np.testing.assert_allclose(
        output.logprobs[0], expected.gather(1, targets[:, None])[:, 0].numpy(), atol=1e-5
    )


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_deepseek_v2, tiny_qwen3])
def test_weights_are_named_as_files_name_them_and_back(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    folder = str(save(model, tmp_path))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    named = as_in_files(folder, weights)

    assert_equal(named, load_file(tmp_path / "model.safetensors"), atol=0)
    assert_equal(from_files(folder, named), weights, atol=0)


def test_naming_weights_leaves_the_default_dtype_of_other_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_dtype(tiny_qwen3_moe(), torch.bfloat16)
    folder = str(save(model, tmp_path))
    weights = {name: weight.detach().float() for name, weight in model.named_parameters()}
    defaults: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", defaults.append)

    from_files(folder, as_in_files(folder, weights))

    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()
    assert set(defaults) == {torch.float32}


@pytest.mark.parametrize("lora", [LoraConfig(rank=4, seed=1, train_mlp=False), None])
def test_attention_is_adapted_and_all_of_a_mixture_is_fine_tuned(lora: LoraConfig | None) -> None:
    trainer = a_trainer()
    trainer.add_model("m", lora)
    batch = prepare(a_request(random_data([20, 12])), trainer.limits)

    losses = []
    for _ in range(6):
        losses.append(trainer.forward_backward("m", batch).metrics["loss:sum"])
        trainer.optim_step("m", AdamParams(learning_rate=1e-2))

    assert losses[-1] < 0.9 * losses[0]
