"""What megatron-core needs on a GPU: next to nothing.

Layers are the ones that run on the CPU, so that adapters find the same linear layers. One rank has
been compared with Hugging Face on a GPU (`benchmarks.gpu`); several have not been run.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel

from tinkercloud_worker.megatron_trainer.device import Parallelism
from tinkercloud_worker.megatron_trainer.layers import settings, use_local_layers


class Gpu:
    """See `device.Device`. The GPU is the only one that this process sees."""

    torch_device = torch.device("cuda")

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """See `Device.computing`."""
        return torch.cuda.device(self.torch_device)

    def seed(self) -> None:
        """See `Device.seed`."""
        tensor_parallel.model_parallel_cuda_manual_seed(0)

    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:  # noqa: ANN401 - part of the interface
        """See `Device.configure`."""
        use_local_layers(bridge)
        return settings(parallelism)
