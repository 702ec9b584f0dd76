"""SGLang's server without a GPU: `python -m benchmarks.gpu.sglang_on_cpu OPTIONS`.

Its wheels hold kernels of GPUs only, and some of its modules import them wherever they run. Here it
computes with torch alone, and pins no memory. Each of its processes begins with this module.
"""

import functools
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


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


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
    setattr(torch, _name, unpinned(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", torch.Tensor.contiguous)  # noqa: B010 - it has another type
_kernels = NoKernels("sgl_kernel")
_kernels.__spec__ = ModuleSpec("sgl_kernel", None)
sys.modules["sgl_kernel"] = _kernels

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
