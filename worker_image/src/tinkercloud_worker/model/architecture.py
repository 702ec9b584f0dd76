"""What a model's configuration tells: which weights can be adapted, and its limits.

No weights are read: a head whose model is elsewhere has only its configuration.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers import __version__ as transformers_version
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from tinkercloud_worker.engine.batch import TokenLimits
from tinkercloud_worker.lora.adapters import Group, Target
from tinkercloud_worker.lora.experts import find_experts

BUILDING = threading.Lock()
"""Held while transformers builds a model: meanwhile it changes defaults of the whole process."""


_LONGEST_REASON = 300
"""Characters of an error of transformers that a message has."""


class UnsupportedModelError(Exception):
    """This model's architecture is not one we compute correctly; the message says why."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model without its weights."""

    targets: Sequence[Target]
    """Weights that can be adapted, in the order of its modules."""
    limits: TokenLimits
    """Of its vocabulary and its positions."""


def read_architecture(path: str) -> Architecture:
    """Return the architecture of a model in a local folder in Hugging Face layout.

    Args:
        path: of the folder, which may lack the weights.

    Raises:
        UnsupportedModelError: the folder is not there, or the architecture is not one we compute
            correctly.
    """
    check_folder(path)
    model = _without_weights(path)
    trunk, head = trunk_and_head(model)
    targets = find_targets(model, name_of(model, trunk), name_of(model, head))
    vocab_size = next(t.out_features for t in targets if t.group == "unembed")
    return Architecture(targets, TokenLimits(vocab_size, max_context_length(model.config)))


def as_in_files(path: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model as its files have them, experts one by one.

    Args:
        path: of the model's folder, which may lack the weights.
        weights: all of them, by the names of its modules.
    """
    with BUILDING:
        named: dict[str, Tensor] = revert_weight_conversion(_without_weights(path), dict(weights))
    return named


def from_files(path: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `as_in_files`. Weights are of one dtype, and stay so."""
    dtype = next(iter(weights.values())).dtype
    with BUILDING:
        model = _without_weights(path)
        config = deepcopy(model.config)
        # These are not, whatever the files of the base are.
        vars(config).pop("quantization_config", None)
        filled = type(model).from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=dtype
        )
    return {name: weight.detach() for name, weight in filled.named_parameters()}


@lru_cache(maxsize=1)
def _without_weights(path: str) -> PreTrainedModel:
    return blank_model(read_config(path))


def read_config(path: str) -> Any:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the configuration of a model in a local folder.

    Raises:
        UnsupportedModelError: the folder is not there, or transformers does not know the model.
    """
    check_folder(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(_why_unread(Path(path) / "config.json", error)) from error


def _why_unread(file: Path, error: Exception) -> str:
    try:
        family = json.loads(file.read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return f"{file} is not there, or is no JSON; a model's folder has its configuration there"
    if isinstance(family, str) and family in CONFIG_MAPPING:
        return f"{file} can't be read: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    return (
        f"config.json: transformers {transformers_version} has no model_type {family!r}, and code"
        " in a model's folder is not run; use a model, or a copy of this one, of a family that it"
        " has"
    )


def model_class(config: Any) -> tuple[type[PreTrainedModel], Any]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the class that computes text with a model, and the configuration that it takes.

    A vision-language model has a class of its own, unless transformers has one for its text alone.

    Raises:
        UnsupportedModelError: there is none.
    """
    for mapping in (
        AutoModelForCausalLM._model_mapping,
        AutoModelForImageTextToText._model_mapping,
    ):
        if type(config) not in mapping.keys():  # noqa: SIM118 - `in mapping` does not know classes
            continue
        kind = _get_model_class(config, mapping)
        text_class = config.sub_configs.get("text_config")
        is_of_text = kind.config_class == text_class and type(config) is not text_class
        return kind, config.get_text_config() if is_of_text else config
    raise UnsupportedModelError(
        f"config.json: model_type {config.model_type!r} is no causal language model, nor a"
        " vision-language model with one, in transformers"
        f" {transformers_version}; only these can be served"
    )


