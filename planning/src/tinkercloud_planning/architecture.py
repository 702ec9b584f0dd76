"""A model's size, and how it can be split.

A layer is a set of matrices, each with the way it is split over ranks; parameters, adapters and
memory all follow from those.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


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
    adapted: bool = True
    """Whether adapters are about it."""

    @property
    def parameters(self) -> int:
        """Elements of all copies."""
        return self.inputs * self.outputs * max(self.experts, 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer."""

    matrices: tuple[Matrix, ...]
    """Its linear layers but routers."""
    others: int
    """Parameters that every rank holds whole and no adapter touches: norms, biases, routers."""
    attention_width: int
    """Numbers per token that the backward pass of attention needs: queries, keys, values and
    output."""
    normalized_width: int
    """Numbers per token that are normalized inside the attention."""
    mlp_width: int
    """Numbers per token that the backward pass of the MLP needs, of all experts it is sent to:
    gate before and after its activation, up, their product, and that times an expert's share."""
    activated_width: int
    """Of these, gates after their activation in a dense MLP; 0 in a mixture."""
    copies: int
    """How often a token is sent to experts; 0 in a dense layer."""

    @property
    def parameters(self) -> int:
        """All of its parameters."""
        return self.others + sum(matrix.parameters for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of one token in one layer."""

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
    computed: KeyValues
    """What attention computes with."""
    cached: KeyValues
    """What a sampler keeps: the same, or what they come from."""
    max_context_length: int
    """Tokens of the longest sequence that it was made for, and that engines compute as it was."""
    tied: bool
    """Whether input and output embedding are one."""
    leading: tuple[Layer, ...]
    """Layers before the repeated ones: dense ones at the start of a mixture."""
    repeated: Layer
    repeats: int
    only_torch: str | None = None
    """What it has that the megatron trainer refuses and the torch trainer computes; None if either
    trains it."""
    engines_adapt_attention: bool = True
    """Whether SGLang takes adapters of all of its attention."""
    engines_adapt_mlp: bool = True
    """Whether SGLang takes adapters of its MLPs, or experts."""
    weight_block: int = 1
    """Rows and columns of the blocks that its weights are quantized in; 1: they are not."""

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
