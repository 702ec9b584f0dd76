"""What megatron-core needs to run without a GPU.

It asks CUDA for the current device, names "cuda" when it makes tensors, synchronises, and draws its
seeds from CUDA's generators. Inside `on_cpu` all of that means the CPU. Nothing of the model is
replaced: layers, schedules and collectives are megatron-core's own, and where a GPU is present this
module is not used. What it can't do here: sequence parallelism, recomputation, packed sequences,
fused kernels, experts.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.overrides import TorchFunctionMode

SETTINGS: Mapping[str, object] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""Of a TransformerConfig: kernels that exist for GPUs only are off."""


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's signature
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = torch.device("cpu")
        return func(*args, **named)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let megatron-core compute on the CPU for a while."""
    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        _CpuForCuda(),
    ):
        yield


def seed() -> None:
    """Set megatron's random states up: with its own tracker that tracks nothing.

    There is no dropout and all weights are loaded, so nothing is ever drawn.
    """
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the specification of a layer made of megatron-core's own modules."""
    return get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