def blank_model(config: Any) -> PreTrainedModel:  # noqa: ANN401 - transformers' configurations have no common type
    """Return a model of this configuration, float32, whose weights and buffers hold no memory.

    Raises:
        UnsupportedModelError: transformers has no language model of this configuration.
    """
    kind, own_config = model_class(config)
    with torch.device("meta"):
        # Any other dtype would be torch's default meanwhile, for all threads.
        model: PreTrainedModel = kind._from_config(own_config, dtype=torch.float32)
    model.eval()
    keep_text(model)
    return model


def keep_text(model: PreTrainedModel) -> Sequence[str]:
    """Remove all parts of a model that text never reaches: towers for images and sound.

    Names of what stays are those of the published model, so that adapters fit it.

    Returns:
        Prefixes of the names of removed weights.
    """
    decoder, inner = _decoder(model), model.base_model
    if inner in {model, decoder} or decoder not in set(inner.modules()):
        return []
    towers = [name for name, child in inner.named_children() if decoder not in set(child.modules())]
    for name in towers:
        setattr(inner, name, None)
    return [f"{name_of(model, inner)}.{name}." for name in towers]


def check_folder(path: str) -> None:
    """Check that a model's folder is there.

    Raises:
        UnsupportedModelError: it is not.
    """
    if not Path(path).is_dir():
        raise UnsupportedModelError(f"{path} is not a folder with a Hugging Face model")


def is_tied(config: Any) -> bool:  # noqa: ANN401 - transformers' configurations have no common type
    """Whether a model's embedding and its output layer are one weight, by its configuration."""
    return bool(getattr(config, "tie_word_embeddings", False))


def check_tied(embedding: Tensor, head: Tensor) -> None:
    """Check that a model whose configuration ties its embeddings has one weight for both.

    If not, transformers believes the files, but megatron-core and inference engines the
    configuration: what is trained would not be what is sampled.

    Args:
        embedding: as it was read.
        head: the output layer's weight, as it was read.

    Raises:
        UnsupportedModelError: they differ.
    """
    if head is not embedding and not torch.equal(head, embedding):
        raise UnsupportedModelError(
            "tie_word_embeddings: config.json says that embedding and output layer are one weight,"
            " but the files have two that differ; set it to false there"
        )


_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names under which families have the cap of their logits."""
_NO_CAP = 1e4
"""Logits of hundreds are further below such a cap than float32 rounds."""


def check_uncapped(config: Any) -> None:  # noqa: ANN401 - transformers' configurations have no common type
    """Check that a model's logits are the output layer's, and not squeezed below a cap.

    Comparing logits of a few tokens would not tell: only confident ones come near the cap.

    Raises:
        UnsupportedModelError: they are capped.
    """
    for name in _CAPS:
        cap = getattr(config, name, None)
        if isinstance(cap, int | float) and 0 < cap < _NO_CAP:
            raise UnsupportedModelError(
                f"{name}: the model caps its logits at {cap:g}, which this engine does not compute;"
                " it can't be served"
            )


_DIVISORS, _FACTORS = ("logits_scaling",), ("logit_scale", "lm_head_multiplier")
"""Names under which families have what logits are divided or multiplied by (Granite, Cohere,
Falcon-H1)."""


def logits_factor(config: Any) -> float:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the factor of a model's logits; 1 in most families.

    As the output layer is linear, hidden states are multiplied instead.
    """
    text = config.get_text_config()
    factor = 1.0
    for name in _FACTORS:
        factor *= getattr(text, name, None) or 1.0
    for name in _DIVISORS:
        factor /= getattr(text, name, None) or 1.0
    return factor


def max_context_length(config: Any) -> int:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the longest sequence that a model's configuration allows, in tokens."""
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", 0) or 1 << 20)


