"""Models under training, of which idle ones may be outside the memory of the device.

The vectors of a model (weights, gradient, moments) can be *paged out*: their content moves to a
`Place`, host memory or a file, and their memory is freed. Their tensors stay the same objects, so
views remain valid, and a model that is needed is paged in with the same bits. A gradient that is
zero takes no space. Models are paged out only to make room, the least recently used first.

A pass must not use a model that was paged out meanwhile: take it from `Models` whenever a piece of
a job begins.
"""

import logging
import mmap
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.device.memory import Available, return_free_memory
from tinkercloud_worker.engine.memory_report import ModelBytes, returning_refusal
from tinkercloud_worker.training.trained_model import TrainedModel

log = logging.getLogger(__name__)

_KEPT_FREE_BYTES = 1 << 30
"""Bytes of host memory, or of a disk, that paging leaves free."""

_GRADIENT = 1
"""The place of the gradient among the vectors of a model."""
_PART = 1 << 22
"""Elements that are written at a time."""

Content = Callable[[], Tensor]
"""Returns the content of a vector that was paged out. It may be called again after a failure.

Raises OSError if the content can't be read, or is not what was kept."""
Missing = Callable[[int], int]
"""Returns by how many bytes the device falls short of a requested size; 0 or less if it fits."""


class PagingPlace(Protocol):
    """Where vectors are kept."""

    def keep(self, vector: Tensor) -> Content:
        """Store a flat vector.

        Raises:
            OSError: there is no room for it.
        """

    def free_bytes(self) -> int | None:
        """Return how many more bytes there is room for; None if unknown.

        Raises:
            OSError: the place can't be used.
        """


class HostMemory:
    """Keeps vectors of a GPU in pinned host memory, which the GPU reads directly.

    torch rounds pinned blocks up to powers of two, so that a vector may take twice its size.
    """

    def __init__(self, available: Available) -> None:
        """Keep nothing.

        Args:
            available: returns the bytes of host memory that can be allocated; None if unknown.
        """
        self._available = available

    @staticmethod
    def bytes_for(size: int) -> int:
        """Return the bytes of a pinned block for a vector of this many bytes."""
        return 1 << max(size - 1, 0).bit_length()

    def keep(self, vector: Tensor) -> Content:
        """See `Place`."""
        available, size = self._available(), self.bytes_for(vector.nbytes)
        if available is not None and available - _KEPT_FREE_BYTES < size:
            raise OSError(f"{size} bytes do not fit in {available} bytes of host memory")
        try:
            copy = torch.empty(
                vector.shape, dtype=vector.dtype, pin_memory=accelerator.is_gpu(vector)
            )
        except RuntimeError as error:
            raise OSError(f"host memory could not be allocated: {error}") from error
        copy.copy_(vector)
        return lambda: copy

    def free_bytes(self) -> int | None:
        """See `Place`: half of what is available, since each vector may take twice its size."""
        available = self._available()
        return None if available is None else (available - _KEPT_FREE_BYTES) // 2


