"""Reads the architecture of a model from its configuration: LoRA targets and token limits.

No weights are read: a session head may have only the configuration of its model.
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

from tinkercloud_protocol.adapters.context_length import context_length
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.targets import find_targets
from tinkercloud_worker.vision.tower import VisionTower, split_tower

BUILDING = threading.Lock()
"""Held while transformers builds a model, because that changes process-wide defaults."""


_LONGEST_REASON = 300
"""Maximum characters of a transformers error quoted in a message."""


class UnsupportedModelError(Exception):
    """This engine does not compute the model's architecture correctly; the message says why."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model without its weights."""

    targets: Sequence[Target]
    """LoRA targets, in the order of its modules."""
    limits: ModelLimits
    """Limits of its vocabulary and its context."""


def read_architecture(path: str) -> Architecture:
    """Return the architecture of a model in a local folder in Hugging Face layout.

    Args:
        path: the folder, which may lack the weights.

    Raises:
        UnsupportedModelError: the folder does not exist, or this engine does not compute the
            architecture correctly.
    """
    check_folder(path)
    model = _without_weights(path)
    backbone, lm_head = backbone_and_lm_head(model)
    targets = targets_of(model, name_of(model, backbone), name_of(model, lm_head))
    vocab_size = next(t.out_features for t in targets if t.group == "unembed")
    return Architecture(targets, ModelLimits(vocab_size, max_context_length(model.config)))