def rotary_switch(config: Any) -> int | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the length beyond which a sequence has other rotary positions, from its first on.

    That is so of `longrope`. Those that are `dynamic` change beyond the longest sequence only.
    None: they are the same for all sequences.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Either of all layers, or of each kind of them.
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    switches = [
        int(each["original_max_position_embeddings"])
        for each in kinds
        if each.get("rope_type") == "longrope"
    ]
    switch = min(switches, default=max_context_length(config))
    return switch if switch < max_context_length(config) else None


def trunk_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Return the module that holds a model's layers, and its output embedding.

    Raises:
        UnsupportedModelError: it does not have both.
    """
    trunk, head = _decoder(model), model.get_output_embeddings()
    if head is None or trunk is model:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r}: {type(model).__name__} does not keep its"
            " layers and its output embedding in two modules, which this engine needs to compute"
            " logits; it can't be served"
        )
    return trunk, head


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes the hidden states of text; the model itself if none does."""
    decoder: nn.Module = model.get_decoder()
    # Llama 4's text model names another module as its base than it has.
    return getattr(model, "model", model) if decoder is model else decoder


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Return the qualified name that a module has in a model."""
    names: dict[nn.Module, str] = {each: name for name, each in model.named_modules()}
    return names[module]


def round_behind_embedding(model: PreTrainedModel) -> str | None:
    """Make the input embedding take float32 weights in place of its own; return its weight's name.

    What is looked up is rounded to its own weight's dtype, as if the weights had been rounded. But
    a token's gradient is then a float32 sum over all positions that have it.
    None: the module does more than look up, and computes in the dtype of its weight.
    """
    module = model.get_input_embeddings()
    if type(module).forward is not nn.Embedding.forward:
        return None
    dtype = next(module.parameters()).dtype
    module.register_forward_hook(lambda _module, _ids, found: found.to(dtype))
    return f"{name_of(model, module)}.weight"


def find_targets(model: PreTrainedModel, trunk_name: str, head_name: str) -> list[Target]:
    """Return the weights of a model that can be adapted, in the order of its modules.

    They are those that Tinker adapts: all linear ones but routers, and of latent attention (MLA)
    those that compress, but not those that expand again. Layers that compute otherwise than their
    class's name says, and weights that are read without calling their layer, are left out too.

    Args:
        model: any Hugging Face causal LM, also one without weights.
        trunk_name: of the module that holds its layers.
        head_name: of its output embedding.

    Raises:
        UnsupportedModelError: the output embedding is not linear.
    """
    targets: list[Target] = []
    experts = {each.name: each.targets for each in find_experts(model)}
    for name, module in model.named_modules():
        shape = _linear_shape(module)
        if name in experts:
            targets.extend(experts[name])
        elif name == head_name and shape:
            targets.append(Target(name, *shape, group="unembed"))
        elif shape and name.startswith(f"{trunk_name}.") and _is_in_a_layer(name):
            targets.append(Target(name, *shape, group=_group(name)))
    if not any(target.group == "unembed" for target in targets):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output embedding")
    return targets


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear) and _is_plain(type(module)):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


def _is_plain(kind: type[nn.Linear]) -> bool:
    """Whether a class of linear layers is computed as any is; Falcon's only writes it out."""
    return kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"


_ROUTERS = frozenset({"gate", "router", "router_gate", "shared_expert_gate"})
"""Names of routers, or of modules that hold one."""
_NOT_ADAPTED = frozenset({"q_b_proj", "kv_b_proj", "dt_proj"})
"""Leaves of other names; Mamba reads the weight of `dt_proj` without calling it."""


def _is_in_a_layer(name: str) -> bool:
    """Whether a module belongs to one of the numbered layers, and is one that is adapted there."""
    parts = name.split(".")
    return (
        any(part.isdigit() for part in parts)
        and _ROUTERS.isdisjoint(parts)
        and parts[-1] not in _NOT_ADAPTED
    )


def _group(name: str) -> Group:
    return "attention" if "attn" in name or "attention" in name else "mlp"
