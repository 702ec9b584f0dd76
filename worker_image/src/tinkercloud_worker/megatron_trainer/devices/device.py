"""The interface to a device that megatron-core runs on: all that differs between CPU and GPU.

The tests run `cpu`; `benchmarks.gpu` runs `gpu`. `select_device` chooses between them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism


class Device(Protocol):
    """A kind of device that megatron-core runs on."""

    torch_device: torch.device
    """The device of tensors."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which all megatron-core computations must run."""

    def seed(self) -> None:
        """Initialize megatron-core's random state, which is unused because weights are loaded."""

    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:  # noqa: ANN401 - mbridge has no types
        """Set up a bridge for this device; return TransformerConfig settings."""
