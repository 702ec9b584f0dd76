"""Adapters made by Hugging Face PEFT, with random values, and what they compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Write an adapter of random values, as PEFT saves it, and return its folder.

    Args:
        model: the base model, which becomes the adapter's.
        folder: where to write it.
        dtype: dtype of the values in the file.
        config: fields of `peft.LoraConfig`.
    """
    fields = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            random = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data.copy_(random.to(dtype) if "lora_" in name else random)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: each.to(dtype) for name, each in tensors.items()}, folder / WEIGHTS)
    return folder


def logprobs(base: PreTrainedModel, folder: Path, tokens: Sequence[int]) -> list[float]:
    """Return the logprobs of every token except the first, as PEFT computes them."""
    model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    return logprobs_of(model, tokens)


def logprobs_of(model: torch.nn.Module, tokens: Sequence[int]) -> list[float]:
    """Return a model's logprobs of every token except the first."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=ids[:, :-1]).logits[0].float(), -1)
    return [float(each) for each in rows.gather(1, ids[0, 1:, None])[:, 0]]
