"""LoRA deltas that adapters add to a linear layer with a frozen weight, in float32.

A and B are always float32. Over a half-precision base they are rounded to its dtype and multiplied
in it (`stacks`).

Shape legend: N positions, r rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.lora.groups import AdapterGroup, groups_of


@dataclass(frozen=True, slots=True, eq=False)
class LoraDelta:
    """An adapter's delta for a layer: scale * (x @ a^T) @ b^T."""

    a: Tensor
    """float32 [r, in]; for experts [E, r, in] or [1, r, in]."""
    b: Tensor
    """float32 [out, r]; for experts [E, out, r] or [1, out, r]."""
    scale: float | Tensor
    """A tensor [N, r] scales each position and rank separately; the delta is then not
    differentiable."""


_LARGEST_SHARED = 1e4
"""Far above the values of trained adapters, and far below overflow."""


def can_share_batch(weights: Iterable[Tensor]) -> bool:
    """Whether adapters with these weights can share a product with other adapters.

    In a shared product each adapter is multiplied by zero at the positions of the others, and zero
    times a non-finite value would be NaN.
    """
    largest = torch.stack([tensor.detach().abs().amax() for tensor in weights])
    return bool((largest <= _LARGEST_SHARED).all())


DeltaSpans = Sequence[tuple[slice, LoraDelta | None]]
"""Consecutive positions that cover a pass, each with its delta."""


def add_deltas(x: Tensor, y: Tensor, parts: DeltaSpans) -> Tensor:
    """Return a float32 layer's product plus the deltas of its input.

    Differentiable with respect to x and y. Gradients of A and B accumulate in their `.grad`, if
    they have one, each from the adapter's own positions only.

    Args:
        x: [..., in], the input of the layer.
        y: [..., out], the output of the layer.
        parts: spans of the flattened positions; at least one has a delta, and a delta with a tensor
            scale must be the only one.
    """
    return _sum(x.flatten(0, -2), y.flatten(0, -2), parts).view_as(y)


def adapted_product(x: Tensor, layer: FrozenLinear, parts: DeltaSpans) -> Tensor:
    """Return a frozen float32 layer's product [..., out] plus the deltas of its input.

    It does what `add_deltas` does in fewer passes over memory.

    Args:
        x: [..., in], the input of the layer.
        layer: the layer.
        parts: as in `add_deltas`.
    """
    return _sum(x.flatten(0, -2), layer, parts).view(*x.shape[:-1], -1)


def _sum(x_N: Tensor, to: Tensor | FrozenLinear, parts: DeltaSpans) -> Tensor:
    """Return the sum of deltas and a product [N, out], or that of a layer."""
    deltas = [(rows, delta) for rows, delta in parts if delta]
    (_, first), *_ = deltas
    if isinstance(first.scale, Tensor):
        y_N = to if isinstance(to, Tensor) else to(x_N)
        return torch.addmm(y_N, (x_N @ first.a.T) * first.scale, first.b.T)
    masters = [delta.a for _, delta in deltas] + [delta.b for _, delta in deltas]
    total: Tensor = _AddDeltas.apply(  # type: ignore[no-untyped-call]
        x_N,
        to,
        # One trained tensor makes the sum differentiable: each would be a node of the graph.
        next((master for master in masters if master.requires_grad), masters[0]),
        [rows for rows, _ in deltas],
        [delta.scale for _, delta in deltas],
        masters,
    )
    return total


class _AddDeltas(torch.autograd.Function):
    """One graph node for all adapters, where autograd would need a dozen for each."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any,  # noqa: ANN401 - torch's
        x_N: Tensor,
        to: Tensor | FrozenLinear,
        _anchor: Tensor,
        places: Sequence[slice],
        scales: Sequence[float],
        masters: Sequence[Tensor],
    ) -> Tensor:
        total_N = to.clone() if isinstance(to, Tensor) else to.product(x_N)
        groups = _groups(places, scales, masters)
        ctx.save_for_backward(x_N, *[group.add_to(total_N, x_N) for group in groups])
        ctx.groups, ctx.layer = groups, None if isinstance(to, Tensor) else to
        return total_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, *middles = ctx.saved_tensors
        dx_N = None
        if ctx.needs_input_grad[0]:
            dx_N = ctx.layer.gradient(dy_N) if ctx.layer else torch.zeros_like(x_N)
        for group, u in zip(ctx.groups, middles, strict=True):
            group.backward(dy_N, x_N, u, dx_N)
        return dx_N, None if ctx.layer else dy_N, None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _SingleAdapter:
    """An adapter that is multiplied by itself, as if it were alone in the pass."""

    rows: slice
    scale: float
    a: Tensor
    b: Tensor

    def add_to(self, total_N: Tensor, x_N: Tensor) -> Tensor:
        """See `AdapterGroup.add_to`; the intermediate [rows, r] is not scaled."""
        u_Nr = x_N[self.rows] @ self.a.T
        total_N[self.rows].addmm_(u_Nr, self.b.T, alpha=self.scale)
        return u_Nr

    def backward(self, dy_N: Tensor, x_N: Tensor, u_Nr: Tensor, dx_N: Tensor | None) -> None:
        """See `AdapterGroup.backward`."""
        rows, a, b = self.rows, self.a, self.b
        du_Nr = dy_N[rows] @ b
        if a.grad is not None:
            a.grad.addmm_(du_Nr.T, x_N[rows], alpha=self.scale)
        if b.grad is not None:
            b.grad.addmm_(dy_N[rows].T, u_Nr, alpha=self.scale)
        if dx_N is not None:
            dx_N[rows].addmm_(du_Nr, a, alpha=self.scale)


def _groups(
    places: Sequence[slice], scales: Sequence[float], masters: Sequence[Tensor]
) -> Sequence[_SingleAdapter | AdapterGroup]:
    """Return the products to compute; a single adapter computes the same bits as ever."""
    count = len(places)
    each = list(zip(places, scales, masters[:count], masters[count:], strict=True))
    if count == 1:
        return [_SingleAdapter(*each[0])]
    sizes = tuple((rows.stop - rows.start, len(a)) for rows, _, a, _ in each)
    return [
        AdapterGroup(*zip(*[each[member] for member in members], strict=True))
        if len(members) > 1
        else _SingleAdapter(*each[members[0]])
        for members in groups_of(sizes)
    ]
