"""Builds a megatron-core model from a Hugging Face configuration and loads its weights.

mbridge supports the model families; its unchecked assumptions are verified here first.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mbridge import AutoBridge
from mbridge.core import register_model
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.llama import LLaMABridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from tinkercloud_worker.engine.tensor_slices import TensorSlice
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.parameters import TensorLayout
from tinkercloud_worker.megatron_trainer.devices.device import Device
from tinkercloud_worker.megatron_trainer.layers import deepseek, mixtures, rotary
from tinkercloud_worker.megatron_trainer.layers.adapted_layers import (
    RecomputedLayers,
    use_gates_without_copies,
)
from tinkercloud_worker.megatron_trainer.layers.grouped_experts import GroupedExperts, located
from tinkercloud_worker.megatron_trainer.layers.megatron_adapters import (
    AdaptedLinears,
    Merge,
    concatenated,
    interleaved,
)
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.model.architecture import (
    UnsupportedModelError,
    check_tied,
    is_tied,
    max_context_length,
    read_config,
    targets_of,
)
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.model.quantized import QuantizedFolder, block_size
from tinkercloud_worker.model.weights_check import check_finite, check_weights

# Mistral's layers are the same as Llama's, except for the sliding window of early versions, which
# is rejected.
register_model("mistral")(LLaMABridge)

_SETTINGS = {
    "variable_seq_lengths": True,
    # Losses are sums, not divided by the number of tokens or micro-batches.
    "calculate_per_token_loss": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,
}


_MIXTURE = (".mlp.gate.", ".mlp.experts.")
_LAYER = re.compile(r"model\.layers\.\d+\.")
_FAMILIES = deepseek.FAMILIES | {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}

_ADAPTED = frozenset(
    {
        "linear_qkv",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_kv_down_proj",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }
)
"""megatron-core's names of the linear layers that can be adapted."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of Hugging Face weights."""
_HEADS = ("output_layer.weight", "embedding.word_embeddings.weight")


@dataclass(frozen=True, slots=True, eq=False)
class MegatronModel:
    """A rank's part of the frozen base, and the trainable parts of the full model."""

    module: GPTModel
    """It ends with the final norm of the last stage. The caller computes the LM head from
    `lm_head_weight`, because the logits of all positions would not fit into memory."""
    sources: Mapping[str, Sequence[TensorSlice]]
    """For each weight of the module, the parts of Hugging Face weights that form it without tensor
    parallelism."""
    layout: TensorLayout
    """Layout of the Hugging Face model's weights."""
    linears: AdaptedLinears
    experts: Sequence[GroupedExperts]
    """The experts on this rank, layer by layer."""
    layers: RecomputedLayers
    targets: Sequence[Target]
    hf_config: PretrainedConfig
    device: Device
    fingerprint: str | None = None
    """Fingerprint of the folder that it was loaded from."""

    @property
    def lm_head_weight(self) -> str:
        """Name of the LM head's weight on the last stage: its own, or the embedding's."""
        names = dict(self.module.named_parameters())
        return next(name for name in _HEADS if name in names)

    @property
    def lm_head(self) -> Target:
        """The LM head as a LoRA target."""
        return next(target for target in self.targets if target.group == "unembed")


def load(path: str, dtype: torch.dtype, parallelism: Parallelism, device: Device) -> MegatronModel:
    """Build this rank's part of a model and load its weights. Collective over all ranks.

    Args:
        path: a folder in Hugging Face layout.
        dtype: the dtype of the base weights.
        parallelism: how to divide the model; the size of the initialized `torch.distributed` group
            must be a multiple of its ranks.
        device: the device to compute on.

    Raises:
        UnsupportedModelError: the family, the configuration or the requested parallelism is not
            supported.
    """
    config = read_config(path)
    model, bridge = blank(config, dtype, parallelism, device)
    check_weights(path)
    block = block_size(config)
    if block is not None:
        folder = QuantizedFolder(path, block, dtype)
        bridge._get_safetensor_io = partial(_Dequantized, folder)
    if is_tied(config):
        _check_tied(path)
    with device.computing(), torch.no_grad(), _listed_once(model.module):
        # Weights that the bridge does not load stay NaN, and are found by this check.
        for _, tensor in _weights(model.module):
            tensor.fill_(math.nan)
        try:
            bridge.load_weights([model.module], path)
        except SafetensorError as error:
            raise UnsupportedModelError(
                f"{path}: a weight file can't be read ({error}); download the model again"
            ) from error
        except (KeyError, ValueError) as error:
            raise UnsupportedModelError(
                f"{path}: the megatron trainer did not find some weights ({error}); it expects the"
                " names that save_pretrained of transformers writes: save the model again with it,"
                " or use backend torch"
            ) from error
    check_finite(path, _named_as_in_files(model))
    return replace(model, fingerprint=fingerprint_of(path))


