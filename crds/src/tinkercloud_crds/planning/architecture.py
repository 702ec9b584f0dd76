"""What a Hugging Face configuration says about a model's size and about how it can be split.

A layer is a set of matrices, each with the way it is split over ranks; parameters, adapters and
memory all follow from those.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Config = Mapping[str, Any]
"""The content of a `config.json`."""


class UnknownArchitecture(ValueError):
    """A configuration that can't be planned for; the message names field and accepted values."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, or one of a mixture's experts' linear layers."""

    inputs: int
    outputs: int
    split: Literal["column", "row", "whole"]
    """Which side tensor parallelism cuts: outputs, inputs, none."""
    experts: int = 0
    """Copies of it, one for each routed expert; 0 if it belongs to none."""
    chosen: int = 1
    """How many of the copies a token is sent to. Each copy's adapter has that fraction of the rank,
    so that a token passes through as much adapter as in a dense layer."""

    @property
    def parameters(self) -> int:
        """Elements of all copies."""
        return self.inputs * self.outputs * max(self.experts, 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer."""

    matrices: tuple[Matrix, ...]
    """Everything that LoRA can adapt."""
    others: int
    """Parameters that every rank holds whole and no adapter touches: norms, biases, routers."""
    norms: int
    """Norms of the hidden state."""
    attention_width: int
    """Numbers per token that the backward pass of attention needs: queries, keys, values, output,
    and twice what is normalized inside it, since norms are computed in float32."""
    mlp_width: int
    """Numbers per token that the backward pass of the MLP needs, of all experts it is sent to:
    gate before and after its activation, up, their product."""
    copies: int
    """How often a token is sent to experts; 0 in a dense layer."""

    @property
    def parameters(self) -> int:
        """All of its parameters."""
        return self.others + sum(matrix.parameters for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """What a sampler keeps of one token in one layer."""

    heads: int
    """Tensor parallelism cuts these; further ranks hold copies."""
    width: int
    """Numbers for each head."""


@dataclass(frozen=True)
class Architecture:
    """A causal language model of which only sizes are known."""

    model_type: str
    hidden_size: int
    vocab_size: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values that training computes."""
    cached: KeyValues
    max_context_length: int
    """Tokens of the longest sequence it was made for."""
    tied: bool
    """Whether input and output embedding are one."""
    leading: tuple[Layer, ...]
    """Layers before the repeated ones: dense ones at the start of a mixture."""
    repeated: Layer
    repeats: int

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.leading) + self.repeats

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return max(matrix.experts for matrix in self.repeated.matrices)

    @cached_property
    def parameters(self) -> int:
        """All of them; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        layers = sum(layer.parameters for layer in self.leading)
        final_norm = self.hidden_size
        return embeddings + final_norm + layers + self.repeated.parameters * self.repeats

    def between(self, start: int, stop: int) -> list[tuple[Layer, int]]:
        """Return the layers with numbers in [start, stop), each with how often it occurs."""
        leading = [(layer, 1) for layer in self.leading[start:stop]]
        repeats = max(0, stop - max(start, len(self.leading)))
        return [*leading, (self.repeated, repeats)] if repeats else leading


def read(config: Config) -> Architecture:
    """Return the architecture that a `config.json` describes.

    Raises:
        UnknownArchitecture: its model type is not one of `model_types`, or a field is missing or
            has a value that can't be.
    """
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise UnknownArchitecture(
            f"model_type: {model_type!r} can't be planned for; accepted: {', '.join(model_types())}"
        )
    return family(_Fields(config))


def model_types() -> list[str]:
    """Return the values of `model_type` that `read` accepts."""
    return sorted(_FAMILIES)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checked access to a configuration."""

    config: Config

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnknownArchitecture(
                f"{name}: {value!r} in the model's config.json; expected a whole number, 1 or more"
            )
        return value

    def count(self, name: str) -> int:
        return self.size(name) if self.config.get(name) else 0

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True, slots=True)
class _Attention:
    matrices: tuple[Matrix, ...]
    others: int
    width: int
    heads: int
    kv_heads: int
    cached: KeyValues


