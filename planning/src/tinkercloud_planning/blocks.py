"""The parts of a transformer layer, read from the fields of a Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud_planning.architecture import KeyValues, Matrix, UnknownArchitecture

Config = Mapping[str, Any]
"""The content of a `config.json`."""


class MissingFields(UnknownArchitecture):
    """A configuration lacks fields that have no default: `names`."""

    def __init__(self, *names: str) -> None:
        super().__init__(
            f"{', '.join(names)}: missing in the model's config.json; expected a whole number, 1"
            " or more"
        )
        self.names = names


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to a configuration."""

    config: Config

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number, 1 or more.

        Raises:
            MissingFields: it is missing without a default.
            UnknownArchitecture: it is something else.
        """
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise MissingFields(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnknownArchitecture(
                f"{name}: {value!r} in the model's config.json; expected a whole number, 1 or more"
            )
        return value

    def count(self, name: str) -> int:
        """Return a number that may be missing, null or 0, which all mean none."""
        return self.size(name) if self.config.get(name) else 0

    def part(self, name: str) -> Config:
        """Return an object, empty if it is missing or null.

        Raises:
            UnknownArchitecture: it is something else.
        """
        value = self.config.get(name) or {}
        if not isinstance(value, Mapping):
            raise UnknownArchitecture(
                f"{name}: {value!r} in the model's config.json; expected an object"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a switch; `default` is what it means to say nothing."""
        value = self.config.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer. Its fields correspond to those of `Layer` and `Architecture`."""

    matrices: tuple[Matrix, ...]
    others: int
    width: int
    normalized: int
    heads: int
    computed: KeyValues
    cached: KeyValues


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP or the experts of a layer. Its fields correspond to those of `Layer`."""

    matrices: tuple[Matrix, ...]
    others: int
    width: int
    activated: int
    copies: int


def grouped_attention(
    fields: Fields,
    *,
    head_dim: int | None = None,
    biased: tuple[str, ...] = (),
    has_norms: bool = False,
) -> Attention:
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
    return Attention(
        matrices=(
            Matrix(hidden, q, "column"),
            Matrix(hidden, kv, "column"),
            Matrix(hidden, kv, "column"),
            Matrix(q, hidden, "row"),
        ),
        others=sum(sizes[name] for name in biased) + (2 * width if has_norms else 0),
        width=2 * (q + kv),
        normalized=q + kv if has_norms else 0,
        heads=heads,
        computed=KeyValues(kv_heads, 2 * width),
        cached=KeyValues(kv_heads, 2 * width),
    )


def latent_attention(fields: Fields) -> Attention:
    """Return multi-head latent attention, which caches compressed keys and values."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    plain, rotary = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    value, kv_rank = fields.size("v_head_dim"), fields.size("kv_lora_rank")
    q_rank = fields.count("q_lora_rank")
    q = heads * (plain + rotary)
    queries = (
        (Matrix(hidden, q_rank, "whole"), Matrix(q_rank, q, "column", adapted=False))
        if q_rank
        else (Matrix(hidden, q, "column"),)
    )
    return Attention(
        matrices=(
            *queries,
            Matrix(hidden, kv_rank + rotary, "whole"),
            Matrix(kv_rank, heads * (plain + value), "column", adapted=False),
            Matrix(heads * value, hidden, "row"),
        ),
        others=q_rank + kv_rank,
        width=2 * q + 2 * heads * value + q_rank + kv_rank,
        normalized=q_rank + kv_rank,
        heads=heads,
        computed=KeyValues(heads, plain + rotary + value),
        cached=KeyValues(1, kv_rank + rotary),
    )


def gated_mlp(hidden: int, width: int) -> Mlp:
    """Return an MLP with a gate."""
    matrices = (
        Matrix(hidden, width, "column"),
        Matrix(hidden, width, "column"),
        Matrix(width, hidden, "row"),
    )
    return Mlp(matrices, others=0, width=4 * width, activated=width, copies=0)


def mixture(hidden: int, width: int, *, experts: int, chosen: int, shared: int = 0) -> Mlp:
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
    always = gated_mlp(hidden, shared * width).matrices if shared else ()
    return Mlp(
        matrices=(
            Matrix(hidden, width, "column", experts),
            Matrix(hidden, width, "column", experts),
            Matrix(width, hidden, "row", experts),
            *always,
        ),
        others=hidden * experts,
        # The megatron trainer keeps experts' products before and after their share.
        width=width * (5 * chosen + 4 * shared),
        activated=0,
        copies=chosen,
    )
