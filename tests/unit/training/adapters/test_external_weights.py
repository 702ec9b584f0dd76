"""The files of a fully fine-tuned model are a folder that transformers loads as the same model."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import BaseModelSource
from tinkercloud_testing.small_models.models import save, tiny_gpt2, tiny_llama, tiny_qwen3_moe
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.training import external_weights

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": tiny_llama,
    "tied": partial(tiny_llama, tied=True),
    "mixture": tiny_qwen3_moe,
    "gpt2": tiny_gpt2,
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def write(model: PreTrainedModel, base: Path, folder: Path, dtype: str = "float32") -> Path:
    """Write the files of a full model with these weights."""
    weights = WeightsCopy(None, {name: p.detach() for name, p in model.named_parameters()})
    folder.mkdir()
    source = BaseModelSource(name="tiny/model", path=str(base))
    for name, content in external_weights.encode(weights, source, dtype).items():
        (folder / name).write_bytes(content)
    return folder


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with other weights than its base."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_same_model(name: str, tmp_path: Path) -> None:
    base = save(MODELS[name](), tmp_path / "base")
    model = changed(MODELS[name]()).eval()

    folder = write(model, base, tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert AutoTokenizer.from_pretrained(folder).encode("ab")


def test_the_file_has_the_dtype_that_the_model_computes_in(tmp_path: Path) -> None:
    base = save(tiny_llama(), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    (base / "config.json").write_text(json.dumps(quantized))

    folder = write(tiny_llama(), base, tmp_path / "out", dtype="bfloat16")

    written = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in written
    assert written.get("dtype", written.get("torch_dtype")) == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
