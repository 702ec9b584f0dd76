"""Full tensors from the slices of several ranks."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tinkercloud_worker.engine.tensor_slices import (
    Piece,
    TensorSlice,
    batches,
    full_slice,
    joined,
)


def pieces_of(name: str, tensor: Tensor, cuts: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """Yield the blocks between the cuts of each dimension."""
    blocks = [full_slice(name, tensor.shape)]
    for dim, (at, size) in enumerate(zip(cuts, tensor.shape, strict=True)):
        bounds = list(pairwise(sorted({0, size, *(min(each, size) for each in at)})))
        blocks = [
            TensorSlice(name, (*block.bounds[:dim], bound, *block.bounds[dim + 1 :]))
            for block in blocks
            for bound in bounds
        ]
    for block in blocks:
        yield Piece(block, tuple(tensor.shape), block.view_of(tensor))


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6))), max_size=3), st.data())
def test_slices_of_any_size_in_any_order_give_the_tensor_back(
    dims: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    tensor = torch.randn([size for size, _ in dims])
    pieces = list(pieces_of("w", tensor, [cuts for _, cuts in dims]))

    whole = joined(data.draw(st.permutations(pieces)))

    assert whole.keys() == {"w"}
    assert torch.equal(whole["w"], tensor)


def test_a_tensor_of_which_a_slice_is_missing_or_given_twice_is_an_error() -> None:
    pieces = list(pieces_of("w", torch.ones(4, 3), [[1], []]))

    with pytest.raises(ValueError, match=r"do not add up; elements that are missing: \{'w': 9\}"):
        joined(pieces[:1])
    with pytest.raises(ValueError, match=r"missing: \{'w': -3\}"):
        joined([*pieces, pieces[0]])


def test_joined_tensors_are_copies() -> None:
    tensor = torch.zeros(3)
    whole = joined(pieces_of("w", tensor, [[]]))

    tensor += 1

    assert torch.equal(whole["w"], torch.zeros(3))


def test_pieces_come_in_batches_of_a_size_and_a_larger_piece_by_itself() -> None:
    sizes = [1, 2, 1, 9, 1]
    pieces = [next(pieces_of(f"{i}", torch.zeros(n), [[]])) for i, n in enumerate(sizes)]

    got = [[piece.values.numel() for piece in each] for each in batches(pieces, max_bytes=12)]

    assert got == [[1, 2], [1], [9], [1]]
    assert list(batches([], max_bytes=12)) == []
