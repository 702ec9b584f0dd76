"""Fused kernels, compiled on the accelerator.

They do in one pass over memory what torch does in many. On a GPU, small models spend most of a step
on such passes: norms, rotary positions, gated activations, the softmax over the vocabulary. Liger's
kernels and torch's compiler need Triton and a C compiler at run time; without them, and on a CPU,
torch's ordinary operations are used.
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
    """Let a half-precision model on a GPU use Liger's kernels, where they support its family."""
    if are_fused(model.device, model.dtype):
        use_liger(model)


def are_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether models of a dtype use Liger's kernels on a device.

    In float32, models use only transformers' own operations.
    """
    if not accelerator.runs_triton(device) or dtype == torch.float32 or not _can_compile():
        return False
    if find_spec("liger_kernel") is None:
        log.info("no fused kernels: liger-kernel is not installed")
        return False
    return True


def use_liger(model: PreTrainedModel) -> None:
    """Let a model compute norms, rotary positions and activations with Liger's kernels.

    They replace transformers' functions for all models of the family in this process. Mixtures keep
    transformers' activations. Families for which Liger does not fit the installed transformers keep
    all of its operations (with 5.23 and Liger 0.8.5: Qwen2-VL, Qwen2.5-VL and Qwen3-VL).
    """
    # Liger logs each missing backend of other vendors at every start.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    # Triton must not be loaded where there is no GPU.
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415

    try:
        _apply_liger_kernel_to_instance(
            model,
            rope=True,
            rms_norm=True,
            # Liger replaces the experts by another class, which `find_experts` would not recognize
            # in later models.
            swiglu=not find_experts(model),
            cross_entropy=False,
            fused_linear_cross_entropy=False,
        )
    except ImportError as error:
        # It imports names of transformers that newer ones no longer have, before it replaces any.
        log.warning("no fused kernels for %s: %s", model.config.model_type, error)


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of tensors on a GPU; the device of the first tensor decides."""

    @functools.cache
    def compiled() -> Callable[P, R]:
        # Loading the compiler takes seconds, which pays off only on a GPU.
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
