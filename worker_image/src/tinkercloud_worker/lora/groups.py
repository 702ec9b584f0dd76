"""Low-rank products of several adapters in one pass, as batched products.

A product with 16 positions takes hardly less time than one with 128, so adapters of small requests
are multiplied together: their inputs, A and B are stacked, those of fewer positions or a lower rank
padded with zeros. The products of a stack are independent, so a non-finite value of one adapter
stays there.

Shape legend: N positions of a pass, G adapters of a group, L most positions of one of them, r their
highest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

_MOST_PADDING = 2
"""An adapter joins a group unless the group would then compute this many times its real values."""


@lru_cache(maxsize=64)
def groups_of(sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Return which adapters are multiplied together, in the order of their positions.

    Each is in one group. Groups contain adapters of similar sizes only, so that padding costs less
    than what is saved.

    Args:
        sizes: positions and rank of each adapter.

    Returns:
        The indices of each group's members.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
        if groups and _is_dense([sizes[i] for i in (*groups[-1], index)]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _is_dense(sizes: Sequence[tuple[int, int]]) -> bool:
    most_positions = max(positions for positions, _ in sizes)
    highest_rank = max(rank for _, rank in sizes)
    values = sum(positions * rank for positions, rank in sizes)
    return len(sizes) * most_positions * highest_rank < _MOST_PADDING * values


@dataclass(frozen=True, slots=True, eq=False)
class AdapterGroup:
    """Adapters whose deltas of one layer are computed together. All tensors are float32."""

    places: Sequence[slice]
    """Positions of each adapter."""
    scales: Sequence[float]
    a: Sequence[Tensor]
    """[rank, in] of each adapter."""
    b: Sequence[Tensor]
    """[out, rank] of each adapter."""

    def add_to(self, total_N: Tensor, x_N: Tensor) -> Tensor:
        """Add the deltas of an input to its positions of a layer's output.

        Args:
            total_N: [N, out], changed in place.
            x_N: [N, in].

        Returns:
            The scaled low-rank intermediate [G, L, r], which `backward` needs.
        """
        u_GLr = self._scale_(torch.bmm(self._gathered(x_N), self._stacked_a().mT))
        self._scatter(total_N, u_GLr, self._stacked_b().mT)
        return u_GLr

    def backward(self, dy_N: Tensor, x_N: Tensor, u_GLr: Tensor, dx_N: Tensor | None) -> None:
        """Accumulate the gradients of A and B in their `.grad`, and of the input in a tensor.

        Args:
            dy_N: [N, out], the gradient of the layer's output.
            x_N: [N, in], the input of `add_to`.
            u_GLr: the result of `add_to`.
            dx_N: [N, in], changed in place; None if no gradient of the input is needed.
        """
        dy_GL = self._gathered(dy_N)
        du_GLr = self._scale_(torch.bmm(dy_GL, self._stacked_b()))
        _accumulate(self.a, torch.bmm(du_GLr.mT, self._gathered(x_N)))
        _accumulate(self.b, torch.bmm(dy_GL.mT, u_GLr))
        if dx_N is not None:
            self._scatter(dx_N, du_GLr, self._stacked_a())

    def _scale_(self, values_GLr: Tensor) -> Tensor:
        """Multiply the intermediates of each member by its scale, in place."""
        if len(set(self.scales)) == 1:
            return values_GLr.mul_(self.scales[0])
        return values_GLr.mul_(values_GLr.new_tensor(self.scales)[:, None, None])

    def _stacked_a(self) -> Tensor:
        """Return A of all members [G, r, in]; missing ranks are zero."""
        return _stacked(self.a)

    def _stacked_b(self) -> Tensor:
        """Return B of all members [G, out, r]; missing ranks are zero."""
        if len({tensor.shape for tensor in self.b}) == 1:
            return torch.stack(list(self.b))
        return _stacked([tensor.T for tensor in self.b]).mT

    def _gathered(self, values_N: Tensor) -> Tensor:
        """Return the rows of all members [G, L, features]; missing rows are zero."""
        whole = self._whole(values_N)
        return _stacked([values_N[rows] for rows in self.places]) if whole is None else whole

    def _scatter(self, total_N: Tensor, left_GLr: Tensor, right: Tensor) -> None:
        """Add a product [G, L, features] to the members' rows."""
        whole = self._whole(total_N)
        if whole is not None:
            whole.baddbmm_(left_GLr, right)
            return
        product = torch.bmm(left_GLr, right)
        torch._foreach_add_(
            [total_N[rows] for rows in self.places],
            [own[: rows.stop - rows.start] for own, rows in zip(product, self.places, strict=True)],
        )

    def _whole(self, values_N: Tensor) -> Tensor | None:
        """Return a view [G, L, features] of the members' rows; None if they are not regular."""
        first, last = self.places[0], self.places[-1]
        length = first.stop - first.start
        regular = [
            slice(start, start + length)
            for start in range(first.start, first.start + len(self.places) * length, length)
        ]
        if list(self.places) != regular:
            return None
        rows_N = values_N[first.start : last.stop]
        return rows_N.view(len(self.places), length, values_N.shape[1])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    if len({len(part) for part in parts}) == 1:
        return torch.stack(list(parts))
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _accumulate(masters: Sequence[Tensor], gradients: Tensor) -> None:
    """Add a stack of gradients, padded in the dimension of ranks, to the `.grad` of masters."""
    pairs = [
        (master.grad, own[: master.shape[0], : master.shape[1]])
        for master, own in zip(masters, gradients, strict=True)
        if master.grad is not None
    ]
    if pairs:
        torch._foreach_add_([grad for grad, _ in pairs], [own for _, own in pairs])
