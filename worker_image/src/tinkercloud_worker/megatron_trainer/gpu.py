"""What megatron-core needs on a GPU: next to nothing, as that is what it is made for.

Layers are the ones that run on the CPU, so that adapters find the same linear layers; Transformer
Engine gives them norms where it is installed, which sequence parallelism needs. One rank without it
has been compared with Hugging Face on a GPU (`benchmarks.gpu`); several, and it, have not been run.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from tinkercloud_worker.megatron_trainer.device import Parallelism
from tinkercloud_worker.megatron_trainer.layers import UNFUSED, use_local_layers


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
        use_local_layers(bridge, _finish)
        # What is computed between divided weights is divided too, along the sequence.
        return {**UNFUSED, "sequence_parallel": HAVE_TE and parallelism.tensor > 1}


def _finish(spec: ModuleSpec) -> None:
    if not HAVE_TE:
        return
    from megatron.core.extensions.transformer_engine import TENorm  # noqa: PLC0415 - not everywhere

    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, TENorm)
