"""The size of a model, and how it can be divided.

A layer is a set of matrices, each with the way it is divided over ranks; the numbers of parameters,
the size of adapters and the memory follow from these.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


class UnknownArchitecture(ValueError):
    """An unsupported configuration; the message names the field and the accepted values."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, or a linear layer of each expert of a mixture-of-experts layer."""

    inputs: int
    outputs: int
    split: Literal["column", "row", "whole"]
    """The side that tensor parallelism divides: outputs (column), inputs (row) or none (whole)."""
    experts: int = 0
    """Number of routed experts that have a copy of it; 0 if it belongs to none."""
    adapted: bool = True
    """Whether adapters target it."""

    @property
    def parameters(self) -> int:
        """Elements of all copies."""
        return self.inputs * self.outputs * max(self.experts, 1)


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer."""

    matrices: tuple[Matrix, ...]
    """Its linear layers, apart from routers."""
    others: int
    """Number of parameters that every rank holds whole and no adapter targets: norms, biases,
    routers."""
    attention_width: int
    """Values per token that the backward pass of attention needs: queries, keys, values and
    output."""
    normalized_width: int
    """Values per token that are normalized inside the attention."""
    mlp_width: int
    """Values per token that the backward pass of the MLP needs, over all experts that process the
    token: gate before and after its activation, up, their product, and the product weighted by the
    router."""
    activated_width: int
    """The part of `mlp_width` for gates after their activation in a dense MLP; 0 for experts."""
    copies: int
    """Number of experts that process a token; 0 in a dense layer."""
    norms: int = 2
    """Number of norms of the hidden state."""

    @property
    def parameters(self) -> int:
        """All of its parameters."""
        return self.others + sum(matrix.parameters for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of one token in one layer."""

    heads: int
    """Number of heads. Tensor parallelism divides them; further ranks hold copies."""
    width: int
    """Values per head."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower, with what connects it to the language model."""

    parameters: int
    image_bytes: int
    """Upper estimate of the bytes that computing the largest image takes at its peak.

    Derived from the forward passes of transformers 5.23 without gradients (`modeling_qwen2_5_vl`,
    `modeling_qwen3_vl` and `modeling_siglip`): an image is computed by itself, one layer at a time,
    and attention needs no scores of all pairs of patches (scaled dot product attention). A test
    compares the peaks of towers on CPU. Not measured on a GPU, nor SGLang's own towers."""
    features: int
    """16-bit values for each token of an image that the language model reads."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a causal language model, and of its vision tower."""

    model_type: str
    hidden_size: int
    vocab_size: int
    heads: int
    """Number of query heads."""
    computed: KeyValues
    """Keys and values that attention computes with."""
    cached: KeyValues
    """Keys and values that a sampler caches: the same ones, or their compressed form."""
    max_context_length: int
    """Maximum sequence length that the model supports and that engines compute correctly, in
    tokens."""
    tied: bool
    """Whether input and output embedding share their weights."""
    leading: tuple[Layer, ...]
    """Layers before the repeated ones: dense layers at the start of a mixture-of-experts model."""
    repeated: Layer
    repeats: int
    only_torch: str | None = None
    """The feature that only the torch trainer supports; None if both trainers support the model."""
    engines_adapt_attention: bool = True
    """Whether SGLang supports adapters on all of its attention."""
    engines_adapt_mlp: bool = True
    """Whether SGLang supports adapters on its MLPs or experts."""
    engines_adapt_output: bool = True
    """Whether SGLang supports adapters on its output layer."""
    weight_block: int = 1
    """Size of the blocks of quantized weights; 1 if weights are not quantized."""
    has_fused_kernels: bool = True
    """Whether the torch trainer of the GPU image computes the model with Liger's kernels."""
    tower: Tower | None = None
    """The vision tower; None for models of text only."""

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
        text = embeddings + final_norm + layers + self.repeated.parameters * self.repeats
        return text + (self.tower.parameters if self.tower else 0)

    def between(self, start: int, stop: int) -> list[tuple[Layer, int]]:
        """Return the layers with numbers in [start, stop), each with how often it occurs."""
        leading = [(layer, 1) for layer in self.leading[start:stop]]
        repeats = max(0, stop - max(start, len(self.leading)))
        return [*leading, (self.repeated, repeats)] if repeats else leading
