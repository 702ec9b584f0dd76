"""What ranks hold of whole tensors, and how rank 0 puts those together.

Whole tensors have the Hugging Face model's names and shapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a whole tensor."""

    name: str
    """The tensor's."""
    bounds: tuple[tuple[int, int], ...]
    """Of each dimension, the first index of the block and the one behind its last."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the block's shape."""
        return tuple(stop - start for start, stop in self.bounds)

    def chunk(self, number: int, of: int, dim: int) -> "Piece":
        """Return one of several equal parts of it along a dimension."""
        bounds = list(self.bounds)
        start, stop = bounds[dim]
        size = (stop - start) // of
        bounds[dim] = (start + number * size, start + (number + 1) * size)
        return Piece(self.name, tuple(bounds))

    def of(self, tensor: Tensor) -> Tensor:
        """Return it as a view of the whole tensor."""
        return tensor[tuple(slice(start, stop) for start, stop in self.bounds)]


def all_of(name: str, shape: Sequence[int]) -> Piece:
    """Return a whole tensor as a piece of itself."""
    return Piece(name, tuple((0, size) for size in shape))


def put(whole: Mapping[str, Tensor], pieces: Sequence[Piece], parts: Iterable[Tensor]) -> None:
    """Write parts of tensors, of any shapes that have their elements, where they belong.

    They are rounded, if they must be, where that is: a GPU would need memory for it.
    """
    for piece, part in zip(pieces, parts, strict=True):
        tensor = whole[piece.name]
        piece.of(tensor).copy_(part.to(tensor.device).view(piece.shape))


class Holdings:
    """Which rank hands which pieces to rank 0."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Piece], device: torch.device
    ) -> None:
        """Tell rank 0. All ranks do so together.

        Args:
            shapes: of the whole tensors, by name.
            pieces: that this rank hands over; every element is in one rank's.
            device: that the ranks' process group talks of.
        """
        self._shapes = shapes
        names = {name: number for number, name in enumerate(shapes)}
        rows = [_encoded(names[piece.name], piece) for piece in pieces]
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
        self._pieces = [
            [self._decoded(list(shapes), row) for row in rows[: int(count)].tolist()]
            for rows, count in zip(of_ranks, counts, strict=True)
        ]

    def join(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return the whole tensors on the CPU, at rank 0; nothing at the others.

        Args:
            parts: what this rank's pieces are, in their order.
            dtype: to round them to, before they are sent.
        """
        if dist.get_rank():
            for part in parts:
                dist.send(part.cpu().to(dtype).contiguous(), dst=0)
            return {}
        whole = {name: torch.empty(shape, dtype=dtype) for name, shape in self._shapes.items()}
        put(whole, self._pieces[0], parts)
        for rank, pieces in enumerate(self._pieces[1:], start=1):
            put(whole, pieces, (_received(piece, rank, dtype) for piece in pieces))
        return whole

    def _decoded(self, names: Sequence[str], row: Sequence[int]) -> Piece:
        name = names[row[0]]
        starts, stops = row[1::2], row[2::2]
        bounds = zip(starts, stops, strict=True)
        return Piece(name, tuple(bounds)[: len(self._shapes[name])])


def _encoded(name: int, piece: Piece) -> list[int]:
    bounds = [index for bound in piece.bounds for index in bound]
    return [name, *bounds, *[0] * (_MOST_DIMENSIONS * 2 - len(bounds))]


def _received(piece: Piece, rank: int, dtype: torch.dtype) -> Tensor:
    part = torch.empty(piece.shape, dtype=dtype)
    dist.recv(part, src=rank)
    return part
