"""Estimates of the memory per token of a micro-batch while its layers are recomputed.

docs/operate/planning.md lists the assumptions about the trainers and which were measured. In
short: only the inputs of layers are kept for the backward pass, and the rest is recomputed, one
layer at a time; with tensor parallelism, sequences are also divided between layers; ranks that
divide sequences gather a layer's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud_planning.architecture import Architecture, Layer
from tinkercloud_planning.layouts import Layout, largest_share

_BYTES = 2
"""Bytes of an activation."""
_LOW_RANK_BYTES = 4
_MLP_GRADIENTS = 3 / 4
"""Fraction of an MLP's values that have a gradient at the same time: product, gate and up."""
_IMBALANCE = 1.5
"""Tokens of the busiest expert-parallel rank, relative to the average."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Memory of a layer's backward pass, which depends on the kernels of norms and activations.

    All fields count 16-bit values.
    """

    inputs: int
    """Per element of a hidden state: saved inputs of a layer's two norms. The layer's own input is
    not included: `kept_per_token` counts it."""
    further_inputs: int
    """Per element of a hidden state: the saved input of each further norm of a layer."""
    normalized: int
    """Per element that is normalized inside the attention."""
    activated: int
    """Per gate element of a dense MLP: its value after the activation."""
    overwritten: int
    """Per gate element of a dense MLP: gradients of gate and up that are written over values."""
    outputs: int
    """Per element of a hidden state: the gradient of the layer's output, and the last layer's
    output as far as the trainer holds it."""


SEPARATE = Kernels(inputs=4, further_inputs=2, normalized=2, activated=1, overwritten=0, outputs=1)
"""PyTorch's own operations: norms keep their inputs in float32.

The last layer's output in the torch trainer is not counted: the measured peaks of both trainers
match without it.
"""
FUSED = Kernels(inputs=1, further_inputs=1, normalized=1, activated=0, overwritten=2, outputs=3)
"""Liger kernels of the torch trainer: norms keep their inputs unchanged, the first one that of the
layer; gates are activated again, and gradients are written over gates and ups. The trainer holds
the last hidden state and its gradient during the whole pass."""


def kept_per_token(architecture: Architecture, layout: Layout, layers: int) -> float:
    """Return the bytes per token of the inputs of so many layers."""
    inputs = layers * architecture.hidden_size * _BYTES
    return inputs / layout.tensor / layout.context


def final_per_token(architecture: Architecture, layout: Layout) -> float:
    """Return the bytes per token of hidden state, its gradient, and the final norm in float32.

    The fused norm needs half as much.
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
    normed = kernels.inputs + (layer.norms - 2) * kernels.further_inputs
    gathered, split = 2 * hidden, normed * hidden
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
    gradients = _MLP_GRADIENTS * layer.mlp_width - kernels.overwritten * layer.activated_width
    in_mlp = busiest * (gradients / layout.tensor + layer.copies * hidden)
    attention, mlp = _attention_values(layer, kernels), busiest * _mlp_values(layer, kernels)
    in_attention = (attention - mlp) / layout.tensor
    return _BYTES * (kernels.outputs * hidden + max(in_mlp, in_attention))


def _attention_values(layer: Layer, kernels: Kernels) -> int:
    return layer.attention_width + kernels.normalized * layer.normalized_width


def _mlp_values(layer: Layer, kernels: Kernels) -> int:
    return layer.mlp_width - (1 - kernels.activated) * layer.activated_width


def _busiest(layout: Layout) -> float:
    return _IMBALANCE if layout.expert > 1 else 1.0
