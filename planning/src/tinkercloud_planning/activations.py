"""What a micro-batch takes for each of its tokens while its layers are computed again.

docs/operate/planning.md explains the assumptions and which of them were measured. In short:
only the inputs of layers are kept for the backward pass and the rest is computed again, one layer
at a time; with tensor parallelism sequences are split between layers too; ranks that divide
sequences gather a layer's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud_planning.architecture import Architecture, Layer
from tinkercloud_planning.layouts import Layout, largest_share

_BYTES = 2
"""Of an activation."""
_LOW_RANK_BYTES = 4
_MLP_GRADIENTS = 3 / 4
"""Of an MLP's numbers, those that have a gradient at the same time: product, gate and up."""
_IMBALANCE = 1.5
"""Tokens that the busiest expert-parallel rank gets, relative to the average."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a layer's backward pass holds for the way in which norms and activations are computed.

    Counted in numbers of 16 bits.
    """

    inputs: int
    """For each number of a hidden state: inputs of a layer's two norms, as those keep them. A
    layer's own input as it came is not among them: `kept_per_token` has it."""
    normalized: int
    """For each number that is normalized inside the attention."""
    activated: int
    """For each gate of a dense MLP: itself after its activation."""
    overwritten: int
    """For each gate of a dense MLP: gradients of it and its up that are written over values."""
    outputs: int
    """For each number of a hidden state: the gradient of the layer's output, and what the trainer
    holds of the last layer's."""


SEPARATE = Kernels(inputs=4, normalized=2, activated=1, overwritten=0, outputs=1)
"""Operations of PyTorch's own: norms keep their inputs in float32.

What the torch trainer holds of the last layer is not counted here: measured peaks of both trainers
are met without it.
"""
FUSED = Kernels(inputs=1, normalized=1, activated=0, overwritten=2, outputs=3)
"""Liger's, in the torch trainer: norms keep inputs as they are, the first the layer's own; gates
are activated again, and gradients written over gates and ups. The trainer holds the last hidden
state and its gradient as long as the pass lasts."""


def kept_per_token(architecture: Architecture, layout: Layout, layers: int) -> float:
    """Return the bytes per token of the inputs of so many layers."""
    inputs = layers * architecture.hidden_size * _BYTES
    return inputs / layout.tensor / layout.context


def final_per_token(architecture: Architecture, layout: Layout) -> float:
    """Return the bytes per token of hidden state, its gradient, and the final norm in float32.

    Fused, that norm takes half as much.
    """
    return 4 * architecture.hidden_size * _BYTES / layout.context


def working_per_token(
    architecture: Architecture,
    layout: Layout,
    layers: Sequence[Layer],
    lora_rank: int,
    kernels: Kernels,
) -> float:
    """Return the bytes per token of the largest of a stage's layers, when its backward begins.

    Args:
        architecture: the model.
        layout: how it is split.
        layers: of the stage; one of each kind is enough.
        lora_rank: of the adapter; 0 for none.
        kernels: that the trainer has.
    """
    working = max(
        layer_values(architecture, layer, layout, lora_rank, kernels)
        + _layer_gradients(architecture, layer, layout, kernels)
        for layer in layers
    )
    # Keys and values of whole sequences, and their gradients, are at every rank of those.
    computed = architecture.computed
    both = largest_share(computed.heads, layout.tensor) * computed.width * _BYTES
    gathered = 2 * both if layout.context > 1 else 0
    return working / layout.context + gathered


def layer_values(
    architecture: Architecture, layer: Layer, layout: Layout, lora_rank: int, kernels: Kernels
) -> float:
    """Return the bytes per token that a layer's backward pass needs of its forward pass.

    Args:
        architecture: the model.
        layer: one of its layers.
        layout: how it is split; the sequence is taken as whole.
        lora_rank: of the adapter; 0 for none.
        kernels: that the trainer has.
    """
    hidden = architecture.hidden_size
    # Outputs of norms enter matrices, and are gathered for them.
    gathered, split = 2 * hidden, kernels.inputs * hidden
    sent = _mlp_values(layer, kernels) / layout.tensor + hidden * layer.copies
    divided = split + _attention_values(layer, kernels)
    width = gathered + divided / layout.tensor + _busiest(layout) * sent
    low = sum(layer.copies if m.experts else 1 for m in layer.matrices if m.adapted)
    return _BYTES * width + _LOW_RANK_BYTES * lora_rank * low


def _layer_gradients(
    architecture: Architecture, layer: Layer, layout: Layout, kernels: Kernels
) -> float:
    """Return the bytes per token of gradients that a layer's backward pass holds at its peak.

    That is in the MLP, as long as all values are there; or in the attention, if the MLP's values,
    which are gone then, were fewer than that has gradients.

    Args:
        architecture: the model.
        layer: one of its layers.
        layout: how it is split; the sequence is taken as whole.
        kernels: that the trainer has.
    """
    hidden = architecture.hidden_size
    busiest = _busiest(layout)
    beside = _MLP_GRADIENTS * layer.mlp_width - kernels.overwritten * layer.activated_width
    in_mlp = busiest * (beside / layout.tensor + layer.copies * hidden)
    attention, mlp = _attention_values(layer, kernels), busiest * _mlp_values(layer, kernels)
    in_attention = (attention - mlp) / layout.tensor
    return _BYTES * (kernels.outputs * hidden + max(in_mlp, in_attention))


def _attention_values(layer: Layer, kernels: Kernels) -> int:
    return layer.attention_width + kernels.normalized * layer.normalized_width


def _mlp_values(layer: Layer, kernels: Kernels) -> int:
    return layer.mlp_width - (1 - kernels.activated) * layer.activated_width


def _busiest(layout: Layout) -> float:
    return _IMBALANCE if layout.expert > 1 else 1.0
