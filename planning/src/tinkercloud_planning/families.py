"""The supported Hugging Face configurations, and the meaning of their fields in each family."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tinkercloud_planning import supported, vision
from tinkercloud_planning.architecture import Architecture, Layer, UnknownArchitecture
from tinkercloud_planning.blocks import (
    Attention,
    Config,
    Fields,
    MissingFields,
    Mlp,
    gated_mlp,
    grouped_attention,
    latent_attention,
    mixture,
)

_NORMS = 2
"""Number of norms of the hidden state in each layer of most families."""
_GEMMA3_NORMS = 4
"""The same for Gemma 3: one before and one after each of attention and MLP."""
_SOME = 64
"""A value that most sizes of a model may have."""


def read(config: Config) -> Architecture:
    """Return the architecture that a `config.json` describes.

    Raises:
        MissingFields: some fields are missing; those that can be found at once are named.
        UnknownArchitecture: its model type is not one of `model_types`, a field has a value that
            can't be, or it says what no trainer or no engine computes.
    """
    try:
        return _read(config)
    except MissingFields as error:
        raise MissingFields(*_missing(config, error)) from None


def _missing(config: Config, found: MissingFields) -> list[str]:
    """Return the names of missing fields: each gets a value until no other is found.

    The search ends early where that value contradicts others of the configuration.
    """
    names: list[str] = []
    while not set(found.names) <= set(names):
        names += found.names
        try:
            _read({**config, **dict.fromkeys(names, _SOME)})
        except MissingFields as error:
            found = error
        except UnknownArchitecture:
            break
    return names


def _read(config: Config) -> Architecture:
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise UnknownArchitecture(
            f"model_type: {model_type!r} is not supported by the planner; accepted:"
            f" {', '.join(model_types())}{supported.unplanned(config)}"
        )
    sees = model_type in vision.model_types()
    fields = Fields(vision.text_of(config) if sees else config)
    supported.check(fields)
    return replace(family(fields), tower=vision.tower(config))


def model_types() -> list[str]:
    """Return the values of `model_type` that `read` accepts."""
    return sorted(_FAMILIES)


def _layer(attention: Attention, mlp: Mlp, hidden: int, norms: int) -> Layer:
    return Layer(
        matrices=attention.matrices + mlp.matrices,
        others=attention.others + mlp.others + norms * hidden,
        norms=norms,
        attention_width=attention.width,
        normalized_width=attention.normalized,
        mlp_width=mlp.width,
        activated_width=mlp.activated,
        copies=mlp.copies,
    )


def _assembled(
    fields: Fields,
    attention: Attention,
    mlp: Mlp,
    *,
    dense: Mlp | None = None,
    dense_layers: int = 0,
    norms: int = _NORMS,
) -> Architecture:
    """Return the whole model.

    Args:
        fields: the configuration.
        attention: of every layer.
        mlp: of every layer but the leading ones.
        dense: of the leading layers.
        dense_layers: how many those are.
        norms: norms of the hidden state in each layer.
    """
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    if dense_layers >= layers:
        raise UnknownArchitecture(
            f"first_k_dense_replace: {dense_layers} leaves none of the {layers} layers a mixture"
        )
    leading = (_layer(attention, dense, hidden, norms),) * dense_layers if dense else ()
    longest = supported.longest(fields)
    return Architecture(
        model_type=str(fields.config["model_type"]),
        hidden_size=hidden,
        vocab_size=fields.size("vocab_size"),
        heads=attention.heads,
        computed=attention.computed,
        cached=attention.cached,
        # SGLang attends to whole sequences; in a shorter one than the window that is the same.
        max_context_length=min(longest, supported.window(fields) or longest),
        tied=fields.flag("tie_word_embeddings", default=False),
        leading=leading,
        repeated=_layer(attention, mlp, hidden, norms),
        repeats=layers - len(leading),
        only_torch=supported.refused_by_megatron(fields),
        engines_adapt_attention=supported.engines_adapt_attention(fields),
        engines_adapt_mlp=supported.engines_adapt_mlp(fields),
        has_fused_kernels=supported.has_fused_kernels(fields),
        engines_adapt_output=supported.engines_adapt_output(fields),
        weight_block=supported.weight_block(fields),
    )


def _dense_mlp(fields: Fields) -> Mlp:
    return gated_mlp(fields.size("hidden_size"), fields.size("intermediate_size"))


def _optional_biases(fields: Fields) -> tuple[str, ...]:
    return ("q", "k", "v", "o") if fields.flag("attention_bias", default=False) else ()


def _llama(fields: Fields) -> Architecture:
    return _assembled(
        fields, grouped_attention(fields, biased=_optional_biases(fields)), _dense_mlp(fields)
    )


def _mistral(fields: Fields) -> Architecture:
    return _assembled(fields, grouped_attention(fields), _dense_mlp(fields))


def _qwen2(fields: Fields) -> Architecture:
    return _assembled(fields, grouped_attention(fields, biased=("q", "k", "v")), _dense_mlp(fields))


def _qwen3_attention(fields: Fields) -> Attention:
    return grouped_attention(fields, head_dim=128, biased=_optional_biases(fields), has_norms=True)


def _qwen3(fields: Fields) -> Architecture:
    return _assembled(fields, _qwen3_attention(fields), _dense_mlp(fields))


def _gemma3(fields: Fields) -> Architecture:
    return _assembled(
        fields, grouped_attention(fields, has_norms=True), _dense_mlp(fields), norms=_GEMMA3_NORMS
    )


def _mixtral(fields: Fields) -> Architecture:
    mlp = mixture(
        fields.size("hidden_size"),
        fields.size("intermediate_size"),
        experts=fields.size("num_local_experts"),
        chosen=fields.size("num_experts_per_tok"),
    )
    return _assembled(fields, grouped_attention(fields), mlp)


def _qwen3_moe(fields: Fields) -> Architecture:
    if fields.config.get("mlp_only_layers") or fields.size("decoder_sparse_step", 1) != 1:
        raise UnknownArchitecture(
            "mlp_only_layers, decoder_sparse_step: only models whose layers are all mixtures can"
            " be planned for"
        )
    mlp = mixture(
        fields.size("hidden_size"),
        fields.size("moe_intermediate_size"),
        # transformers writes it by either name.
        experts=fields.size("num_experts", fields.count("num_local_experts") or None),
        chosen=fields.size("num_experts_per_tok"),
    )
    return _assembled(fields, _qwen3_attention(fields), mlp)


def _deepseek(fields: Fields) -> Architecture:
    if fields.size("moe_layer_freq", 1) != 1:
        raise UnknownArchitecture("moe_layer_freq: only 1 can be planned for")
    if fields.flag("attention_bias", default=False):
        raise UnknownArchitecture("attention_bias: only false can be planned for in this family")
    hidden = fields.size("hidden_size")
    mlp = mixture(
        hidden,
        fields.size("moe_intermediate_size"),
        experts=fields.size("n_routed_experts"),
        chosen=fields.size("num_experts_per_tok"),
        shared=fields.size("n_shared_experts"),
    )
    return _assembled(
        fields,
        latent_attention(fields),
        mlp,
        dense=_dense_mlp(fields),
        dense_layers=fields.count("first_k_dense_replace"),
    )


_FAMILIES: Mapping[str, Callable[[Fields], Architecture]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma3": _gemma3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3_moe,
}
