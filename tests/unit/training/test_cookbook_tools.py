"""What the cookbook makes of archives: `tinker_cookbook.weights` on the files of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.tensors import Datum
from tinkercloud_testing.data import random_data
from tinkercloud_testing.models import save, tiny_deepseek_v3, tiny_llama, tiny_qwen3_moe
from tinkercloud_testing.trainers import run
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

# It warns that servers have little experience with adapters of experts.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:tinker_cookbook.*")
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen3's experts": tiny_qwen3_moe,
    "deepseek": tiny_deepseek_v3,
}
DATA = random_data([5, 17])


def trained(model: PreTrainedModel, *, train_unembed: bool = True) -> TorchTrainer:
    """Return a trainer of an adapter "m" that has made two steps."""
    trainer = TorchTrainer(BaseModel(model), max_batch_tokens=32)
    trainer.add_model("m", LoraConfig(rank=4, seed=1, train_unembed=train_unembed))
    for _ in range(2):
        run(trainer, DATA)
        trainer.optim_step("m", AdamParams(learning_rate=3e-2))
    return trainer


def archive(trainer: TorchTrainer, folder: Path) -> str:
    """Write a checkpoint's files."""
    folder.mkdir()
    for name, content in formats.encode_weights(trainer.snapshot("m"), "base").items():
        (folder / name).write_bytes(content)
    return str(folder)


def logprobs(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    ids = torch.tensor(datum.tokens[None].astype(np.int64))
    targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
    return torch.log_softmax(model(input_ids=ids).logits[0], -1).gather(1, targets)[:, 0].detach()


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_has_the_trainers_logprobs(name: str, tmp_path: Path) -> None:
    trainer = trained(MODELS[name]())
    base = str(save(MODELS[name](), tmp_path / "base"))

    merged = str(tmp_path / "merged")
    build_hf_model(
        base_model=base, adapter_path=archive(trainer, tmp_path / "adapter"), output_path=merged
    )

    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    for got, datum in zip(run(trainer, DATA).logprobs, DATA, strict=True):
        np.testing.assert_allclose(got, logprobs(model, datum), atol=1e-5)


# PEFT says of patterns of its own that they fit no module: they fit a parameter.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ["llama", "qwen3's experts"])
def test_an_adapter_converted_for_servers_has_the_trainers_logprobs(
    name: str, tmp_path: Path
) -> None:
    trainer = trained(MODELS[name](), train_unembed=False)
    base = str(save(MODELS[name](), tmp_path / "base"))

    converted = str(tmp_path / "converted")
    build_lora_adapter(
        base_model=base, adapter_path=archive(trainer, tmp_path / "adapter"), output_path=converted
    )

    model = peft.PeftModel.from_pretrained(MODELS[name](), converted).eval()
    for got, datum in zip(run(trainer, DATA).logprobs, DATA, strict=True):
        np.testing.assert_allclose(got, logprobs(model, datum), atol=1e-5)
