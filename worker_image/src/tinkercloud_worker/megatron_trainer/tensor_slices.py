"""Slices of full tensors that ranks hold, and their assembly on rank 0.

Full tensors have the Hugging Face model's names and shapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A block of a full tensor."""

    name: str
    """The tensor's name."""
    bounds: tuple[tuple[int, int], ...]
    """Start and end index of the block in each dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the block's shape."""
        return tuple(stop - start for start, stop in self.bounds)

    def chunk(self, number: int, of: int, dim: int) -> "TensorSlice":
        """Return one of several equal parts along a dimension."""
        bounds = list(self.bounds)
        start, stop = bounds[dim]
        size = (stop - start) // of
        bounds[dim] = (start + number * size, start + (number + 1) * size)
        return TensorSlice(self.name, tuple(bounds))

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return the block as a view of the full tensor."""
        return tensor[tuple(slice(start, stop) for start, stop in self.bounds)]


def full_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice that covers a full tensor."""
    return TensorSlice(name, tuple((0, size) for size in shape))


def put(
    whole: Mapping[str, Tensor], slices: Sequence[TensorSlice], parts: Iterable[Tensor]
) -> None:
    """Write slices into full tensors; parts may have any shape with the same number of elements.

    Parts are cast on the destination's device: casting on the GPU would allocate GPU memory.
    """
    for block, part in zip(slices, parts, strict=True):
        tensor = whole[block.name]
        block.view_of(tensor).copy_(part.to(tensor.device).view(block.shape))


class SliceGatherer:
    """Gathers the slices of all ranks into full tensors on rank 0."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        slices: Sequence[TensorSlice],
        device: torch.device,
    ) -> None:
        """Send the list of slices to rank 0. Collective over all ranks.

        Args:
            shapes: the shapes of the full tensors, by name.
            slices: the slices that this rank sends; every element is sent by exactly one rank.
            device: the device of the tensors that the process group exchanges.
        """
        self._shapes = shapes
        names = {name: number for number, name in enumerate(shapes)}
        rows = [_encoded(names[block.name], block) for block in slices]
        here = torch.tensor(rows, dtype=torch.int64, device=device).view(
            -1, 1 + _MOST_DIMENSIONS * 2
        )
        counts = [
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())
        ]
        dist.all_gather(counts, torch.tensor([len(here)], device=device))
        most = max(int(count) for count in counts)
        padded = torch.nn.functional.pad(here, (0, 0, 0, most - len(here)))
        of_ranks = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(of_ranks, padded)
        self._slices = [
            [self._decoded(list(shapes), row) for row in rows[: int(count)].tolist()]
            for rows, count in zip(of_ranks, counts, strict=True)
        ]

    def join(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return full tensors on the CPU on rank 0; nothing on the others.

        Args:
            parts: this rank's slices, in their order.
            dtype: the dtype to which slices are rounded before sending.
        """
        if dist.get_rank():
            for part in parts:
                dist.send(part.cpu().to(dtype).contiguous(), dst=0)
            return {}
        whole = {name: torch.empty(shape, dtype=dtype) for name, shape in self._shapes.items()}
        put(whole, self._slices[0], parts)
        for rank, slices in enumerate(self._slices[1:], start=1):
            put(whole, slices, (_received(block, rank, dtype) for block in slices))
        return whole

    def _decoded(self, names: Sequence[str], row: Sequence[int]) -> TensorSlice:
        name = names[row[0]]
        starts, stops = row[1::2], row[2::2]
        bounds = zip(starts, stops, strict=True)
        return TensorSlice(name, tuple(bounds)[: len(self._shapes[name])])


def _encoded(name: int, block: TensorSlice) -> list[int]:
    bounds = [index for bound in block.bounds for index in bound]
    return [name, *bounds, *[0] * (_MOST_DIMENSIONS * 2 - len(bounds))]


def _received(block: TensorSlice, rank: int, dtype: torch.dtype) -> Tensor:
    part = torch.empty(block.shape, dtype=dtype)
    dist.recv(part, src=rank)
    return part
