"""Devices for megatron-core: all that differs between a CPU and a GPU is behind `Device`.

`cpu` is what the tests run; `gpu` what `benchmarks.gpu` does.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.model.architecture import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Over how many ranks each dimension is divided. The rest is data parallel."""

    tensor: int = 1
    """Ranks that each weight is divided over."""
    pipeline: int = 1
    """Ranks that the layers are divided over."""
    context: int = 1
    """Ranks that each sequence is divided over."""
    expert: int = 1
    """Ranks that experts are divided over; these are among the others, not in addition."""


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


def device_of(name: str) -> Device:
    """Return a device by the name it has in a head's configuration.

    Raises:
        UnsupportedModelError: this process has no such device.
    """
    # Each patches or initialises what the other must not.
    if name == "cpu":
        from tinkercloud_worker.megatron_trainer.cpu import Cpu  # noqa: PLC0415

        return Cpu()
    from tinkercloud_worker.megatron_trainer.gpu import Gpu  # noqa: PLC0415

    if not accelerator.is_available():
        raise UnsupportedModelError(
            f"trainer.device: {name!r}, but this rank has no GPU; give the trainer pods GPUs, or"
            " set it to 'cpu'"
        )
    return Gpu()
