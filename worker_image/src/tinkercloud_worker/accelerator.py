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

Backend = Literal["nccl", "gloo"]
"""What ranks of a process group talk by. NCCL is for GPUs, of which each rank has its own."""
Memory = Literal["cuda", "cpu"]
"""Memory that processes of one machine can share: a GPU's, or the machine's own."""

CARRIED_FROM: Mapping[Backend, Memory] = {"gloo": "cpu", "nccl": "cuda"}
"""Where the tensors are that each backend carries."""

_DEVICE_ARGUMENT = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the index of the device."""


def is_there() -> bool:
    """Whether this process has a GPU."""
    return torch.cuda.is_available()


def visible() -> Mapping[str, str]:
    """Return the variables by which another process has this one's GPUs, and no others.

    Ray hides them from processes that ask for none.
    """
    name = "CUDA_VISIBLE_DEVICES"
    return {name: os.environ[name]} if name in os.environ else {}


def gpus_of(device: str) -> float:
    """Return how many GPUs a rank takes that computes on a device, by its configured name."""
    return 1.0 if device == "cuda" else 0.0


def runs_triton(device: torch.device) -> bool:
    """Whether kernels that Triton compiles run on a device."""
    return device.type == "cuda"


def adds_up_in_float32(factor: Tensor) -> bool:
    """Whether `torch.mm` has a float32 result for half-precision factors such as this one.

    Tensor cores add up in float32 anyway. Elsewhere results are of the type of their factors.
    """
    return factor.is_cuda and factor.dtype != torch.float32


def has_flash_attention(query: Tensor) -> bool:
    """Whether torch has flash attention for sequences of many lengths where a tensor is."""
    return query.is_cuda


def aligns_causal_masks(query: Tensor) -> bool:
    """Whether attention's kernels know the causal mask of the last positions.

    Those of the CPU know that of the first.
    """
    return query.is_cuda


def wants_many_rows(weight: Tensor) -> bool:
    """Whether products with few rows leave the device idle that has this weight."""
    return weight.is_cuda


def is_awaited(tensor: Tensor) -> bool:
    """Whether who looks at a tensor's values waits for all work on the device that is under way.

    A CPU has done its work by then; a GPU is told of it far ahead.
    """
    return tensor.is_cuda


def release_memory() -> None:
    """Give back what torch keeps of the GPU's memory for later, if this process has used one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def beside_what_hangs() -> AbstractContextManager[object]:
    """Return a context whose work on a GPU does not wait for a collective that a rank has left."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def recorder_for(device: torch.device) -> "GraphRecorder | None":
    """Return what records on a device; None where nothing does, or launching costs little."""
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
    """Return what ranks that have so many GPUs each talk by, as `torch.distributed` names it.

    Those with GPUs use gloo too, for what they have on the CPU.
    """
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def version_of(backend: Backend) -> str | None:
    """Return the version of a backend that all ranks must have; None where it does not matter."""
    if backend != "nccl":
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def broadcast_from_gpu(store: Store, ranks: int, patience: timedelta) -> Callable[[Tensor], None]:
    """Make a process group over NCCL whose rank 0 this process is; return what broadcasts there.

    That takes tensors of the CPU too. It waits for the other ranks the first time, and returns
    once all of them have the tensor.

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


def handed_over(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
    """Return what another process makes a tensor of that a GPU holds, by CUDA IPC.

    torch tells it the GPU's number, which is another process's own affair; here it is the GPU's
    own name, as SGLang has it.

    Returns:
        A function and its arguments, as a reducer of `pickle` does; None for tensors that are
        not on a GPU.
    """
    if not tensor.is_cuda:
        return None
    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    name = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], name, *arguments[_DEVICE_ARGUMENT + 1 :])
