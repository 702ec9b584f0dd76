"""Runs megatron-core on a GPU.

The layers are the same as on the CPU, so that adapters find the same linear layers.
`benchmarks.gpu` compares one rank with Hugging Face on a GPU; several ranks have not been tested on
GPUs.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from typing_extensions import override

from tinkercloud_worker.megatron_trainer.devices.device import Device
from tinkercloud_worker.megatron_trainer.layers.adapted_layers import settings, use_local_layers
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism


class Gpu(Device):
    """The only visible GPU of this process as a megatron-core device."""

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
