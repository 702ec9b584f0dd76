"""LoRA deltas that adapters add to a linear layer with a frozen weight.

A and B are always float32. Over a half-precision base they are rounded to its dtype and multiplied
in it: the input of the layer is then saved for the backward pass once, and not also in float32,
which would dominate the saved activations. Gradients of A and B accumulate in float32. There the
layer and its deltas are one autograd function, so that deltas are added into the layer's own
product, forward and backward, without another tensor.

Shape legend: N positions, r rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinkercloud_worker.lora.groups import AdapterGroup, groups_of
from tinkercloud_worker.lora.shared_gradients import SharedGradients


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


_Adapters = tuple[tuple[int, int, int, float | Tensor], ...]
"""First position, last position + 1, rank and scale of each adapter of a layer."""
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
    x_N, y_N = x.flatten(0, -2), y.flatten(0, -2)
    deltas = [(rows, delta) for rows, delta in parts if delta]
    (_, first), *_ = deltas
    if isinstance(first.scale, Tensor):
        return torch.addmm(y_N, (x_N @ first.a.T) * first.scale, first.b.T).view_as(y)
    masters = [delta.a for _, delta in deltas] + [delta.b for _, delta in deltas]
    total: Tensor = _AddDeltas.apply(  # type: ignore[no-untyped-call]
        x_N, y_N, [rows for rows, _ in deltas], [delta.scale for _, delta in deltas], *masters
    )
    return total.view_as(y)


class _AddDeltas(torch.autograd.Function):
    """One graph node for all adapters, where autograd would need a dozen for each."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x_N: Tensor,
        y_N: Tensor,
        places: Sequence[slice],
        scales: Sequence[float],
        *masters: Tensor,
    ) -> Tensor:
        total_N = y_N.clone()
        groups = _groups(places, scales, masters)
        ctx.save_for_backward(x_N, *[group.add_to(total_N, x_N) for group in groups])
        ctx.groups, ctx.count = groups, len(masters)
        return total_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, *middles = ctx.saved_tensors
        dx_N = torch.zeros_like(x_N) if ctx.needs_input_grad[0] else None
        for group, u in zip(ctx.groups, middles, strict=True):
            group.backward(dy_N, x_N, u, dx_N)
        return dx_N, dy_N, None, None, *(None for _ in range(ctx.count))


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


class LoraProducts:
    """The adapted layers of a pass over a half-precision base.

    Deltas of several adapters are computed as one whose rank is the sum of their ranks; a factor
    for each position and rank, which is 0 at the positions of other adapters, separates them. A
    forward pass therefore launches as many kernels for many adapters as for one, and requires
    adapters for which `can_share_batch` is true. The gradient of an adapter sums over its own
    positions only.
    """

    def __init__(self) -> None:
        self._shared: dict[_Adapters, tuple[Tensor | float, SharedGradients]] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: DeltaSpans) -> Tensor:
        """Return the product [..., out] of a layer plus the deltas of its input.

        Differentiable with respect to x. Gradients of A and B accumulate in their `.grad`, if they
        have one.

        Args:
            x: [..., in], of the weight's dtype.
            weight: [out, in].
            bias: [out], or None.
            parts: spans of the flattened positions.
        """
        x_N = x.flatten(0, -2)
        deltas = [(rows, delta) for rows, delta in parts if delta]
        masters = [delta.a for _, delta in deltas] + [delta.b for _, delta in deltas]
        factor, gradients = self._prepared(x_N, deltas)
        product: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            x_N, weight, bias, factor, gradients, *masters
        )
        return product.view(*x.shape[:-1], -1)

    def _prepared(
        self, x_N: Tensor, deltas: Sequence[tuple[slice, LoraDelta]]
    ) -> tuple[Tensor | float, SharedGradients]:
        """Return the factor of the low-rank intermediate [N, r], and what computes gradients.

        The layers of a pass share both.
        """
        key = tuple(
            (*rows.indices(len(x_N))[:2], delta.a.shape[0], delta.scale) for rows, delta in deltas
        )
        if key not in self._shared:
            gradients = SharedGradients([adapter[:3] for adapter in key], x_N.device)
            self._shared[key] = (_factor(x_N, key), gradients)
        return self._shared[key]


def _factor(x_N: Tensor, key: _Adapters) -> Tensor | float:
    (start, stop, _, scale), *others = key
    if not others and (start, stop) == (0, len(x_N)):
        return scale
    blocks = []
    for start, stop, rank, scale in key:
        block_Nr = x_N.new_zeros(len(x_N), rank)
        block_Nr[start:stop] = scale
        blocks.append(block_Nr)
    return torch.cat(blocks, 1)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any,  # noqa: ANN401 - torch's
        x_N: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor: Tensor | float,
        gradients: SharedGradients,
        *masters: Tensor,
    ) -> Tensor:
        count = len(masters) // 2
        a = _joined(masters[:count], 0).to(x_N.dtype)
        b = _joined(masters[count:], 1).to(x_N.dtype)
        u_Nr = _times(x_N @ a.T, factor)
        ctx.save_for_backward(x_N, weight, a, b, u_Nr)
        ctx.factor, ctx.gradients, ctx.masters = factor, gradients, masters
        return nn.functional.linear(x_N, weight, bias).addmm_(u_Nr, b.T)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, weight, a, b, u_Nr = ctx.saved_tensors
        du_Nr = _times(dy_N @ b, ctx.factor)
        parts = ctx.gradients.compute(dy_N, x_N, du_Nr, u_Nr)
        trained = [
            (m.grad, part) for m, part in zip(ctx.masters, parts, strict=True) if m.grad is not None
        ]
        if trained:
            # Accumulated here, instead of by one graph node each.
            torch._foreach_add_([grad for grad, _ in trained], [part for _, part in trained])
        dx_N = (dy_N @ weight).addmm_(du_Nr, a) if ctx.needs_input_grad[0] else None
        return dx_N, None, None, None, None, *(None for _ in ctx.masters)


def _joined(masters: Sequence[Tensor], dim: int) -> Tensor:
    return masters[0] if len(masters) == 1 else torch.cat(list(masters), dim)


def _times(values_Nr: Tensor, factor: Tensor | float) -> Tensor:
    # Most adapters have scale 1, and small models are bound by kernel launches.
    return values_Nr if isinstance(factor, float) and factor == 1.0 else values_Nr.mul_(factor)
