"""The size of adapters in plans."""

from tinkercloud_planning.activations import SEPARATE
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import training

_TRAINED_BYTES = 16
"""The value of one number, its gradient and two moments, in float32."""


def adapter_parameters(architecture: Architecture, rank: int) -> int:
    """Return the number of elements of a LoRA adapter as a plan for one GPU counts them."""
    planned = training(architecture, Layout(), tokens=1, lora_rank=rank, kernels=SEPARATE)
    return planned.trained // _TRAINED_BYTES
