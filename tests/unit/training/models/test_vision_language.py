"""Vision-language models are served for text only, and only their language model is adapted."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.families import SCALED, VISION_LANGUAGE, llama4
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.training.peft_twin import PeftTwin
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.model.architecture import UnsupportedModelError, read_architecture
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

ADAM = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
DATA = random_data([9, 5])
PUBLISHED = {
    "Gemma 3": AutoModelForCausalLM,
    "Qwen3.5": AutoModelForCausalLM,
    "Qwen2.5-VL": AutoModelForImageTextToText,
    "Qwen3-VL": AutoModelForImageTextToText,
    "Mistral 3": AutoModelForImageTextToText,
}
"""What loads a published model as PEFT's users do."""


def saved(family: str, folder: Path) -> str:
    VISION_LANGUAGE[family]().save_pretrained(folder)
    return str(folder)


def trained(folder: str, lora: LoraConfig | None) -> TorchTrainer:
    trainer = TorchTrainer(TorchBaseModel.load(folder, torch.float32), max_batch_tokens=32)
    trainer.add_model("m", lora)
    for _ in range(2):
        run(trainer, DATA)
        trainer.optim_step("m", ADAM)
    return trainer


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_all_of_the_language_model_is_adapted_and_nothing_of_the_towers(
    tmp_path: Path, family: str
) -> None:
    folder = saved(family, tmp_path)

    adapter = trained(folder, LoraConfig(rank=2)).copy_weights("m")

    names = [name for name in adapter.tensors if ".lora_B." in name]
    layers = [name for name in names if "lm_head" not in name]
    text = "model.layers." if family == "Qwen3.5" else "model.language_model.layers."
    assert layers
    assert all(name.startswith(text) for name in layers)
    assert any("mlp" in name for name in layers)
    assert all(adapter.tensors[name].any() for name in names)
    targets = {target.b_name for target in read_architecture(folder).targets}
    assert {name for name in names if "experts" not in name} <= targets


@pytest.mark.parametrize("family", PUBLISHED)
def test_peft_loads_adapters_on_the_published_model(tmp_path: Path, family: str) -> None:
    folder = saved(family, tmp_path / "model")
    trainer = trained(folder, LoraConfig(rank=2))
    for name, content in formats.encode_weights(trainer.copy_weights("m"), family).items():
        (tmp_path / name).write_bytes(content)

    published = PUBLISHED[family].from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(published, str(tmp_path)).eval()

    ours = run(trainer, DATA).logprobs
    for datum, logprobs in zip(DATA, ours, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(datum.tokens[None].astype(np.int64))).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        theirs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(logprobs, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_full_fine_tuning_trains_only_the_text_part(tmp_path: Path, family: str) -> None:
    trainer = trained(saved(family, tmp_path), None)

    names = trainer.copy_weights("m").tensors.keys()

    assert any("embed_tokens" in name for name in names)
    assert not [name for name in names if "vision" in name or "visual" in name]


def test_logits_that_falcon_h1_multiplies_are_computed() -> None:
    model = SCALED["Falcon-H1"]()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits.detach()

    base = TorchBaseModel(model)

    torch.testing.assert_close(base.logits(base.hidden(ids, ())[0], ()), expected[0])


@pytest.mark.parametrize("family", ["Granite", "Cohere", "Cohere 2", "Gemma 2"])
def test_logits_that_a_family_multiplies_or_caps_are_trained_as_pefts_are(family: str) -> None:
    trainer = TorchTrainer(TorchBaseModel(SCALED[family]()), max_batch_tokens=32)
    trainer.add_model("m", LoraConfig(rank=2))
    for _ in range(2):
        run(trainer, DATA)
        trainer.optim_step("m", ADAM)
    twin = PeftTwin(SCALED[family](), trainer.copy_weights("m"))

    output = run(trainer, DATA)

    twin.backward(DATA)
    for logprobs, theirs in zip(output.logprobs, twin.logprobs(DATA), strict=True):
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
    gradient = trainer.export_gradient("m")
    assert gradient is not None
    for name, parameter in twin.parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_attention_and_output_of_llama_4_are_adapted(tmp_path: Path) -> None:
    llama4().save_pretrained(tmp_path)
    lora = LoraConfig(rank=2, train_mlp=False)
    trainer = trained(str(tmp_path), lora)
    twin = PeftTwin(llama4(), trainer.copy_weights("m"))

    ours = run(trainer, DATA).logprobs

    for logprobs, theirs in zip(ours, twin.logprobs(DATA), strict=True):
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "t5", "acme", None])
def test_a_model_that_is_no_language_model_is_rejected_with_a_clear_message(
    tmp_path: Path, model_type: str | None
) -> None:
    folder = save(tiny_llama(), tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    with pytest.raises(UnsupportedModelError, match=f"model_type {model_type!r}") as refused:
        TorchBaseModel.load(str(folder), torch.float32)

    assert len(str(refused.value)) < 400
