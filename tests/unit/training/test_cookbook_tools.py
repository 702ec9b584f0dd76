"""The tools of the cookbook and PEFT on the files of a checkpoint archive."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from tinker_cookbook.exceptions import WeightsMergeError
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.families import SLOTTED
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v3,
    tiny_gemma2,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.untie import untie

# It warns that servers have little experience with adapters of experts.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:tinker_cookbook.*")
UNTIED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen3's experts": tiny_qwen3_moe,
    "gpt-oss": SLOTTED["sinks"],
    "deepseek": tiny_deepseek_v3,
}
TIED: dict[str, Callable[[], PreTrainedModel]] = {
    "tied llama": partial(tiny_llama, tied=True),
    "tied qwen3": tiny_qwen3,
    # Its configuration does not say so: that is its class's default.
    "tied gemma": tiny_gemma2,
}
MODELS = UNTIED | TIED
DATA = random_data([5, 17])


def trained(model: PreTrainedModel, *, train_unembed: bool = True) -> TorchTrainer:
    """Return a trainer of an adapter "m" that has made two steps."""
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=32)
    trainer.add_model("m", LoraConfig(rank=4, seed=1, train_unembed=train_unembed))
    for _ in range(2):
        run(trainer, DATA)
        trainer.optim_step("m", AdamParams(learning_rate=3e-2))
    return trainer


def archive(trainer: TorchTrainer, folder: Path) -> str:
    """Write a checkpoint's files."""
    folder.mkdir()
    for name, content in formats.encode_weights(trainer.copy_weights("m"), "base").items():
        (folder / name).write_bytes(content)
    return str(folder)


def logprobs(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    ids = torch.tensor(datum.tokens[None].astype(np.int64))
    targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
    return torch.log_softmax(model(input_ids=ids).logits[0], -1).gather(1, targets)[:, 0].detach()


def base_for_merging(name: str, folder: Path) -> str:
    """Return the folder of a model into which an adapter of its output layer can be merged."""
    saved = save(MODELS[name](), folder / "base")
    if name in UNTIED:
        return str(saved)
    untie(saved, folder / "untied")
    return str(folder / "untied")


def assert_has_the_logprobs_of(trainer: TorchTrainer, model: torch.nn.Module) -> None:
    for got, datum in zip(run(trainer, DATA).logprobs, DATA, strict=True):
        np.testing.assert_allclose(got, logprobs(model, datum), atol=1e-5)


def loaded(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return model


# The cookbook merges experts of DeepSeek's as they are in files, not as transformers has them.
@pytest.mark.parametrize(
    ("name", "strategy"),
    [*[(name, "shard") for name in MODELS], *[(n, "full") for n in MODELS if n != "deepseek"]],
)
def test_a_merged_model_has_the_trainers_logprobs(name: str, strategy: str, tmp_path: Path) -> None:
    trainer = trained(MODELS[name]())

    merged = str(tmp_path / "merged")
    build_hf_model(
        base_model=base_for_merging(name, tmp_path),
        adapter_path=archive(trainer, tmp_path / "adapter"),
        output_path=merged,
        dtype="float32",
        merge_strategy=strategy,
    )

    assert_has_the_logprobs_of(trainer, loaded(merged))


@pytest.mark.parametrize("name", TIED)
def test_an_adapter_without_the_lm_head_is_merged_into_a_tied_model(
    name: str, tmp_path: Path
) -> None:
    trainer = trained(MODELS[name](), train_unembed=False)
    base = str(save(MODELS[name](), tmp_path / "base"))

    merged = str(tmp_path / "merged")
    build_hf_model(
        base_model=base, adapter_path=archive(trainer, tmp_path / "adapter"), output_path=merged
    )

    assert_has_the_logprobs_of(trainer, loaded(merged))


@pytest.mark.parametrize("name", TIED)
def test_the_cookbook_rejects_to_merge_an_lm_head_into_a_tied_model(
    name: str, tmp_path: Path
) -> None:
    trainer = trained(MODELS[name]())
    base = str(save(MODELS[name](), tmp_path / "base"))

    with pytest.raises(WeightsMergeError, match=r"lm_head\.weight.* does not exist"):
        build_hf_model(
            base_model=base,
            adapter_path=archive(trainer, tmp_path / "adapter"),
            output_path=str(tmp_path / "merged"),
        )


@pytest.mark.parametrize("name", ["llama", *TIED])
def test_an_adapter_that_peft_merges_has_the_trainers_logprobs(name: str, tmp_path: Path) -> None:
    trainer = trained(MODELS[name]())
    base = loaded(base_for_merging(name, tmp_path))

    adapted = peft.PeftModel.from_pretrained(base, archive(trainer, tmp_path / "adapter"))

    assert_has_the_logprobs_of(trainer, adapted.merge_and_unload())


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("name", TIED)
def test_peft_warns_when_it_merges_an_lm_head_into_a_tied_model(name: str, tmp_path: Path) -> None:
    trainer = trained(MODELS[name]())
    files = archive(trainer, tmp_path / "adapter")

    adapted = peft.PeftModel.from_pretrained(MODELS[name](), files).eval()

    assert_has_the_logprobs_of(trainer, adapted)
    with pytest.warns(UserWarning, match="You can untie the embeddings"):
        adapted.merge_and_unload()


# PEFT says of patterns of its own that they fit no module: they fit a parameter.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("name", "train_unembed"),
    [("qwen3's experts", False), *[(name, True) for name in ("llama", *TIED)]],
)
def test_an_adapter_converted_for_servers_has_the_trainers_logprobs(
    name: str, tmp_path: Path, *, train_unembed: bool
) -> None:
    trainer = trained(MODELS[name](), train_unembed=train_unembed)
    base = str(save(MODELS[name](), tmp_path / "base"))

    converted = str(tmp_path / "converted")
    build_lora_adapter(
        base_model=base, adapter_path=archive(trainer, tmp_path / "adapter"), output_path=converted
    )

    model = peft.PeftModel.from_pretrained(MODELS[name](), converted).eval()
    assert_has_the_logprobs_of(trainer, model)
