"""The interface to a device that megatron-core runs on: all that differs between CPU and GPU.

The tests run `cpu`; `benchmarks.gpu` runs `gpu`. `select_device` chooses between them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tinkercloud_worker.megatron_trainer.parallelism import Parallelism


class Device(Protocol):
    """A kind of device that megatron-core runs on."""

    torch_device: torch.device
    """Where tensors are."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which all of megatron-core's computations must run."""

    def seed(self) -> None:
        """Set up megatron-core's random states. Nothing is ever drawn: all weights are loaded."""

    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:  # noqa: ANN401 - mbridge has no types
        """Make a bridge build a model for this device; return settings of a TransformerConfig."""
