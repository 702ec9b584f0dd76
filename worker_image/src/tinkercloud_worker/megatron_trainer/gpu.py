"""What megatron-core needs on a GPU: next to nothing, as that is what it is made for.

Written, and run by nobody yet: sequence, context and expert parallelism as well.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel

from tinkercloud_worker.megatron_trainer.device import Parallelism


class Gpu:
    """See `device.Device`. The GPU is the only one that this process sees."""

    torch_device = torch.device("cuda")
    families = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})

    def check(self, parallelism: Parallelism) -> None:
        """See `Device.check`."""

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """See `Device.computing`."""
        return torch.cuda.device(self.torch_device)

    def seed(self) -> None:
        """See `Device.seed`."""
        tensor_parallel.model_parallel_cuda_manual_seed(0)

    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:  # noqa: ANN401, ARG002 - part of the interface
        """See `Device.configure`. Transformer Engine's layers are mbridge's own choice."""
        return {
            # Norms and dropout between divided weights are divided too, along the sequence.
            "sequence_parallel": parallelism.tensor > 1,
            "context_parallel_size": parallelism.context,
            "expert_model_parallel_size": parallelism.expert,
        }