@dataclass(frozen=True, slots=True)
class _Mlp:
    matrices: tuple[Matrix, ...]
    others: int
    width: int
    copies: int


def _grouped(
    fields: _Fields,
    *,
    head_dim: int | None = None,
    biased: tuple[str, ...] = (),
    has_norms: bool = False,
) -> _Attention:
    """Return attention with query, key and value heads.

    Args:
        fields: the configuration.
        head_dim: width of a head where the configuration does not say.
        biased: which of q, k, v, o have a bias.
        has_norms: whether queries and keys are normalized.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    width = fields.size("head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise UnknownArchitecture(
            f"num_key_value_heads: {kv_heads} does not divide num_attention_heads ({heads})"
        )
    q, kv = heads * width, kv_heads * width
    sizes = {"q": q, "k": kv, "v": kv, "o": hidden}
    return _Attention(
        matrices=(
            Matrix(hidden, q, "column"),
            Matrix(hidden, kv, "column"),
            Matrix(hidden, kv, "column"),
            Matrix(q, hidden, "row"),
        ),
        others=sum(sizes[name] for name in biased) + (2 * width if has_norms else 0),
        width=(4 if has_norms else 2) * (q + kv),
        heads=heads,
        kv_heads=kv_heads,
        cached=KeyValues(kv_heads, 2 * width),
    )


def _latent(fields: _Fields) -> _Attention:
    """Return multi-head latent attention: keys and values are kept compressed."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    plain, rotary = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    value, kv_rank = fields.size("v_head_dim"), fields.size("kv_lora_rank")
    q_rank = fields.count("q_lora_rank")
    q = heads * (plain + rotary)
    queries = (
        (Matrix(hidden, q_rank, "whole"), Matrix(q_rank, q, "column"))
        if q_rank
        else (Matrix(hidden, q, "column"),)
    )
    return _Attention(
        matrices=(
            *queries,
            Matrix(hidden, kv_rank + rotary, "whole"),
            Matrix(kv_rank, heads * (plain + value), "column"),
            Matrix(heads * value, hidden, "row"),
        ),
        others=q_rank + kv_rank,
        width=2 * q + 2 * heads * value + 3 * (q_rank + kv_rank),
        heads=heads,
        kv_heads=heads,
        cached=KeyValues(1, kv_rank + rotary),
    )


def _gated(hidden: int, width: int) -> _Mlp:
    """Return an MLP with a gate."""
    matrices = (
        Matrix(hidden, width, "column"),
        Matrix(hidden, width, "column"),
        Matrix(width, hidden, "row"),
    )
    return _Mlp(matrices, others=0, width=4 * width, copies=0)


def _mixture(hidden: int, width: int, *, experts: int, chosen: int, shared: int = 0) -> _Mlp:
    """Return a mixture of gated MLPs.

    Args:
        hidden: the model's width.
        width: of one expert.
        experts: how many there are to choose from.
        chosen: how many a token is sent to.
        shared: how many more see every token; they are computed as one.
    """
    if chosen > experts:
        raise UnknownArchitecture(
            f"num_experts_per_tok: {chosen} is more than there are experts ({experts})"
        )
    always = _gated(hidden, shared * width).matrices if shared else ()
    return _Mlp(
        matrices=(
            Matrix(hidden, width, "column", experts, chosen),
            Matrix(hidden, width, "column", experts, chosen),
            Matrix(width, hidden, "row", experts, chosen),
            *always,
        ),
        others=hidden * experts,
        width=4 * width * (chosen + shared),
        copies=chosen,
    )


def _layer(attention: _Attention, mlp: _Mlp, norms: int, hidden: int) -> Layer:
    return Layer(
        matrices=attention.matrices + mlp.matrices,
        others=attention.others + mlp.others + norms * hidden,
        norms=norms,
        attention_width=attention.width,
        mlp_width=mlp.width,
        copies=mlp.copies,
    )


