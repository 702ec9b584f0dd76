"""What of a model, beside its sizes, the programs compute that a plan names.

Each refuses what it would compute wrong, or computes it wrong and does not say so: sessions of a
plan meet neither. What the trainers refuse is in `tinkercloud_worker`, and a test holds this module
to it; what is said of SGLang is of the source of its release 0.5.23.
"""

from tinkercloud_planning.architecture import UnknownArchitecture
from tinkercloud_planning.blocks import Fields

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
BY_HAND = (
    ". If the torch trainer takes it, offer it by a BaseModel of your own, with trainer.backend"
    " torch, and leave out sampler"
)
"""What to do about a model that can't be planned for."""
_SWITCHED = frozenset({"qwen2", "qwen3", "qwen3_moe"})
"""Families that have windows only if `use_sliding_window` says so."""
_WINDOW = 4096
"""What transformers takes it for where a configuration does not say."""
_WHOLE_LAYERS = 28
"""Likewise, the layers before the first one with a window (`max_window_layers`)."""
_SLIDING = "sliding_attention"


def check(fields: Fields) -> None:
    """Check that some trainer and the engines compute what a configuration says.

    Raises:
        UnknownArchitecture: they don't; the message names the field.
    """
    if (activation := fields.config.get("hidden_act") or "silu") != "silu":
        raise UnknownArchitecture(
            f"hidden_act: {activation!r} can't be planned for; accepted: silu{BY_HAND}"
        )
    _check_positions(fields)
    _check_weights(fields)
    if fields.flag("mlp_bias", default=False):
        raise UnknownArchitecture(f"mlp_bias: only false can be planned for{BY_HAND}")
    if fields.count("num_experts_per_tok") == 1:
        raise UnknownArchitecture(
            f"num_experts_per_tok: 1 can't be planned for; accepted: 2 or more{BY_HAND}"
        )


def _check_positions(fields: Fields) -> None:
    rope = {**fields.part("rope_scaling"), **fields.part("rope_parameters")}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise UnknownArchitecture(
            f"rope_type: {kind!r} can't be planned for; accepted:"
            f" {', '.join(sorted(_ROPE_TYPES))}{BY_HAND}"
        )
    rotated = {**rope, **fields.config}.get("partial_rotary_factor")
    if rotated is not None and rotated != 1.0:
        raise UnknownArchitecture(
            f"partial_rotary_factor: {rotated} can't be planned for; accepted: 1.0{BY_HAND}"
        )


def _check_weights(fields: Fields) -> None:
    quantization = fields.part("quantization_config")
    if quantization and not (
        quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size")
    ):
        raise UnknownArchitecture(
            "quantization_config: of quantized weights only fp8 in blocks (weight_block_size) can"
            " be planned for; take a copy of the model in bfloat16"
        )


def weight_block(fields: Fields) -> int:
    """Return the larger side of the blocks that weights are quantized in; 1 if they are not.

    Raises:
        UnknownArchitecture: the configuration names no blocks of two sides.
    """
    sides = fields.part("quantization_config").get("weight_block_size") or [1, 1]
    if not (isinstance(sides, list) and len(sides) == 2 and all(_is_size(side) for side in sides)):
        raise UnknownArchitecture(
            f"quantization_config.weight_block_size: {sides} can't be planned for; accepted: two"
            " positive whole numbers, as [128, 128]"
        )
    return int(max(sides))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def window(fields: Fields) -> int | None:
    """Return how many positions the narrowest layer attends to; None if each attends to all."""
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
    """Return the window if it is narrower than the longest sequence; args as of `_width`."""
    width = _width(fields, absent)
    return width if width and width < fields.size("max_position_embeddings") else None


def _width(fields: Fields, absent: int | None) -> int | None:
    """Return the window.

    Args:
        fields: the configuration.
        absent: what it means to say nothing; null means none.
    """
    width = fields.config.get("sliding_window", absent)
    return None if width is None else fields.size("sliding_window", absent)


def refused_by_megatron(fields: Fields) -> str | None:
    """Return what the megatron trainer refuses a model for that the torch trainer computes."""
    width = window(fields)
    if width is not None:
        return f"attention in windows (sliding_window: {width})"
    if fields.flag("attention_bias", default=False):
        return "biases in attention (attention_bias: true)"
    return None


def engines_adapt_attention(fields: Fields) -> bool:
    """Return whether SGLang takes adapters of all attention: not where it compresses no queries."""
    return not fields.count("kv_lora_rank") or bool(fields.count("q_lora_rank"))


def engines_adapt_mlp(fields: Fields) -> bool:
    """Return whether SGLang takes adapters of MLPs: not of Mixtral's experts, by their names."""
    return fields.config.get("model_type") != "mixtral"
