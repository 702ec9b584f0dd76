"""A stand-in for `torch_memory_saver` that works on this process's memory instead of a GPU's.

Memory allocated under a tag is released to the system and reallocated at the same addresses. Its
contents are lost unless they were backed up: here in files, for a GPU in host memory.
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
"""The value of lost bytes: it makes floats NaN and indices negative."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass
class Allocated:
    """Memory of a tensor, possibly shared with others."""

    tensor: ref[torch.Tensor]
    tag: str
    kept: bool
    """Whether its contents are backed up while it is released."""
    file: IO[bytes] | None = None
    """The backup of its contents."""


class MemorySaver:
    """The part of `torch_memory_saver.torch_memory_saver` that SGLang uses."""

    enabled = True

    def __init__(self) -> None:
        self._allocated: list[Allocated] = []

    @contextmanager
    def region(self, tag: str, *, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Track allocations under a tag, and whether to back up their contents."""
        # Held until the end, so that their addresses are not reused.
        before = _tensors()
        known = {_bytes(tensor).ctypes.data for tensor in before}
        yield
        new = (tensor for tensor in _tensors() if _bytes(tensor).ctypes.data not in known)
        self._allocated += [Allocated(ref(tensor), tag, enable_cpu_backup) for tensor in new]

    def pause(self, tag: str) -> None:
        """Release all pages that hold only memory of a tag."""
        for allocated, held in self._of(tag):
            if allocated.kept:
                allocated.file = tempfile.TemporaryFile()  # noqa: SIM115 - open until resume
                held.tofile(allocated.file)
            _give_back(held)

    def resume(self, tag: str) -> None:
        """Reallocate the memory, with its backup or with garbage."""
        for allocated, held in self._of(tag):
            if allocated.file is None:
                held.fill(_GARBAGE)
                continue
            with allocated.file as file:
                file.seek(0)
                held[:] = np.fromfile(file, dtype=np.uint8)
            allocated.file = None

    def cuda_graph(self, **_: object) -> AbstractContextManager[None]:
        """Do nothing: graphs are not used."""
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        """Do nothing: memory is never reused under another tag."""
        return nullcontext()

    def _of(self, tag: str) -> Iterator[tuple[Allocated, np.ndarray]]:
        alive = ((each, each.tensor()) for each in self._allocated if each.tag == tag)
        held = ((each, _bytes(tensor)) for each, tensor in alive if tensor is not None)
        yield from {memory.ctypes.data: (each, memory) for each, memory in held}.values()


def configure_subprocess() -> AbstractContextManager[None]:
    """Do nothing: every SGLang process on a CPU already loads this module."""
    return nullcontext()


def _tensors() -> list[torch.Tensor]:
    """Return all tensors of this process."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == "cpu"]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor's storage, uint8 [N]."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _give_back(held: np.ndarray) -> None:
    page = mmap.PAGESIZE
    start = -(-held.ctypes.data // page) * page
    length = (held.ctypes.data + held.nbytes) // page * page - start
    if length > 0 and _madvise(start, length, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "could not release memory")


torch_memory_saver = MemorySaver()
