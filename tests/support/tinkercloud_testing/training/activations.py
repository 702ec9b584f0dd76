"""Measures the activations that the torch trainer saves; as a program, with Liger's kernels.

Liger replaces transformers' functions for the entire process, hence the program: it reads named
configurations from standard input as JSON, and prints the bytes that a layer saves for each token,
by name. Without a GPU the kernels themselves do not run: only the tensors saved by Liger's autograd
functions are counted, with arbitrary contents. The check of a loaded base is disabled, because it
would fail.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment
from tinkercloud_worker.model import base_model
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.fused_kernels import use_liger
from tinkercloud_worker.training.trained_model import new_adapter

RANK = 8
"""Rank of the adapter of passes."""
_TOKENS = (64, 128)
_LAYERS = (2, 3)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors; shared memory counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def built(config: Mapping[str, Any]) -> PreTrainedModel:
    """Return a random model in bfloat16."""
    settings = AutoConfig.for_model(**config)
    sees = "vision_config" in config
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(settings, dtype=torch.bfloat16)
    model.requires_grad_(requires_grad=False).train()
    return model


def kept(base: TorchBaseModel, tokens: int, *, recompute: bool) -> int:
    """Return the bytes that a pass of one sequence saves, without weights."""
    adapter = new_adapter(base.targets, LoraConfig(rank=RANK)).trainable
    route = WeightSegment(slice(0, tokens), ActiveWeights(adapter.tensors, lora_scale=1.0))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    sequence = PackedSequences(torch.arange(tokens) % 200, (tokens,))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        base.hidden_of(sequence, [route], recompute=recompute)
    weights = {w.untyped_storage().data_ptr() for w in base.named_weights().values()}
    return bytes_of(t for t in saved if t.untyped_storage().data_ptr() not in weights)


def _with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration whose language model has so many layers."""
    own = {"num_hidden_layers": layers}
    return (
        {**config, "text_config": {**config["text_config"], **own}}
        if "text_config" in config
        else {**config, **own}
    )


def _kept_with_liger(config: Mapping[str, Any]) -> float:
    """Return the bytes that a layer saves for each token."""
    bases = []
    for layers in _LAYERS:
        model = built(_with_layers(config, layers)).eval()
        use_liger(model)
        bases.append(TorchBaseModel(model))
    fewer, more = ([kept(base, tokens, recompute=False) for base in bases] for tokens in _TOKENS)
    return ((more[1] - more[0]) - (fewer[1] - fewer[0])) / (_TOKENS[1] - _TOKENS[0])


def main() -> None:
    """Print the bytes that layers save."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter  # noqa: PLC0415 - it must know before it is imported

    interpreter.GridExecutor.__call__ = lambda *_arguments, **_options: None
    configs: dict[str, dict[str, Any]] = json.load(sys.stdin)
    with patch.multiple(
        base_model, check_logits=lambda *_: None, keeps_sequences_apart=lambda *_: False
    ):
        print(json.dumps({name: _kept_with_liger(config) for name, config in configs.items()}))


if __name__ == "__main__":
    main()
