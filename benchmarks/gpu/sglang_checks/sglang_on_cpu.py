"""SGLang's server without a GPU: `python -m benchmarks.gpu.sglang_checks.sglang_on_cpu OPTIONS`.

Its wheels hold kernels of GPUs only, and some of its modules import them wherever they run. Here
Triton's interpreter reads those that are written in Triton (TRITON_INTERPRET): attention, adapters,
experts. Of the others, sorting tokens by expert and hashing seeds are written again, torch computes
the rest, no memory is pinned, and what is given away is this machine's. Each of its processes begins
with this module.
"""

import functools
import importlib
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from benchmarks.gpu.sglang_checks import memory_saver_on_cpu

_WORD = 0xFFFFFFFF


class NoKernels(ModuleType):
    """A stand-in for `sgl_kernel` whose functions can't be called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} is not available on a CPU")

        return refuse


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a tensor factory that ignores `pin_memory`."""

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


def sort_by_expert(
    topk_ids: torch.Tensor, buckets: int, block_size: int, *written: torch.Tensor
) -> None:
    """Sort tokens into separate blocks for each expert, as `moe_align_block_size` does.

    Args:
        topk_ids: experts of each token, [T, K].
        buckets: the number of experts plus one for -1, the experts of other ranks.
        block_size: the number of tokens in a block.
        written: outputs: indices into `topk_ids` sorted by expert, T * K for padding; the expert of
            each block; and the number of indices, [1].
    """
    sorted_ids, expert_ids, padded_tokens, *_ = written
    experts = topk_ids.flatten()
    sorted_ids.fill_(len(experts))
    expert_ids.fill_(-1)
    start = 0
    for expert in range(-1, buckets - 1):
        [places] = torch.nonzero(experts == expert, as_tuple=True)
        end = start + -(-len(places) // block_size) * block_size
        sorted_ids[start : start + len(places)] = places
        expert_ids[start // block_size : end // block_size] = expert
        start = end
    padded_tokens[0] = start


def sort_by_adapter(topk_ids: torch.Tensor, *arguments: torch.Tensor, **_: object) -> None:
    """Do the same for each adapter, as SGLang itself does for few tokens.

    Args:
        topk_ids: experts of each token, [T, K].
        arguments: the other arguments of `moe_lora_align_block_size`: seven inputs, three output
            tensors, and the enabled adapters.
    """
    known, written, enabled = arguments[:7], arguments[7:10], arguments[10]
    found = _adapters._naive_moe_lora_align_block_size(topk_ids, *known, enabled, topk_ids.device)
    for tensor, values in zip(written, found, strict=True):
        tensor.copy_(values)


def registered(name: str, function: Callable[..., object], key: str = "", **options: bool) -> None:
    """Register one of SGLang's operations, those for CUDA for the CPU."""
    _register(name, function, "CPU" if key == "CUDA" else key, **options)


def _rotated(words: torch.Tensor, bits: int) -> torch.Tensor:
    words = words & _WORD
    return (words << bits | words >> (32 - bits)) & _WORD


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
    setattr(torch, _name, unpinned(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", torch.Tensor.contiguous)  # noqa: B010 - it has another type
# torch 2.14 built for CUDA assumes a CUDA device, even without a driver.
setattr(torch, "get_device_module", lambda _device=None: torch.cpu)  # noqa: B010 - as above
_kernels = NoKernels("sgl_kernel")
_kernels.__spec__ = ModuleSpec("sgl_kernel", None)
sys.modules["sgl_kernel"] = _kernels
sys.modules["torch_memory_saver"] = memory_saver_on_cpu

torch.library.define(
    "sgl_kernel::murmur_hash32_cpu",
    "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor",
)
torch.library.impl("sgl_kernel::murmur_hash32_cpu", "cpu", murmur_hash)
# Replacements for what the interpreter does not support and for GPU queries.
_invariant = importlib.import_module("sglang.srt.batch_invariant_ops")
vars(_invariant)["enable_batch_invariant_mode"] = lambda: None
_tuning = importlib.import_module("sglang.kernels.ops.lora.dense.lora_tuning_config")
vars(_tuning)["get_device_name"] = lambda: "cpu"
_common = importlib.import_module("sglang.srt.utils.common")
_register = _common.sglang_lib.impl
_common.sglang_lib.impl = registered
_experts = importlib.import_module(
    "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size"
)
vars(_experts)["sgl_moe_align_block_size"] = sort_by_expert
_adapters = importlib.import_module("sglang.srt.lora.lora_moe_runners")
vars(_adapters)["moe_lora_align_block_size"] = sort_by_adapter

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
