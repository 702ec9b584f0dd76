"""Runs megatron-core without a GPU.

megatron-core asks CUDA for the current device, creates tensors on "cuda", synchronizes, and uses
CUDA's random generators. Inside `computing` all of this refers to the CPU, and two collectives that
gloo only supports for equal sizes are replaced by one that supports any sizes. The model is
unchanged: layers and schedules are megatron-core's own. Fused kernels are not available.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from tinkercloud_worker.megatron_trainer.devices.device import Device
from tinkercloud_worker.megatron_trainer.layers.adapted_layers import settings, use_local_layers
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism


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
    """Replace `_maybe_dtoh_and_synchronize`, which copies token counts from the GPU."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            numbers = getattr(dispatcher, name)
            if isinstance(numbers, Tensor):
                setattr(dispatcher, name, numbers.numpy())
    return tokens_per_expert


def _all_gather(parts: list[Tensor], part: Tensor, group: dist.ProcessGroup) -> None:
    """Replace `all_gather`, which gloo only supports for parts of equal size."""
    sizes = [len(each) for each in parts]
    received = torch.cat(parts)
    sent = torch.cat([part] * len(parts))
    dist.all_to_all_single(received, sent, sizes, [len(part)] * len(parts), group=group)
    for each, content in zip(parts, received.split(sizes), strict=True):
        each.copy_(content)


def _reduce_scatter(total: Tensor, parts: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace `reduce_scatter`, for the same reason."""
    received = torch.cat([total] * len(parts))
    sizes = [len(part) for part in parts]
    dist.all_to_all_single(
        received, torch.cat(parts), [len(total)] * len(parts), sizes, group=group
    )
    torch.sum(received.view(len(parts), *total.shape), 0, out=total)


class Cpu(Device):
    """The CPU as a megatron-core device."""

    torch_device = torch.device("cpu")

    @override
    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with (
            patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
            patch.object(torch.cuda, "synchronize", lambda *_: None),
            patch.object(dist, "all_gather", _all_gather),
            patch.object(dist, "reduce_scatter", _reduce_scatter),
            # Token dispatch to experts: no CUDA stream is created or waited for.
            patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),
            patch.object(
                MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _count_tokens_here
            ),
            _CpuForCuda(),
        ):
            yield

    @override
    def seed(self) -> None:
        """Install megatron-core's own tracker that does nothing."""
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)

    @override
    def configure(self, bridge: Any, parallelism: Parallelism) -> Mapping[str, object]:
        use_local_layers(bridge)
        return {**settings(parallelism), "use_cpu_initialization": True}
