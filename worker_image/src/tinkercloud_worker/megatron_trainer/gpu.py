"""What megatron-core needs on a GPU: next to nothing.

Layers are the ones that run on the CPU, so that adapters find the same linear layers. One rank has
been compared with Hugging Face on a GPU (`benchmarks.gpu`); several have not been run.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from typing_extensions import override

from tinkercloud_worker.megatron_trainer.device import Device
from tinkercloud_worker.megatron_trainer.layers import settings, use_local_layers
from tinkercloud_worker.megatron_trainer.parallelism import Parallelism


class Gpu(Device):
    """See `device.Device`. The GPU is the only one that this process sees."""

    torch_device = torch.device("cuda")

    @override
    def computing(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self.torch_device)

    @override
    def seed(self) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(0)

    @override
    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:
        use_local_layers(bridge)
        return settings(parallelism)
