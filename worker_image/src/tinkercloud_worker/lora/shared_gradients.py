"""Gradients of adapters whose deltas a half-precision pass has computed as one product.

The low-rank intermediates of all adapters are then the columns of one matrix. The gradient of an
adapter needs its own positions and columns only. Two products for each adapter and layer would keep
a GPU waiting for the host, so adapters of similar sizes are multiplied as a stack, in which those
of fewer positions or a lower rank are padded.

Shape legend: N positions of a pass, R sum of all ranks, G adapters of a stack, L most positions of
one of them, r their highest rank.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tinkercloud_worker.device.matmul import bmm_float32, matmul_float32
from tinkercloud_worker.lora.groups import groups_of


class SharedGradients:
    """Computes the gradients of adapters with given positions and ranks."""

    def __init__(self, adapters: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """Prepare the indexes.

        Args:
            adapters: first position, last position + 1, and rank of each adapter.
            device: where the pass is computed.
        """
        ends = accumulate((rank for *_, rank in adapters), initial=0)
        self._rows = [slice(start, stop) for start, stop, _ in adapters]
        self._columns = [
            slice(end, end + rank) for end, (*_, rank) in zip(ends, adapters, strict=False)
        ]
        # Padding repeats a position, and an adapter without positions has none.
        stacked = [index for index, (start, stop, _) in enumerate(adapters) if stop > start]
        sizes = tuple((adapters[i][1] - adapters[i][0], adapters[i][2]) for i in stacked)
        groups = [tuple(stacked[i] for i in group) for group in groups_of(sizes)]
        self._stacks = [
            _Stack(members, [adapters[i] for i in members], self._columns, device)
            for members in groups
            if len(members) > 1
        ]
        together = {index for stack in self._stacks for index in stack.members}
        self._single = [index for index in range(len(adapters)) if index not in together]

    def compute(self, dy_N: Tensor, x_N: Tensor, du_NR: Tensor, u_NR: Tensor) -> list[Tensor]:
        """Return the gradients of A [rank, in] of all adapters, then those of B [out, rank].

        Args:
            dy_N: [N, out], the gradient of the layer's output.
            x_N: [N, in], the input of the layer.
            du_NR: the gradient of the low-rank intermediate.
            u_NR: the low-rank intermediate.

        Returns:
            Float32 tensors; the arguments have one dtype, which may be half-precision.
        """
        of_a: dict[int, Tensor] = {}
        of_b: dict[int, Tensor] = {}
        for index in self._single:
            rows, columns = self._rows[index], self._columns[index]
            of_a[index] = matmul_float32(du_NR[rows, columns].T, x_N[rows])
            of_b[index] = matmul_float32(dy_N[rows].T, u_NR[rows, columns])
        for stack in self._stacks:
            a_Gri = bmm_float32(stack.own(du_NR).mT, stack.rows_of(x_N))
            b_Gor = bmm_float32(stack.rows_of(dy_N).mT, stack.own(u_NR))
            for place, index in enumerate(stack.members):
                rank = stack.ranks[place]
                of_a[index], of_b[index] = a_Gri[place, :rank], b_Gor[place, :, :rank]
        count = range(len(self._rows))
        return [of_a[index] for index in count] + [of_b[index] for index in count]


class _Stack:
    """Adapters that are multiplied together."""

    def __init__(
        self,
        members: Sequence[int],
        adapters: Sequence[tuple[int, int, int]],
        columns: Sequence[slice],
        device: torch.device,
    ) -> None:
        self.members = members
        self.ranks = [rank for *_, rank in adapters]
        lengths = [stop - start for start, stop, _ in adapters]
        most, highest = max(lengths), max(self.ranks)
        positions = torch.arange(most)
        rows_GL = torch.stack(
            [
                torch.where(positions < length, positions, 0) + start
                for (start, *_), length in zip(adapters, lengths, strict=True)
            ]
        )
        ranks = torch.arange(highest)
        columns_Gr = torch.stack(
            [
                torch.where(ranks < rank, ranks, 0) + columns[index].start
                for index, rank in zip(members, self.ranks, strict=True)
            ]
        )
        start, count = adapters[0][0], len(members) * most
        is_regular = torch.equal(rows_GL.flatten(), torch.arange(start, start + count))
        self._whole = slice(start, start + count) if is_regular else None
        self._rows_GL = rows_GL.to(device)
        # Places in the flattened intermediates: one index is read faster than two.
        places_GLr = rows_GL[:, :, None] * columns[-1].stop + columns_Gr[:, None, :]
        self._places_GLr = places_GLr.to(device)
        self._is_own_GL1: Tensor | None = None
        if min(lengths) < most:
            is_own = positions < torch.tensor(lengths)[:, None]
            self._is_own_GL1 = is_own[:, :, None].to(device)

    def rows_of(self, values_N: Tensor) -> Tensor:
        """Return the positions of all members [G, L, features]; missing ones repeat another."""
        shape = (*self._rows_GL.shape, values_N.shape[1])
        if self._whole is not None:
            return values_N[self._whole].view(shape)
        return values_N.index_select(0, self._rows_GL.flatten()).view(shape)

    def own(self, values_NR: Tensor) -> Tensor:
        """Return the intermediates of all members [G, L, r]; those of missing positions are 0."""
        own = values_NR.flatten().index_select(0, self._places_GLr.flatten())
        own_GLr = own.view(self._places_GLr.shape)
        return own_GLr if self._is_own_GL1 is None else own_GLr * self._is_own_GL1
