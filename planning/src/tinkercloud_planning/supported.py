"""Checks of the features of a model that trainers and engines must support to be planned.

Trainers and engines reject unsupported features, or compute them incorrectly without an error; a
plan must lead to neither. The checks for the trainers match those of `tinkercloud_worker`, which a
test verifies; the checks for SGLang follow the source code of release 0.5.23.
"""

from tinkercloud_planning.architecture import UnknownArchitecture
from tinkercloud_planning.blocks import Config, Fields
from tinkercloud_planning.gpus import GIB, MEMORY_GIB
from tinkercloud_protocol.adapters.context_length import context_length

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
BY_HAND = (
    ". If the torch trainer supports it, write the BaseModel yourself, with trainer.backend torch"
    " and without sampler"
)
"""Advice for models that the planner does not support."""
_TRAINED_BY_TORCH = frozenset({"cohere", "gemma2", "gpt_oss", "granite"})
"""Families that cannot be planned for, and that the torch trainer was compared with (see
docs/supported.md)."""
_SWITCHED = frozenset({"qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe"})
"""Families that use windows only if `use_sliding_window` is set."""
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}
"""Activations of MLPs in families other than those with `silu`."""
_WINDOW = 4096
"""Default of transformers for the window."""
_WHOLE_LAYERS = 28
"""Default of transformers for the layers before the first one with a window
(`max_window_layers`)."""
_SLIDING = "sliding_attention"


def unplanned(config: Config) -> str:
    """Return what can be done with a model whose family the planner does not support."""
    if config.get("model_type") not in _TRAINED_BY_TORCH:
        return BY_HAND
    supports = (
        ". No copy or format of its weights changes that. The torch trainer supports it, on GPUs"
        " that each hold the whole model in bfloat16"
    )
    size = _bfloat16_gib(Fields(config))
    largest = max(MEMORY_GIB, key=lambda name: MEMORY_GIB[name])
    if size > MEMORY_GIB[largest]:
        return (
            f"{supports}: about {size} GiB, but the largest GPU that the planner knows"
            f" ({largest}) has {MEMORY_GIB[largest]}. Use a smaller model, or write a BaseModel"
            " with trainer.backend torch and trainer.sharded, which is unproven on GPUs"
        )
    needs = f" (about {size} GiB, and what is trained)" if size else ""
    return (
        f"{supports}{needs}: use `tinkercloud serve`, or write the BaseModel yourself, with"
        " trainer.backend torch and without sampler"
    )