class DiskFiles:
    """Keeps vectors of a CPU in files without names, which vanish with the process."""

    def __init__(self, folder: Path, max_bytes: int, processes: int = 1) -> None:
        """Keep nothing.

        Args:
            folder: where the files are; it is created when it is needed.
            max_bytes: total size of the files: others need space on the disk of a pod too.
            processes: number of processes that divide the disk, and `max_bytes`, between them.
        """
        self._folder = folder
        self._processes = processes
        self._left = max_bytes // processes

    def keep(self, vector: Tensor) -> Content:
        """See `Place`."""
        free = self.free_bytes()
        if free < vector.nbytes:
            raise OSError(f"{vector.nbytes} bytes do not fit in {free} bytes of {self._folder}")
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - open while it is needed
        dtype, checksum = vector.dtype, 0
        try:
            for part in torch.split(vector, _PART):
                # A storage that NumPy has seen can't be freed any more, so it gets a copy.
                written = part.clone().numpy().data.cast("B")
                file.write(written)
                checksum = zlib.crc32(written, checksum)
            file.flush()
        except BaseException:
            file.close()
            raise

        def content() -> Tensor:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if zlib.crc32(mapped) != checksum:
                raise OSError(f"a model that was kept on the disk ({self._folder}) is damaged")
            return torch.frombuffer(mapped, dtype=dtype)

        self._left -= vector.nbytes
        weakref.finalize(content, self._free, file, vector.nbytes)
        return content

    def free_bytes(self) -> int:
        """See `Place`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        on_disk = shutil.disk_usage(self._folder).free - _KEPT_FREE_BYTES
        return min(self._left, on_disk // self._processes)

    def _free(self, file: BinaryIO, size: int) -> None:
        file.close()
        self._left += size


class Models(dict[str, TrainedModel]):
    """Models by id. Looking one up pages it in; `contents` and `get` do not."""

    def __init__(self, place: PagingPlace | None = None, missing: Missing = lambda _: 0) -> None:
        """Start without models.

        Args:
            place: where idle models are paged out to; None: they never are.
            missing: tells what the device lacks for a model in addition to those that are paged in.
        """
        super().__init__()
        self._place = place
        self._missing = missing
        self._paged: dict[str, list[tuple[Tensor, Content | None]]] = {}
        """Vectors of the models that are paged out, with their contents; None: zeros."""
        self._uses: dict[str, int] = {}
        """Number of the last use of each model."""
        self._number = 0

    @override
    def __getitem__(self, name: str) -> TrainedModel:
        """Return a model that is paged in.

        Raises:
            Overloaded: there is no room to page it in.
        """
        return self.together([name])[0]

    @override
    def __setitem__(self, name: str, model: TrainedModel) -> None:
        self._forget(name)
        super().__setitem__(name, model)
        self._count_use(name)

    @override
    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._forget(name)

    def discard(self, name: str) -> None:
        """Remove a model, which may be unknown."""
        if name in self:
            del self[name]

    def together(self, names: Sequence[str]) -> list[TrainedModel]:
        """Return models that are all paged in.

        Raises:
            Overloaded: there is no room for all of them.
        """
        found = [super(Models, self).__getitem__(name) for name in names]
        for name, model in zip(names, found, strict=True):
            self._count_use(name)
            if name in self._paged:
                self._page_in(name, model, names)
        return found

    def contents(self, name: str) -> tuple[TrainedModel, list[Tensor]]:
        """Return a model and the contents of its vectors, in their order, without paging it in.

        To read a model does not count as its use. The contents of a model that is paged out are on
        the CPU. They are not to be changed, nor to be used after other calls, except in
        `TrainedModel.copy_later`.
        """
        model = super().__getitem__(name)
        if name not in self._paged:
            return model, model.vectors
        return model, [
            torch.zeros(vector.shape, dtype=vector.dtype) if content is None else content()
            for vector, content in self._paged[name]
        ]

    def is_paged_in(self, name: str) -> bool:
        """Whether there is such a model, in the memory of the device."""
        return name in self and name not in self._paged

    def is_whole(self, name: str) -> bool:
        """Whether a model is fully fine-tuned, and no adapter."""
        return super().__getitem__(name).lora is None

    def memory_bytes(self, name: str) -> int:
        """Return the bytes that a model takes in the memory of the device; 0 if it is unknown."""
        model = self.get(name)
        if model is None or name in self._paged:
            return 0
        return sum(vector.nbytes for vector in model.vectors)

    def discard_gradient(self, name: str) -> None:
        """Set the gradient of a model to zero, where it is."""
        _, gradient, *_ = super().__getitem__(name).vectors
        if name in self._paged:
            self._paged[name][_GRADIENT] = (gradient, None)
        else:
            gradient.zero_()

    @property
    def can_leave(self) -> bool:
        """Whether idle models have a place to go to."""
        return self._place is not None

    def place_free(self) -> int | None:
        """Return how many more bytes idle models may take in their place; None if unknown."""
        try:
            return self._place.free_bytes() if self._place is not None else 0
        except OSError:
            return 0

    def sizes(self) -> dict[str, ModelBytes]:
        """Return the sizes of all models, by id."""
        return {
            name: ModelBytes(
                full=model.full_bytes,
                held=model.held_bytes,
                promised=model.unused_bytes,
                kept=self._kept_bytes(name),
                can_leave=self._can_leave(name),
            )
            for name, model in self.items()
        }

    def page_out(self, names: Sequence[str]) -> None:
        """Page models out in this order, as far as there is room for them."""
        with suppress(OSError):
            for name in names:
                if self._place is not None and self._can_leave(name):
                    self._page_out(name, self._place)

    def page_in(self, names: Sequence[str]) -> None:
        """Page models in, in this order, as far as memory can be allocated for them."""
        try:
            for name in names:
                if name in self._paged:
                    self._read_back(name)
        except (RuntimeError, OSError):
            # A device may have enough memory, but not in one piece.
            log.warning("models could not be paged in", extra={"models": names}, exc_info=True)

    def _kept_bytes(self, name: str) -> int | None:
        if name not in self._paged:
            return None
        return sum(vector.nbytes for vector, content in self._paged[name] if content is not None)

    def make_room(self, size: int, used: Collection[str] = ()) -> int:
        """Page out models until the device has room for a number of bytes.

        Args:
            size: the bytes.
            used: models that are not paged out.

        Returns:
            The bytes that are still missing; 0 or less if there is room.
        """
        with suppress(OSError):
            while self._missing(size) > 0:
                by_use = sorted(self, key=self._uses.__getitem__)
                idle = (each for each in by_use if each not in used and self._can_leave(each))
                oldest = next(idle, None)
                if self._place is None or oldest is None:
                    break
                self._page_out(oldest, self._place)
        return self._missing(size)

    def _can_leave(self, name: str) -> bool:
        model = dict.__getitem__(self, name)
        # The modules of a sharded whole model have its vectors too.
        is_flat = model.lora is not None or model.sharding is None
        return (
            is_flat
            and name not in self._paged
            and all(vector.untyped_storage().resizable() for vector in model.vectors)
        )

    def _page_out(self, name: str, place: PagingPlace) -> None:
        """Page a model out.

        Raises:
            OSError: there is no room for it; nothing has changed.
        """
        model = super().__getitem__(name)
        model.settle()
        vectors = model.vectors
        self._paged[name] = [
            (vector, place.keep(vector) if bool(vector.any()) else None) for vector in vectors
        ]
        for vector in vectors:
            vector.untyped_storage().resize_(0)
        if not accelerator.is_gpu(vectors[0]):
            # Otherwise nothing seems to be gained, and the next model leaves too.
            return_free_memory()

    def _page_in(self, name: str, model: TrainedModel, used: Collection[str]) -> None:
        missing = self.make_room(model.full_bytes, used)
        if missing > 0:
            raise Overloaded(returning_refusal(name, missing))
        self._read_back(name)

    def _read_back(self, name: str) -> None:
        """Page a model in; if that fails, it stays paged out."""
        try:
            for vector, content in self._paged[name]:
                vector.untyped_storage().resize_(vector.nbytes)
                if content is None:
                    vector.zero_()
                else:
                    vector.copy_(content())
        except BaseException:
            for vector, _ in self._paged[name]:
                vector.untyped_storage().resize_(0)
            raise
        del self._paged[name]

    def _count_use(self, name: str) -> None:
        self._number += 1
        self._uses[name] = self._number

    def _forget(self, name: str) -> None:
        self._paged.pop(name, None)
        self._uses.pop(name, None)
