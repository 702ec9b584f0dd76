"""What megatron-core needs to run without a GPU.

It asks CUDA for the current device, names "cuda" when it makes tensors, synchronises, and draws its
seeds from CUDA's generators. Inside `computing` all of that means the CPU. Nothing of the model is
replaced: layers, schedules and collectives are megatron-core's own. What it can't do here: sequence
parallelism, fused kernels.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tinkercloud_worker.megatron_trainer.device import Parallelism
from tinkercloud_worker.megatron_trainer.layers import UNFUSED, use_local_layers

_SETTINGS = {**UNFUSED, "use_cpu_initialization": True, "sequence_parallel": False}


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
        named.pop("pin_memory", None)
        return func(*args, **named)


def _count_tokens_here(
    dispatcher: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    """Stand for `_maybe_dtoh_and_synchronize`, which copies numbers of tokens from the GPU."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            numbers = getattr(dispatcher, name)
            if isinstance(numbers, Tensor):
                setattr(dispatcher, name, numbers.numpy())
    return tokens_per_expert


class Cpu:
    """See `device.Device`."""

    torch_device = torch.device("cpu")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """See `Device.computing`."""
        with (
            patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
            patch.object(torch.cuda, "synchronize", lambda *_: None),
            # Of tokens on their way to experts: no stream is made, and none waited for.
            patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),
            patch.object(
                MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _count_tokens_here
            ),
            _CpuForCuda(),
        ):
            yield

    def seed(self) -> None:
        """See `Device.seed`: with megatron's own tracker that tracks nothing."""
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)

    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:  # noqa: ANN401, ARG002 - part of the interface
        """See `Device.configure`."""
        use_local_layers(bridge, lambda _layer: None)
        return _SETTINGS