def _bfloat16_gib(fields: Fields) -> int:
    """Return the size of a model's matrices in GiB; 0 if its configuration does not say."""
    try:
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        width = fields.size("head_dim", max(1, hidden // heads))
        cached = fields.size("num_key_value_heads", heads)
        attention = 2 * hidden * width * (heads + cached)
        experts = fields.size("num_local_experts", 1)
        mlp = 3 * hidden * fields.size("intermediate_size") * experts
        vocabulary = fields.size("vocab_size") * hidden
        layers = fields.size("num_hidden_layers") * (attention + mlp)
    except UnknownArchitecture:
        return 0
    is_tied = fields.flag("tie_word_embeddings", default=experts == 1)
    return -(-2 * (layers + vocabulary * (1 if is_tied else 2)) // GIB)


def check(fields: Fields) -> None:
    """Check that a trainer and the engines support a configuration.

    Raises:
        UnknownArchitecture: They do not; the message names the field.
    """
    expected = _ACTIVATIONS.get(str(fields.config.get("model_type")), "silu")
    if (activation := fields.config.get("hidden_act") or expected) != expected:
        raise UnknownArchitecture(
            f"hidden_act: {activation!r} is not supported by the planner; accepted:"
            f" {expected}{BY_HAND}"
        )
    _check_positions(fields)
    _check_weights(fields)
    if fields.flag("mlp_bias", default=False):
        raise UnknownArchitecture(
            f"mlp_bias: true is not supported by the planner; accepted: false{BY_HAND}"
        )
    if fields.count("num_experts_per_tok") == 1:
        raise UnknownArchitecture(
            f"num_experts_per_tok: 1 is not supported by the planner; accepted: 2 or more{BY_HAND}"
        )


def _check_positions(fields: Fields) -> None:
    rope = {**fields.part("rope_scaling"), **fields.part("rope_parameters")}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise UnknownArchitecture(
            f"rope_type: {kind!r} is not supported by the planner; accepted:"
            f" {', '.join(sorted(_ROPE_TYPES))}{BY_HAND}"
        )
    rotated = {**rope, **fields.config}.get("partial_rotary_factor")
    if rotated is not None and rotated != 1.0:
        raise UnknownArchitecture(
            f"partial_rotary_factor: {rotated} is not supported by the planner; accepted:"
            f" 1.0{BY_HAND}"
        )


def _check_weights(fields: Fields) -> None:
    quantization = fields.part("quantization_config")
    if quantization and not (
        quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size")
    ):
        raise UnknownArchitecture(
            "quantization_config: the planner only supports quantization as fp8 in blocks"
            " (weight_block_size); use a copy of the model in bfloat16"
        )


def weight_block(fields: Fields) -> int:
    """Return the larger side of the blocks of quantized weights; 1 if weights are not quantized.

    Raises:
        UnknownArchitecture: The configuration has no valid block size.
    """
    sides = fields.part("quantization_config").get("weight_block_size") or [1, 1]
    if not (isinstance(sides, list) and len(sides) == 2 and all(_is_size(side) for side in sides)):
        raise UnknownArchitecture(
            f"quantization_config.weight_block_size: {sides} is invalid; accepted: two positive"
            " integers, such as [128, 128]"
        )
    return int(max(sides))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def longest(fields: Fields) -> int:
    """Return the context length in tokens, extended by `rope_scaling`, whatever the windows are.

    Raises:
        UnknownArchitecture: `max_position_embeddings` is missing or invalid.
    """
    fields.size("max_position_embeddings")
    return context_length(fields.config)


def window(fields: Fields) -> int | None:
    """Return the window of the narrowest layer in tokens; None if no layer has a window."""
    family = fields.config.get("model_type")
    if family in {"mistral", "mixtral"}:
        return _narrow(fields, _WINDOW if family == "mistral" else None)
    if family not in _SWITCHED or not fields.flag("use_sliding_window", default=False):
        return None
    if family == "qwen3_moe":
        return _narrow(fields, _WINDOW)
    return _width(fields, _WINDOW) if _some_layers_have_windows(fields) else None


def _some_layers_have_windows(fields: Fields) -> bool:
    kinds = fields.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return _SLIDING in kinds
    name = "max_window_layers"
    whole = fields.count(name) if name in fields.config else _WHOLE_LAYERS
    return whole < fields.size("num_hidden_layers")


def _narrow(fields: Fields, absent: int | None) -> int | None:
    """Return the window if it is shorter than the longest sequence; see `_width` for arguments."""
    width = _width(fields, absent)
    return width if width and width < longest(fields) else None


def _width(fields: Fields, absent: int | None) -> int | None:
    """Return the window.

    Args:
        fields: The configuration.
        absent: Default if the field is absent; None means no window.
    """
    width = fields.config.get("sliding_window", absent)
    return None if width is None else fields.size("sliding_window", absent)


def refused_by_megatron(fields: Fields) -> str | None:
    """Return the feature of a model that only the torch trainer supports, or None."""
    if fields.part("vision_config"):
        return "vision-language models (vision_config)"
    width = window(fields)
    if width is not None:
        return f"attention in windows (sliding_window: {width})"
    if fields.flag("attention_bias", default=False):
        return "biases in attention (attention_bias: true)"
    return None


def engines_adapt_attention(fields: Fields) -> bool:
    """Return whether SGLang supports adapters on attention: not on MLA without q_lora_rank."""
    return not fields.count("kv_lora_rank") or bool(fields.count("q_lora_rank"))


def engines_adapt_mlp(fields: Fields) -> bool:
    """Return whether SGLang supports adapters on MLPs: not on Mixtral's experts, by name."""
    return fields.config.get("model_type") != "mixtral"


def has_fused_kernels(fields: Fields) -> bool:
    """Return whether Liger 0.8.5 has kernels of a family that fit transformers 5.23."""
    return fields.config.get("model_type") not in {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}


def engines_adapt_output(fields: Fields) -> bool:
    """Return whether SGLang supports adapters on the output layer: not on Gemma's embedding."""
    return fields.config.get("model_type") != "gemma3"