def _named_as_in_files(model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's weights, named by their Hugging Face weights."""
    for name, tensor in _weights(model.module):
        parts = {part.name: None for part in model.sources.get(name, ())}
        yield " with ".join(parts) or name, tensor


def _weights(module: GPTModel) -> list[tuple[str, Tensor]]:
    """Return all loaded weights."""
    return [
        (name, tensor)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    ]


def _check_tied(path: str) -> None:
    both: dict[str, Tensor] = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in {_EMBEDDING, _HEAD} & set(tensors.keys()):
                both[name] = tensors.get_tensor(name)
    if len(both) > 1:
        check_tied(both[_EMBEDDING], both[_HEAD])


def _listed_once(module: nn.Module) -> AbstractContextManager[object]:
    """Return a context that caches `state_dict`, which mbridge calls for each weight."""
    state = module.state_dict()
    return patch.object(module, "state_dict", lambda: state)


class _Dequantized(SafeTensorIO):  # type: ignore[misc]
    """Reads a folder of quantized weights for a bridge."""

    def __init__(self, folder: QuantizedFolder, path: str) -> None:
        super().__init__(path)
        self._folder = folder

    def load_some_hf_weight(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self._folder.read(names)


def blank(
    config: Any,  # noqa: ANN401 - transformers' own
    dtype: torch.dtype,
    parallelism: Parallelism,
    device: Device,
) -> tuple[MegatronModel, Any]:
    """Return a model with uninitialized weights, and the bridge that loads them.

    Arguments and errors are the same as for `load`, except for the configuration instead of a
    folder.
    """
    check(config, parallelism)
    # Latent attention applies rotary positions itself.
    is_latent = config.model_type in deepseek.FAMILIES
    mixture = mixtures.mixture_of(config)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        context_parallel_size=parallelism.context,
        expert_model_parallel_size=parallelism.expert,
        # The default is half an hour, regardless of the timeout of the ranks.
        distributed_timeout_minutes=_world_timeout() / timedelta(minutes=1),
    )
    with device.computing():
        device.seed()
        bridge = _bridge(config, dtype)
        bridge.set_extra_args(
            **_SETTINGS,
            **({} if is_latent else rotary.settings(config)),
            **mixtures.settings(mixture),
            **device.configure(bridge, parallelism),
        )
        module = _module(bridge, device, dtype)
        if not is_latent:
            rotary.set_frequencies(module, config)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    sources = _sources(bridge, module)
    _check_complete(whole, sources)
    targets = targets_of(whole, "model", "lm_head")
    linears, experts = _adapt(bridge, module, targets)
    # The trainer computes the LM head.
    module.post_process = False
    find = mixtures.made_of(whole)
    return MegatronModel(
        module,
        {name: [find(weight) for weight in weights] for name, weights in sources.items()},
        TensorLayout.of(dict(whole.named_parameters())),
        linears,
        experts,
        RecomputedLayers(module.decoder.layers),
        targets,
        config,
        device,
    ), bridge


def _world_timeout() -> timedelta:
    """Return the timeout of the process group of all ranks."""
    assert dist.group.WORLD is not None  # noqa: S101 - ranks have met before they load
    # All backends of the group have the same timeout, and one of them is always gloo.
    gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    patience: timedelta = gloo.options._timeout
    return patience


def _module(bridge: Any, device: Device, dtype: torch.dtype) -> GPTModel:  # noqa: ANN401 - mbridge has no types
    module: GPTModel = bridge._model_provider([])(
        parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    )
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    use_gates_without_copies(module)
    # Norms are created in float32 regardless of the requested dtype.
    module.to(device.torch_device, dtype)
    if module.pre_process:
        # The embedding may belong to a fully fine-tuned model, in float32.
        module.embedding.word_embeddings.register_forward_hook(
            lambda _module, _ids, found: found.to(dtype)
        )
    module.requires_grad_(requires_grad=False).eval()
    return module


def check(config: Any, parallelism: Parallelism) -> None:  # noqa: ANN401 - transformers' own
    """Check from its configuration that a model is supported with this parallelism.

    The planner (`tinkercloud_planning.supported`, `.layouts`) mirrors these checks.

    Raises:
        UnsupportedModelError: it is not.
    """
    if config.model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is not supported by the megatron trainer, which"
            f" supports {', '.join(sorted(_FAMILIES))}; use backend torch"
        )
    if getattr(config, "quantization_config", None) and block_size(config) is None:
        raise UnsupportedModelError(
            "quantization_config: the megatron trainer only reads block-quantized fp8 weights; use"
            " a bfloat16 copy of the model, without this field in config.json"
        )
    if config.model_type in deepseek.FAMILIES:
        deepseek.check(config, parallelism)
    rotary.check(config)
    if config.hidden_act != "silu":
        raise UnsupportedModelError(
            f"hidden_act: the megatron trainer only supports silu, but this model uses"
            f" {config.hidden_act}; use backend torch"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    narrow = window is not None and window < max_context_length(config)
    if ("sliding_attention" in kinds) if kinds else narrow:
        raise UnsupportedModelError(
            f"sliding_attention (window {window}) is not supported by the megatron trainer; use"
            " backend torch"
        )
    for name, size in {
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }.items():
        if size % parallelism.tensor:
            raise UnsupportedModelError(
                f"{name} {size} is not divisible by trainer.tensor_parallel {parallelism.tensor}"
            )
    if config.num_hidden_layers % parallelism.pipeline:
        raise UnsupportedModelError(
            f"num_hidden_layers {config.num_hidden_layers} is not divisible by"
            f" trainer.pipeline_parallel {parallelism.pipeline}"
        )
    mixtures.check(mixtures.mixture_of(config), parallelism)


def _bridge(config: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401 - mbridge has no types
    # mbridge requires this field, which some families omit.
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    bridge = AutoBridge.from_config(config, dtype=dtype)
    head = _EMBEDDING if is_tied(config) else _HEAD
    # The maps are class attributes, and some bridges modify them, so this instance gets copies.
    bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": head}
    mixtures.name_experts(bridge)
    # mbridge reads the rotary settings from their former place in the configuration.
    bridge._get_gptmodel_args = lambda: {
        "vocab_size": config.vocab_size,
        "max_sequence_length": max_context_length(config),
        "position_embedding_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
    }
    return bridge


def _sources(bridge: Any, module: GPTModel) -> dict[str, Sequence[str]]:  # noqa: ANN401 - as above
    names = bridge._weight_name_mapping_mcore_local_to_global(module)
    return {
        name: bridge._weight_name_mapping_mcore_to_hf(names[name])
        for name, _ in module.named_parameters()
    }


def _check_complete(whole: nn.Module, sources: Mapping[str, Sequence[str]]) -> None:
    """Check that this rank's layers use all weights of the Hugging Face layers.

    Routers and experts have other names in files; missing ones are detected on loading.

    Raises:
        UnsupportedModelError: the bridge would skip weights.
    """
    used = {name for names in sources.values() for name in names}
    layers = {match[0] for name in used if (match := _LAYER.match(name))}
    for name, _ in whole.named_parameters():
        match = _LAYER.match(name)
        is_here = match is not None and match[0] in layers
        if is_here and name not in used and not any(part in name for part in _MIXTURE):
            raise UnsupportedModelError(
                f"{name}: the megatron trainer does not support this weight; use backend torch"
            )


def _adapt(
    bridge: Any,  # noqa: ANN401 - as above
    module: GPTModel,
    targets: Sequence[Target],
) -> tuple[AdaptedLinears, Sequence[GroupedExperts]]:
    by_name = {target.name: target for target in targets}
    linears, experts = AdaptedLinears(), []
    merges: dict[str, Merge] = {"linear_qkv": interleaved(module.config)}
    names = bridge._weight_name_mapping_mcore_local_to_global(module)
    for name, submodule in module.named_modules():
        last = name.rpartition(".")[2]
        if last in _ADAPTED:
            if ".local_experts." in name:
                continue
            weights = bridge._weight_name_mapping_mcore_to_hf(names[f"{name}.weight"])
            adapted = [by_name[weight.removesuffix(".weight")] for weight in weights]
            linears.attach(submodule, adapted, merges.get(last, concatenated))
        if isinstance(submodule, MoELayer):
            first = f"{name}.experts.local_experts.0"
            experts.append(_adapt_experts(bridge, linears, submodule, first, by_name, names))
    return linears, experts


def _adapt_experts(  # noqa: PLR0917 - as above
    bridge: Any,  # noqa: ANN401 - as above
    linears: AdaptedLinears,
    layer: MoELayer,
    first: str,
    targets: Mapping[str, Target],
    names: Mapping[str, str],
) -> GroupedExperts:
    weights = [
        weight
        for linear in ("linear_fc1", "linear_fc2")
        for weight in bridge._weight_name_mapping_mcore_to_hf(names[f"{first}.{linear}.weight"])
    ]
    gate, up, down = (targets[located(weight)[0]] for weight in weights)
    return GroupedExperts(linears, layer, (gate, up, down), first=located(weights[0])[1])
