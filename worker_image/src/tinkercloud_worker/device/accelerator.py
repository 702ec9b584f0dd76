"""What a GPU does, and what happens where there is none: all that is CUDA's, and NCCL's, is here.

The rest of the worker says what it needs of the device it computes on, and names neither. Only
megatron-core talks to CUDA by itself: what it needs for that is in `megatron_trainer.gpu`, and
without a GPU in `megatron_trainer.cpu`. No other module names CUDA; a test holds them to it.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # public, missing in __all__
from torch.multiprocessing.reductions import reduce_tensor

from tinkercloud_worker.device import memory

Backend = Literal["nccl", "gloo"]
"""What ranks of a process group talk by. NCCL is for GPUs, of which each rank has its own."""
Memory = Literal["cuda", "cpu"]
"""Memory that processes of one machine can share: a GPU's, or the machine's own."""

DEVICE_OF_BACKEND: Mapping[Backend, Memory] = {"gloo": "cpu", "nccl": "cuda"}
"""Where the tensors are that each backend sends."""

_DEVICE_ARGUMENT = 6
"""Position of the device's index among the arguments of torch's `rebuild_cuda_tensor`."""


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
    """Return how many GPUs a rank needs to compute on a device, by its configured name."""
    return 1.0 if device == "cuda" else 0.0


def runs_triton(device: torch.device) -> bool:
    """Whether kernels that Triton compiles run on a device."""
    return device.type == "cuda"


def has_float32_mm(factor: Tensor) -> bool:
    """Whether `torch.mm` can return float32 for half-precision factors such as this one.

    Tensor cores accumulate in float32 anyway. Elsewhere the result has the type of its factors.
    """
    return factor.is_cuda and factor.dtype != torch.float32


def has_flash_attention(query: Tensor) -> bool:
    """Whether torch has flash attention for variable lengths on the device of a tensor."""
    return query.is_cuda


def aligns_causal_masks(query: Tensor) -> bool:
    """Whether causal attention of fewer queries than keys is that of the last positions.

    The CPU's kernels take the queries for the first positions.
    """
    return query.is_cuda


def wants_many_rows(weight: Tensor) -> bool:
    """Whether products with few rows leave the weight's device idle."""
    return weight.is_cuda


def syncs_on_read(tensor: Tensor) -> bool:
    """Whether the host waits for all queued work of the device when it reads this tensor."""
    return tensor.is_cuda


def release_memory() -> None:
    """Return cached GPU memory to the device, if this process has used one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process may still take on a device; None if that can't be told."""
    if device.type != "cuda":
        return memory.available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for later allocations is free for new ones.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def side_stream() -> AbstractContextManager[object]:
    """Return a context whose GPU work runs on a stream of its own.

    So it does not wait for a collective that hangs because a rank has left.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def recorder_for(device: torch.device) -> "GraphRecorder | None":
    """Return a recorder of graphs for a device; None if it has none, or launching costs little."""
    return GraphRecorder(device) if device.type == "cuda" else None


class GraphRecorder:
    """Records CUDA graphs, which share their memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record; see `graphs.Recorder`.

        Raises:
            RuntimeError: the work can't be recorded: it reads results back while it computes.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries and kernels are loaded by the first use, which can't be recorded.
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate meanwhile: weights are published from one.
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
        """End what a recording that failed leaves begun: the allocator would free nothing more."""
        index = self._stream.device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


def backend_of_ranks(gpus: float) -> str:
    """Return the backend of ranks with so many GPUs each, as `torch.distributed` names it.

    Those with GPUs use gloo too, for tensors on the CPU.
    """
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def required_version(backend: Backend) -> str | None:
    """Return the version of a backend that all ranks must have; None if any will do."""
    if backend != "nccl":
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def broadcast_from_gpu(store: Store, ranks: int, patience: timedelta) -> Callable[[Tensor], None]:
    """Make a process group over NCCL with this process as rank 0; return its broadcast function.

    The function takes tensors of the CPU too. It waits for the other ranks the first time, and
    returns once all of them have the tensor.

    Args:
        store: in which the ranks find each other.
        ranks: of the group, this one too.
        patience: how long a broadcast may take.
    """
    whence = dist.BroadcastOptions()
    whence.rootRank, whence.rootTensor = 0, 0
    settings = dist.ProcessGroupNCCL.Options()
    settings._timeout = patience
    nccl = dist.ProcessGroupNCCL(store, 0, ranks, settings)

    def broadcast(run: Tensor) -> None:
        nccl.broadcast([run.to("cuda")], whence).wait()  # type: ignore[attr-defined] # not in stubs
        # Until here only the stream has waited.
        torch.cuda.synchronize()

    return broadcast


def ipc_handle(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
    """Return what another process needs to open a tensor of a GPU, by CUDA IPC.

    torch passes the GPU's index, which differs between processes; this passes its UUID, as SGLang
    does.

    Returns:
        A function and its arguments, as a reducer of `pickle` does; None for tensors that are
        not on a GPU.
    """
    if not tensor.is_cuda:
        return None
    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    name = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], name, *arguments[_DEVICE_ARGUMENT + 1 :])
