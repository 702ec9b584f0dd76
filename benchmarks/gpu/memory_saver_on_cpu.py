"""What `torch_memory_saver` does to a GPU's memory, done to this process's own.

Memory that is allocated under a tag is given back to the system, and taken again at the same
addresses. What it held is gone then, unless it was put by: in files here, where a GPU's is put by
in its host's memory.
"""

import ctypes
import gc
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO
from weakref import ref

import numpy as np
import torch

_GARBAGE = 0xFF
"""What bytes are after they were lost: floats are no numbers then, and indices are negative."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass
class Allocated:
    """Memory of a tensor, which it may share with others."""

    tensor: ref[torch.Tensor]
    tag: str
    kept: bool
    """Whether what it holds is put by while it is given back."""
    file: IO[bytes] | None = None
    """With what was put by."""


class MemorySaver:
    """What SGLang asks of `torch_memory_saver.torch_memory_saver`."""

    enabled = True

    def __init__(self) -> None:
        self._allocated: list[Allocated] = []

    @contextmanager
    def region(self, tag: str, *, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Remember what is allocated under a tag, and whether what it holds is to be kept."""
        # Held until the end, so that nothing new is where one of them was.
        before = _tensors()
        known = {_bytes(tensor).ctypes.data for tensor in before}
        yield
        new = (tensor for tensor in _tensors() if _bytes(tensor).ctypes.data not in known)
        self._allocated += [Allocated(ref(tensor), tag, enable_cpu_backup) for tensor in new]

    def pause(self, tag: str) -> None:
        """Give memory of a tag back, all pages of it that hold nothing else."""
        for allocated, held in self._of(tag):
            if allocated.kept:
                allocated.file = tempfile.TemporaryFile()  # noqa: SIM115 - until it is taken again
                held.tofile(allocated.file)
            _give_back(held)

    def resume(self, tag: str) -> None:
        """Take it again, with what was put by, or with nothing that makes sense."""
        for allocated, held in self._of(tag):
            if allocated.file is None:
                held.fill(_GARBAGE)
                continue
            with allocated.file as file:
                file.seek(0)
                held[:] = np.fromfile(file, dtype=np.uint8)
            allocated.file = None

    def cuda_graph(self, **_: object) -> AbstractContextManager[None]:
        """Do nothing: there are no graphs."""
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        """Do nothing: no memory is used again under another tag."""
        return nullcontext()

    def _of(self, tag: str) -> Iterator[tuple[Allocated, np.ndarray]]:
        alive = ((each, each.tensor()) for each in self._allocated if each.tag == tag)
        held = ((each, _bytes(tensor)) for each, tensor in alive if tensor is not None)
        yield from {memory.ctypes.data: (each, memory) for each, memory in held}.values()


def configure_subprocess() -> AbstractContextManager[None]:
    """Do nothing: every process of SGLang's on a CPU brings this along."""
    return nullcontext()


def _tensors() -> list[torch.Tensor]:
    """Return all of this process's."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu"]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return all that a tensor's storage holds, uint8 [N]."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _give_back(held: np.ndarray) -> None:
    page = mmap.PAGESIZE
    start = -(-held.ctypes.data // page) * page
    length = (held.ctypes.data + held.nbytes) // page * page - start
    if length > 0 and _madvise(start, length, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory could not be given back")


torch_memory_saver = MemorySaver()
