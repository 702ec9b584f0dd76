"""Slices of full tensors that ranks hold, and the tensors that they form.

Full tensors have the Hugging Face model's names and shapes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The values of a slice."""

    block: TensorSlice
    whole: tuple[int, ...]
    """Shape of the full tensor."""
    values: Tensor
    """On the CPU, with the shape of the block."""


def batches(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    """Yield lists of pieces of at most `max_bytes`, or of one piece that is larger."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.values.nbytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.values.nbytes
    if batch:
        yield batch


def joined(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Copy pieces into the full tensors, on the CPU.

    Args:
        pieces: every element of each tensor once, in any order.

    Raises:
        ValueError: elements are missing, or there are too many.
    """
    whole: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for piece in pieces:
        name = piece.block.name
        if name not in whole:
            whole[name] = torch.empty(piece.whole, dtype=piece.values.dtype)
            missing[name] = prod(piece.whole)
        piece.block.view_of(whole[name]).copy_(piece.values)
        missing[name] -= piece.values.numel()
    if wrong := {name: count for name, count in missing.items() if count}:
        raise ValueError(f"the pieces of tensors do not add up; elements that are missing: {wrong}")
    return whole
