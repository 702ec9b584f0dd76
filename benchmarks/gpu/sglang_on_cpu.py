"""SGLang's server without a GPU: `python -m benchmarks.gpu.sglang_on_cpu OPTIONS`.

Its wheels hold kernels of GPUs only, and some of its modules import them wherever they run. Here it
computes with torch alone, and pins no memory; what its seeds are hashed with is written again. Each
of its processes begins with this module.
"""

import functools
import importlib
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

_WORD = 0xFFFFFFFF


class NoKernels(ModuleType):
    """Stands where `sgl_kernel` would; nothing in it can be called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} has no equal on a CPU")

        return refuse


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a maker of tensors that takes no notice of `pin_memory`."""

    @functools.wraps(make)
    def made(*arguments: object, **options: object) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made


def murmur_hash(
    seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Hash a row's seed and position with each column, [N] and [M] to uint32 [N, M].

    MurmurHash3 (x86, 32 bits) of four words: the seed's low and high halves, position, column.
    """
    seeds, positions = seeds.view(torch.int64)[:, None], positions.long()[:, None]
    state = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions, columns.long()[None]):
        mixed = _rotated((word & _WORD) * 0xCC9E2D51, 15) * 0x1B873593
        state = _rotated(state ^ (mixed & _WORD), 13) * 5 + 0xE6546B64 & _WORD
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & _WORD
    return (state ^ (state >> 16)).to(torch.uint32)


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    words = words & _WORD
    return (words << bits | words >> (32 - bits)) & _WORD


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
    setattr(torch, _name, unpinned(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", torch.Tensor.contiguous)  # noqa: B010 - it has another type
_kernels = NoKernels("sgl_kernel")
_kernels.__spec__ = ModuleSpec("sgl_kernel", None)
sys.modules["sgl_kernel"] = _kernels

torch.library.define(
    "sgl_kernel::murmur_hash32_cpu",
    "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor",
)
torch.library.impl("sgl_kernel::murmur_hash32_cpu", "cpu", murmur_hash)
# Seeds are read where inference is deterministic, for which torch's own kernels have to do.
_choices = importlib.import_module("sglang.srt.arg_groups.choices")
_choices.add_deterministic_attention_backend_choices(["torch_native"])
_invariant = importlib.import_module("sglang.srt.batch_invariant_ops")
setattr(_invariant, "enable_batch_invariant_mode", lambda: None)  # noqa: B010 - as above

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