def as_in_files(path: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model as in its files, with experts unstacked.

    Args:
        path: the model's folder, which may lack the weights.
        weights: all weights, by the names of the model's modules.
    """
    with BUILDING:
        named: dict[str, Tensor] = revert_weight_conversion(_without_weights(path), dict(weights))
    return named


def from_files(path: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `as_in_files`. All weights have one dtype, which does not change."""
    dtype = next(iter(weights.values())).dtype
    with BUILDING:
        model = _without_weights(path)
        config = deepcopy(model.config)
        # These weights are not quantized, even if the files of the base are.
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
        UnsupportedModelError: the folder does not exist, transformers does not know the model, or
            its positions change with the length of a sequence.
    """
    check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(_why_unread(Path(path) / "config.json", error)) from error
    _check_positions(config)
    return config


def _check_positions(config: Any) -> None:  # noqa: ANN401 - transformers' configurations have no common type
    for rope in _rotary_kinds(config):
        if rope.get("rope_type") == "dynamic" and rope.get("factor") != 1:
            raise UnsupportedModelError(
                f"rope_type 'dynamic' with factor {rope.get('factor')} in config.json is not"
                " supported: all positions of a sequence change with its length, and inference"
                " engines compute others than transformers; remove rope_scaling (or set rope_type"
                " of rope_parameters to 'default') to serve the"
                f" {max_context_length(config)} tokens of max_position_embeddings, or use 'yarn'"
                " or 'linear' if the model was trained with it"
            )


def _rotary_kinds(config: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the rotary parameters of all layers, or those of each kind of layer."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _why_unread(file: Path, error: Exception) -> str:
    try:
        family = json.loads(file.read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return f"{file} does not exist or is not valid JSON; a model folder must contain it"
    if isinstance(family, str) and family in CONFIG_MAPPING:
        return f"{file} can't be read: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    return (
        f"config.json: transformers {transformers_version} has no model_type {family!r}, and code"
        " in the model folder is not run; use a model of a family that transformers supports"
    )


def model_class(config: Any) -> tuple[type[PreTrainedModel], Any]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the class that computes text with a model, and the class's configuration.

    A vision-language model uses its full class, unless transformers has a text-only one.

    Raises:
        UnsupportedModelError: transformers has no such class.
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
        f"config.json: model_type {config.model_type!r} is neither a causal language model nor a"
        f" vision-language model in transformers {transformers_version}; only these can be served"
    )


def blank_model(config: Any) -> PreTrainedModel:  # noqa: ANN401 - transformers' configurations have no common type
    """Return a float32 model of this configuration, with weights and buffers on the meta device.

    Its towers are removed; see `keep_text`.

    Raises:
        UnsupportedModelError: transformers has no language model of this configuration.
    """
    model = blank_model_with_towers(config)
    keep_text(model)
    return model


def blank_model_with_towers(config: Any) -> PreTrainedModel:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the complete model of which `blank_model` returns the part for text.

    Raises:
        UnsupportedModelError: transformers has no language model of this configuration.
    """
    kind, own_config = model_class(config)
    try:
        with torch.device("meta"):
            # Any other dtype would temporarily become torch's default for all threads.
            model: PreTrainedModel = kind._from_config(own_config, dtype=torch.float32)
    except AssertionError as error:
        raise contradiction(str(config.name_or_path), error) from error
    model.eval()
    return model


def contradiction(path: str, error: AssertionError) -> UnsupportedModelError:
    """Return the error for a configuration whose fields contradict each other.

    Args:
        path: the folder.
        error: what torch or transformers says.
    """
    return UnsupportedModelError(
        f"{path}: the model that config.json describes can't be built: {error}. Correct config.json"
        " (for padding_idx: pad_token_id must be below vocab_size, or null)"
    )


def keep_text(model: PreTrainedModel) -> None:
    """Remove the parts of a model that text never uses: towers for images and sound.

    The remaining parts keep the names of the published model, so that adapters fit it.
    """
    for name in _towers(model):
        setattr(model.base_model, name, None)


def tower_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return prefixes of the names of weights that text never uses."""
    return tuple(f"{name_of(model, model.base_model)}.{name}." for name in _towers(model))


def _towers(model: PreTrainedModel) -> list[str]:
    decoder, inner = _decoder(model), model.base_model
    if inner in {model, decoder} or decoder not in set(inner.modules()):
        return []
    return [name for name, child in inner.named_children() if decoder not in set(child.modules())]


def split_vision(model: PreTrainedModel) -> VisionTower | None:
    """Remove the parts of a model that text never uses; return its vision tower.

    None: the model has none, or this engine does not read the images of its family.
    """
    tower = split_tower(model, _decoder(model))
    keep_text(model)
    return tower


def check_folder(path: str) -> None:
    """Check that a model folder exists.

    Raises:
        UnsupportedModelError: the folder does not exist.
    """
    if not Path(path).is_dir():
        raise UnsupportedModelError(f"{path} is not a folder; expected a Hugging Face model")


def is_tied(config: Any) -> bool:  # noqa: ANN401 - transformers' configurations have no common type
    """Whether the configuration ties a model's embedding and LM head."""
    return bool(getattr(config, "tie_word_embeddings", False))


def check_tied(embedding: Tensor, lm_head: Tensor) -> None:
    """Check that a model with tied embeddings has one weight for embedding and LM head.

    If they differ, transformers follows the files, but megatron-core and inference engines follow
    the configuration: the sampled model would not be the trained one.

    Args:
        embedding: the embedding as read.
        lm_head: the LM head's weight as read.

    Raises:
        UnsupportedModelError: they differ.
    """
    if lm_head is not embedding and not torch.equal(lm_head, embedding):
        raise UnsupportedModelError(
            "tie_word_embeddings: config.json ties the embedding and the LM head, but the files"
            " have two different weights; set it to false in config.json"
        )


_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the logit cap in the configurations of different families."""


def logits_cap(config: Any) -> float | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the soft cap of a model's logits: cap * tanh(logits / cap). None in most families.

    Comparing the logits of a few tokens would not detect it: only confident ones come near the cap.
    """
    text = config.get_text_config()
    caps = (getattr(text, name, None) for name in _CAPS)
    return next((float(cap) for cap in caps if isinstance(cap, int | float) and cap > 0), None)


_DIVISORS, _FACTORS = ("logits_scaling",), ("logit_scale", "lm_head_multiplier")
"""Names of the divisors and factors of logits in different families (Granite, Cohere,
Falcon-H1)."""


def logits_factor(config: Any) -> float:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the factor of a model's logits; 1 in most families.

    It is applied to the hidden states instead, because the LM head is linear.
    """
    text = config.get_text_config()
    factor = 1.0
    for name in _FACTORS:
        factor *= getattr(text, name, None) or 1.0
    for name in _DIVISORS:
        factor /= getattr(text, name, None) or 1.0
    return factor


def max_context_length(config: Any) -> int:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the maximum context length of a model's configuration, in tokens."""
    text = config.get_text_config()
    # Not all families have these names in their dictionaries.
    names = ("max_position_embeddings", "model_type", "rope_parameters")
    return context_length({name: getattr(text, name, None) for name in names})


def rotary_switch(config: Any) -> int | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the length above which all rotary positions of a sequence change.

    `longrope` has such a length. None: positions are the same for all sequences.
    """
    switches = [
        int(each["original_max_position_embeddings"])
        for each in _rotary_kinds(config)
        if each.get("rope_type") == "longrope"
    ]
    switch = min(switches, default=max_context_length(config))
    return switch if switch < max_context_length(config) else None


def backbone_and_lm_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Return a model's backbone, which holds its layers, and its LM head.

    Raises:
        UnsupportedModelError: the model lacks one of them.
    """
    backbone, lm_head = _decoder(model), model.get_output_embeddings()
    if lm_head is None or backbone is model:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} is not supported: {type(model).__name__} does"
            " not separate its layers and its LM head into two modules, which this engine needs to"
            " compute logits"
        )
    return backbone, lm_head


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes the hidden states of text; by default the model itself."""
    decoder: nn.Module = model.get_decoder()
    # Llama 4's text model declares a base module that it does not have.
    return getattr(model, "model", model) if decoder is model else decoder


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Return the qualified name of a module in a model."""
    names: dict[nn.Module, str] = {each: name for name, each in model.named_modules()}
    return names[module]


def round_behind_embedding(model: PreTrainedModel) -> str | None:
    """Let the input embedding use float32 weights in place of its own; return its weight's name.

    Embeddings are rounded after the lookup, to the dtype of the original weight, with the same
    result as rounding the weights. The gradient of a token is then a float32 sum over all of its
    positions. None: the module does more than a lookup, and computes in the dtype of its weight.
    """
    module = model.get_input_embeddings()
    if type(module).forward is not nn.Embedding.forward:
        return None
    dtype = next(module.parameters()).dtype
    module.register_forward_hook(lambda _module, _ids, found: found.to(dtype))
    return f"{name_of(model, module)}.weight"


def targets_of(model: PreTrainedModel, backbone_name: str, lm_head_name: str) -> list[Target]:
    """Return the LoRA targets of a model, as `find_targets`.

    Raises:
        UnsupportedModelError: the LM head is not linear.
    """
    targets = find_targets(model, backbone_name, lm_head_name)
    if not any(target.group == "unembed" for target in targets):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear LM head")
    return targets
