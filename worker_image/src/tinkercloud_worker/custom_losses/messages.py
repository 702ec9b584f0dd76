"""How the head and a process that computes losses exchange a task: in memory that both map.

A task is an anonymous file (memfd): its description in JSON, then the arrays, each at a multiple of
64 bytes. The process writes its results into the same file. Nothing remains when both have closed
it, however they end. The head reads numbers only, at places and in shapes that it has chosen: what
a loss has done to its process can't reach it by the answer. The file can't be resized, since the
head would be ended by reading beyond its end.

Shape legend: N positions of a datum, K targets per position, D data, M metrics.
"""

import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tinkercloud_protocol.requests.tensors import Array, FloatArray
from tinkercloud_worker.custom_losses.inputs import DatumInputs, DatumShape

DoubleArray = npt.NDArray[np.float64]

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class LossValues:
    """What a custom loss returns for some data."""

    losses: DoubleArray
    """[D]."""
    gradients: Sequence[FloatArray]
    """The derivative of each loss with respect to its logprobs, [N] or [N, K]."""
    metrics: DoubleArray
    """[D, M], in the order of the loss's metrics."""


@dataclass(frozen=True, slots=True, eq=False)
class CostTask:
    """Check the cost of a loss."""

    definition: bytes
    shapes: Mapping[DatumShape, int]
    max_bytes: int

    def described(self) -> dict[str, Any]:
        """Return the task as JSON."""
        shapes = [[s.logprobs, s.values, count] for s, count in self.shapes.items()]
        return {
            "loss": self.definition.decode(),
            "shapes": shapes,
            "max_bytes": self.max_bytes,
        }

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Self:
        """Return the task of a description."""
        shapes = {
            DatumShape(
                tuple(logprobs), tuple((name, tuple(size), kind) for name, size, kind in values)
            ): count
            for logprobs, values, count in described["shapes"]
        }
        return cls(described["loss"].encode(), shapes, described["max_bytes"])


@dataclass(frozen=True, slots=True, eq=False)
class LossTask:
    """Compute a loss of some data."""

    definition: bytes
    logprobs: Sequence[FloatArray]
    """[N] or [N, K] of each datum."""
    data: Sequence[DatumInputs]
    num_metrics: int


class _Layout:
    """Places of arrays, one after another."""

    def __init__(self) -> None:
        self.size = 0

    def place(self, shape: Sequence[int], dtype: str) -> list[Any]:
        """Return the place of the next array: its shape, dtype and offset."""
        start = self.size
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self.size = start + size + -size % _ALIGNMENT
        return [list(shape), dtype, start]


class TaskMemory:
    """The memory of a task, on the head's side."""

    def __init__(self, task: CostTask | LossTask) -> None:
        """Write a task. Close it, or use it as a context.

        Raises:
            OSError: there is no memory.
        """
        self._places: dict[str, Any] = {}
        described, arrays, layout = {}, list[tuple[Array, list[Any]]](), _Layout()
        if isinstance(task, CostTask):
            described = task.described()
        else:
            described = self._laid_out(task, layout, arrays)
        text = json.dumps(described).encode()
        start = _LENGTH.size + len(text)
        self._base = start + -start % _ALIGNMENT
        self.fd = os.memfd_create("custom-loss", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self._base + layout.size + _ALIGNMENT)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self.fd, 0)
        except BaseException:
            os.close(self.fd)
            raise
        self._memory[: _LENGTH.size] = _LENGTH.pack(len(text))
        self._memory[_LENGTH.size : start] = text
        for array, place in arrays:
            np.copyto(_array(self._memory, self._base, place), array, casting="no")

    def _laid_out(
        self, task: LossTask, layout: _Layout, arrays: list[tuple[Array, list[Any]]]
    ) -> dict[str, Any]:
        count = len(task.data)
        self._places = {
            "losses": layout.place([count], "<f8"),
            "metrics": layout.place([count, task.num_metrics], "<f8"),
            "gradients": [layout.place(each.shape, "<f4") for each in task.logprobs],
        }
        data = []
        for logprobs, datum in zip(task.logprobs, task.data, strict=True):
            places = {}
            for name, value in (*datum.values.items(), ("logprobs", logprobs)):
                places[name] = layout.place(value.shape, value.dtype.str)
                arrays.append((value, places[name]))
            data.append(places)
        return {"loss": task.definition.decode(), "data": data, "results": self._places}

    def values(self) -> LossValues:
        """Return copies of the results of a `LossTask`."""
        read = [self._copied(place) for place in self._places["gradients"]]
        return LossValues(
            self._copied(self._places["losses"]), read, self._copied(self._places["metrics"])
        )

    def _copied(self, place: list[Any]) -> npt.NDArray[Any]:
        return _array(self._memory, self._base, place).copy()

    def close(self) -> None:
        """Free it."""
        self._memory.close()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedTask:
    """A task on the side of the process that computes it. Its arrays are the shared memory."""

    described: Mapping[str, Any]
    memory: mmap.mmap
    base: int

    @classmethod
    def read(cls, fd: int) -> Self:
        """Map a task; the descriptor may be closed then."""
        memory = mmap.mmap(fd, 0)
        (length,) = _LENGTH.unpack_from(memory)
        start = _LENGTH.size + length
        described = json.loads(memory[_LENGTH.size : start])
        return cls(described, memory, start + -start % _ALIGNMENT)

    @property
    def definition(self) -> bytes:
        """The stored loss."""
        text: str = self.described["loss"]
        return text.encode()

    def array(self, place: list[Any]) -> npt.NDArray[Any]:
        """Return the array at a place."""
        return _array(self.memory, self.base, place)


def _array(memory: mmap.mmap, base: int, place: list[Any]) -> npt.NDArray[Any]:
    shape, dtype, offset = place
    return np.ndarray(tuple(shape), np.dtype(dtype), buffer=memory, offset=base + offset)