def _assembled(
    fields: _Fields,
    attention: _Attention,
    mlp: _Mlp,
    *,
    dense: _Mlp | None = None,
    dense_layers: int = 0,
    norms: int = 2,
    tied: bool = False,
) -> Architecture:
    """Return the whole model.

    Args:
        fields: the configuration.
        attention: of every layer.
        mlp: of every layer but the leading ones.
        dense: of the leading layers.
        dense_layers: how many those are.
        norms: of the hidden size, per layer.
        tied: what the family's configurations mean by saying nothing.
    """
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    if dense_layers >= layers:
        raise UnknownArchitecture(
            f"first_k_dense_replace: {dense_layers} leaves none of the {layers} layers a mixture"
        )
    leading = (_layer(attention, dense, norms, hidden),) * dense_layers if dense else ()
    return Architecture(
        model_type=str(fields.config["model_type"]),
        hidden_size=hidden,
        vocab_size=fields.size("vocab_size"),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        cached=attention.cached,
        max_context_length=fields.size("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", default=tied),
        leading=leading,
        repeated=_layer(attention, mlp, norms, hidden),
        repeats=layers - len(leading),
    )


def _dense_mlp(fields: _Fields) -> _Mlp:
    return _gated(fields.size("hidden_size"), fields.size("intermediate_size"))


def _optional_biases(fields: _Fields) -> tuple[str, ...]:
    return ("q", "k", "v", "o") if fields.flag("attention_bias", default=False) else ()


def _llama(fields: _Fields) -> Architecture:
    return _assembled(fields, _grouped(fields, biased=_optional_biases(fields)), _dense_mlp(fields))


def _mistral(fields: _Fields) -> Architecture:
    return _assembled(fields, _grouped(fields), _dense_mlp(fields))


def _qwen2(fields: _Fields) -> Architecture:
    return _assembled(fields, _grouped(fields, biased=("q", "k", "v")), _dense_mlp(fields))


def _qwen3_attention(fields: _Fields) -> _Attention:
    return _grouped(fields, head_dim=128, biased=_optional_biases(fields), has_norms=True)


def _qwen3(fields: _Fields) -> Architecture:
    return _assembled(fields, _qwen3_attention(fields), _dense_mlp(fields))


def _gemma(fields: _Fields) -> Architecture:
    attention = _grouped(fields, head_dim=256)
    return _assembled(fields, attention, _dense_mlp(fields), tied=True)


def _gemma2(fields: _Fields) -> Architecture:
    attention = _grouped(fields, head_dim=256)
    return _assembled(fields, attention, _dense_mlp(fields), norms=4, tied=True)


def _gemma3(fields: _Fields) -> Architecture:
    attention = _grouped(fields, head_dim=256, has_norms=True)
    return _assembled(fields, attention, _dense_mlp(fields), norms=4, tied=True)


def _mixtral(fields: _Fields) -> Architecture:
    mlp = _mixture(
        fields.size("hidden_size"),
        fields.size("intermediate_size"),
        experts=fields.size("num_local_experts"),
        chosen=fields.size("num_experts_per_tok"),
    )
    return _assembled(fields, _grouped(fields), mlp)


def _qwen3_moe(fields: _Fields) -> Architecture:
    if fields.config.get("mlp_only_layers") or fields.size("decoder_sparse_step", 1) != 1:
        raise UnknownArchitecture(
            "mlp_only_layers, decoder_sparse_step: only models whose layers are all mixtures can"
            " be planned for"
        )
    mlp = _mixture(
        fields.size("hidden_size"),
        fields.size("moe_intermediate_size"),
        experts=fields.size("num_experts"),
        chosen=fields.size("num_experts_per_tok"),
    )
    return _assembled(fields, _qwen3_attention(fields), mlp)


def _deepseek(fields: _Fields) -> Architecture:
    if fields.size("moe_layer_freq", 1) != 1:
        raise UnknownArchitecture("moe_layer_freq: only 1 can be planned for")
    hidden = fields.size("hidden_size")
    mlp = _mixture(
        hidden,
        fields.size("moe_intermediate_size"),
        experts=fields.size("n_routed_experts"),
        chosen=fields.size("num_experts_per_tok"),
        shared=fields.count("n_shared_experts"),
    )
    return _assembled(
        fields,
        _latent(fields),
        mlp,
        dense=_dense_mlp(fields),
        dense_layers=fields.count("first_k_dense_replace"),
    )


_FAMILIES: Mapping[str, Callable[[_Fields], Architecture]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
