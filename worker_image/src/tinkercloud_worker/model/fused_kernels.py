"""Kernels that do in one pass over memory what torch does in many, compiled on the accelerator.

A GPU spends most of a step of a small model on such passes: norms, rotary positions, gated
activations, the softmax over the vocabulary. Liger's kernels and torch's own compiler want Triton
and a C compiler when they run; without, and on a CPU, everything is computed as torch would.
"""

import functools
import logging
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.lora.experts import find_experts

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def fuse(model: PreTrainedModel) -> None:
    """Have a half-precision model on a GPU use Liger's kernels, as far as those know its kind."""
    if are_fused(model.device, model.dtype):
        use_liger(model)


def are_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether models of a dtype use Liger's kernels on a device.

    In float32 a model stays transformers' own to the last operation.
    """
    if not accelerator.runs_triton(device) or dtype == torch.float32 or not _can_compile():
        return False
    if find_spec("liger_kernel") is None:
        log.info("no fused kernels: liger-kernel is not installed")
        return False
    return True


def use_liger(model: PreTrainedModel) -> None:
    """Have a model compute norms, rotary positions and activations by Liger's kernels.

    They take the place of transformers' functions for all models of the kind in this process.
    Mixtures keep transformers' activations.
    """
    # Liger names each backend of other makers' that is not there, at every start.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    # Triton must not be loaded where there is no GPU.
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415

    _apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        # Its experts are another class, in which no later model's would be known for what they are.
        swiglu=not find_experts(model),
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of tensors, the first of which says where it is computed."""

    @functools.cache
    def compiled() -> Callable[P, R]:
        # Its compiler takes seconds to load, which only a GPU gives back.
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        on_gpu = (
            isinstance(first, Tensor) and accelerator.runs_triton(first.device) and _can_compile()
        )
        return (compiled() if on_gpu else function)(*args, **kwargs)

    return call


@functools.cache
def _can_compile() -> bool:
    missing = [
        name
        for name, found in (
            ("Triton", find_spec("triton")),
            ("a C compiler", shutil.which("cc") or shutil.which("gcc")),
        )
        if not found
    ]
    if missing:
        log.warning("kernels are not compiled, which is slower", extra={"missing": missing})
    return not missing
