"""Everything specific to CUDA and NCCL, and its fallback without a GPU.

The rest of the worker asks this module for what it needs from its device. Only megatron-core calls
CUDA by itself; its setup is in `megatron_trainer.gpu`, and without a GPU in `megatron_trainer.cpu`.
No other module names CUDA, which a test enforces.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # public, missing in __all__

from tinkercloud_worker.device import memory
from tinkercloud_worker.device.pass_memory import HostPeak, PeakMeter

Backend = Literal["nccl", "gloo"]
"""Communication backend of a process group. NCCL needs a GPU of its own for each rank."""
DEVICE_OF_BACKEND: Mapping[Backend, Literal["cuda", "cpu"]] = {"gloo": "cpu", "nccl": "cuda"}
"""The device of the tensors that each backend sends."""


def is_available() -> bool:
    """Whether this process has a GPU."""
    return torch.cuda.is_available()


def visible_devices_env() -> Mapping[str, str]:
    """Return the environment variables that make this process's GPUs visible to another one.

    Ray hides GPUs from processes that ask for none.
    """
    name = "CUDA_VISIBLE_DEVICES"
    return {name: os.environ[name]} if name in os.environ else {}


def gpus_of(device: str) -> float:
    """Return the number of GPUs that a rank needs for a device, given its configured name."""
    return 1.0 if device == "cuda" else 0.0


def runs_triton(device: torch.device) -> bool:
    """Whether a device runs kernels compiled by Triton."""
    return device.type == "cuda"


def efficient_tokens(device: torch.device) -> int:
    """Return the tokens of a pass below which fewer take hardly less time.

    A GPU computes some thousands while the host launches the kernels of a pass.
    """
    return 256 if device.type == "cpu" else 2048


def use_full_float32() -> None:
    """Make float32 convolutions as exact as float32 products are; by default cuDNN uses TF32."""
    torch.backends.cudnn.allow_tf32 = False


def has_float32_mm(factor: Tensor) -> bool:
    """Whether `torch.mm` can return float32 for half-precision factors like this one.

    Tensor cores accumulate in float32 anyway. On other devices the result has the dtype of its
    factors.
    """
    return factor.is_cuda and factor.dtype != torch.float32


def has_flash_attention(query: Tensor) -> bool:
    """Whether torch has variable-length flash attention on the device of a tensor."""
    return query.is_cuda


def aligns_causal_masks(query: Tensor) -> bool:
    """Whether causal attention aligns fewer queries than keys with the last positions.

    The CPU kernels align the queries with the first positions.
    """
    return query.is_cuda


def wants_many_rows(weight: Tensor) -> bool:
    """Whether products with few rows underuse the weight's device."""
    return weight.is_cuda


def syncs_on_read(tensor: Tensor) -> bool:
    """Whether reading this tensor makes the host wait for all queued work of the device."""
    return tensor.is_cuda


def release_memory() -> None:
    """Return cached GPU memory to the device, if this process has used a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if unknown."""
    if device.type != "cuda":
        return memory.available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory cached by torch is available for new allocations.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class GpuPeak:
    """Measures the memory that torch has allocated on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Create it for a GPU."""
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """See `PeakMeter`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int | None:
        """See `PeakMeter`."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)


def peak_meter(device: torch.device) -> PeakMeter:
    """Return what measures the memory that passes allocate on a device."""
    return GpuPeak(device) if device.type == "cuda" else HostPeak()


def is_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the memory of a GPU."""
    return tensor.is_cuda


def begin_copy(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Begin to copy GPU tensors to pinned host memory, after the work that is queued so far.

    Work that is queued later, on the same stream, does not change the copies. torch keeps pinned
    memory for later copies when it is freed, in blocks whose sizes are powers of two.

    Returns:
        The copies, and a callable that waits until they are complete.
    """
    copies = [
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        for each in tensors
    ]
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copies, copied.synchronize


def side_stream() -> AbstractContextManager[object]:
    """Return a context whose GPU work runs on a separate stream.

    The work then does not wait for a collective that hangs because a rank has left.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def graph_capturer_for(device: torch.device) -> "GraphCapturer | None":
    """Return a graph capturer for a device; None if it does not support or need one."""
    return GraphCapturer(device) if device.type == "cuda" else None


class GraphCapturer:
    """Captures CUDA graphs that share one memory pool, so no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture the work of a function; see `graphs.GraphCapturer`.

        Raises:
            RuntimeError: the work can't be captured, because it reads results back to the host.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # The first call loads libraries and kernels, which can't be captured.
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate during the capture: publishing weights runs on one.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = compute()
        except RuntimeError:
            self._leave_pool()
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _leave_pool(self) -> None:
        """End allocation to the pool after a failed capture, or nothing would be freed any more."""
        index = self._stream.device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


def backend_of_ranks(gpus: float) -> str:
    """Return the backend of ranks with this many GPUs each, as `torch.distributed` names it.

    Ranks with GPUs also use gloo, for tensors on the CPU.
    """
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def required_version(backend: Backend) -> str | None:
    """Return the version of a backend that all ranks must share; None if any version works."""
    if backend != "nccl":
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def broadcast_from_gpu(store: Store, ranks: int, timeout: timedelta) -> Callable[[Tensor], None]:
    """Create an NCCL process group with this process as rank 0; return its broadcast function.

    The function also accepts CPU tensors. The first call waits for the other ranks; every call
    returns once all ranks have the tensor.

    Args:
        store: the store for the rendezvous of the ranks.
        ranks: the size of the group, including this rank.
        timeout: the time limit of a broadcast.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    settings = dist.ProcessGroupNCCL.Options()
    settings._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, 0, ranks, settings)

    def broadcast(run: Tensor) -> None:
        nccl.broadcast([run.to("cuda")], options).wait()  # type: ignore[attr-defined] # not in stubs
        # So far only the stream has waited.
        torch.cuda.synchronize()

    return broadcast
