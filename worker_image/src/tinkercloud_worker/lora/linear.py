"""The low-rank terms that adapters add to a linear layer whose own weight is frozen.

A and B are float32, whatever the base's type. Over a base of lower precision they are rounded to it
and the products are the base's kind of products: what enters the layer is then kept for the
backward pass as it is, and not a second time in float32, which would be most of what a layer keeps.
Gradients of A and B are added up in float32. There the layer and its terms are one function, so
that terms are added into the layer's own product, forward and backward, instead of beside it.

Shape legend: N positions, r rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinkercloud_worker.device.matmul import matmul_float32


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An adapter's part of a layer: scale * (x @ a^T) @ b^T."""

    a: Tensor
    """float32 [r, in]; of experts [E, r, in] or [1, r, in]."""
    b: Tensor
    """float32 [out, r]; of experts [E, out, r] or [1, out, r]."""
    scale: float | Tensor
    """A tensor [N, r] says it of each position and rank; then nothing is differentiable."""


_LARGEST_BESIDE_OTHERS = 1e4
"""Far above what adapters that train hold, and far below what overflows."""


def may_be_beside_others(weights: Iterable[Tensor]) -> bool:
    """Whether adapters, whose elements these are, can be in one product with others'.

    There each is multiplied with zero at the others' positions: zero times what is not finite, or
    overflows, would be no number.
    """
    largest = torch.stack([tensor.detach().abs().amax() for tensor in weights])
    return bool((largest <= _LARGEST_BESIDE_OTHERS).all())


TermSpans = Sequence[tuple[slice, Term | None]]
"""Consecutive positions, all of them between them, and the term that is theirs."""


def add_terms(x: Tensor, y: Tensor, parts: TermSpans) -> Tensor:
    """Return a float32 layer's product with the terms of its input.

    Differentiable with respect to x and y. Gradients of the terms' A and B are added to their
    `.grad`, if they have one: those of an adapter from its own positions alone.

    Args:
        x: [..., in], what enters the layer.
        y: [..., out], what comes out of it.
        parts: of the positions, flattened; at least one has a term, and one with a tensor for its
            scale is alone.
    """
    x_N, y_N = x.flatten(0, -2), y.flatten(0, -2)
    terms = [(rows, term) for rows, term in parts if term]
    (_, first), *_ = terms
    if isinstance(first.scale, Tensor):
        return torch.addmm(y_N, (x_N @ first.a.T) * first.scale, first.b.T).view_as(y)
    masters = [term.a for _, term in terms] + [term.b for _, term in terms]
    total: Tensor = _AddedTerms.apply(  # type: ignore[no-untyped-call]
        x_N, y_N, [rows for rows, _ in terms], [term.scale for _, term in terms], *masters
    )
    return total.view_as(y)


class _AddedTerms(torch.autograd.Function):
    """One node of the graph for all adapters, where autograd's own would be a dozen for each."""

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
        middles = []
        for rows, scale, a, b in _each(places, scales, masters):
            u_Nr = x_N[rows] @ a.T
            total_N[rows].addmm_(u_Nr, b.T, alpha=scale)
            middles.append(u_Nr)
        ctx.save_for_backward(x_N, *middles)
        ctx.places, ctx.scales, ctx.masters = places, scales, masters
        return total_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, *middles = ctx.saved_tensors
        dx_N = torch.zeros_like(x_N) if ctx.needs_input_grad[0] else None
        for u_Nr, (rows, scale, a, b) in zip(
            middles, _each(ctx.places, ctx.scales, ctx.masters), strict=True
        ):
            du_Nr = dy_N[rows] @ b
            if a.grad is not None:
                a.grad.addmm_(du_Nr.T, x_N[rows], alpha=scale)
            if b.grad is not None:
                b.grad.addmm_(dy_N[rows].T, u_Nr, alpha=scale)
            if dx_N is not None:
                dx_N[rows].addmm_(du_Nr, a, alpha=scale)
        return dx_N, dy_N, None, None, *(None for _ in ctx.masters)


def _each(
    places: Sequence[slice], scales: Sequence[float], masters: Sequence[Tensor]
) -> Iterable[tuple[slice, float, Tensor, Tensor]]:
    """Return each adapter's positions, scale, A and B."""
    count = len(places)
    return zip(places, scales, masters[:count], masters[count:], strict=True)


class LowRankTerms:
    """The terms of a pass over a base of lower precision, one layer's after another.

    Terms of several adapters are computed as one whose rank is the sum of theirs: a factor for each
    position and rank, which is 0 where the position is not of the adapter, keeps them apart. So a
    forward pass has as many kernels with many adapters as with one, and takes such as
    `may_be_beside_others`. Gradients are each summed over the adapter's own positions
    alone, whatever the others' hold.
    """

    def __init__(self) -> None:
        self._factors: dict[tuple[tuple[int, int, int, float | Tensor], ...], Tensor] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: TermSpans) -> Tensor:
        """Return the product [..., out] of a layer, with the terms of its input.

        Differentiable with respect to x. Gradients of the terms' A and B are added to their
        `.grad`, if they have one.

        Args:
            x: [..., in], of the weight's type.
            weight: [out, in].
            bias: [out], or None.
            parts: of the positions, flattened.
        """
        x_N = x.flatten(0, -2)
        terms = [(rows, term) for rows, term in parts if term]
        factor = self._factor(x_N, terms)
        masters = [term.a for _, term in terms] + [term.b for _, term in terms]
        places = [rows for rows, _ in terms]
        product: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            x_N, weight, bias, factor, places, *masters
        )
        return product.view(*x.shape[:-1], -1)

    def _factor(self, x_N: Tensor, terms: Sequence[tuple[slice, Term]]) -> Tensor | float:
        """Return what the middle [N, r] of the product is multiplied with."""
        (rows, term), *others = terms
        if not others and rows.indices(len(x_N)) == (0, len(x_N), 1):
            return term.scale
        key = tuple((*rows.indices(len(x_N))[:2], len(term.a), term.scale) for rows, term in terms)
        if key not in self._factors:
            blocks = []
            for start, stop, rank, scale in key:
                block_Nr = x_N.new_zeros(len(x_N), rank)
                block_Nr[start:stop] = scale
                blocks.append(block_Nr)
            self._factors[key] = torch.cat(blocks, 1)
        return self._factors[key]


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any,  # noqa: ANN401 - torch's
        x_N: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor: Tensor | float,
        places: Sequence[slice],
        *masters: Tensor,
    ) -> Tensor:
        count = len(masters) // 2
        a = _joined(masters[:count], 0).to(x_N.dtype)
        b = _joined(masters[count:], 1).to(x_N.dtype)
        u_Nr = _times(x_N @ a.T, factor)
        ctx.save_for_backward(x_N, weight, a, b, u_Nr)
        ctx.factor, ctx.places, ctx.masters = factor, places, masters
        return nn.functional.linear(x_N, weight, bias).addmm_(u_Nr, b.T)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, weight, a, b, u_Nr = ctx.saved_tensors
        du_Nr = _times(dy_N @ b, ctx.factor)
        ranks = [len(master) for master in ctx.masters[: len(ctx.places)]]
        middles = list(
            zip(ctx.places, torch.split(du_Nr, ranks, 1), torch.split(u_Nr, ranks, 1), strict=True)
        )
        parts = [matmul_float32(du_Nr[rows].T, x_N[rows]) for rows, du_Nr, _ in middles]
        parts += [matmul_float32(dy_N[rows].T, u_Nr[rows]) for rows, _, u_Nr in middles]
        trained = [
            (m.grad, part) for m, part in zip(ctx.masters, parts, strict=True) if m.grad is not None
        ]
        if trained:
            # At once, instead of by a node of the graph for each.
            torch._foreach_add_([grad for grad, _ in trained], [part for _, part in trained])
        dx_N = (dy_N @ weight).addmm_(du_Nr, a) if ctx.needs_input_grad[0] else None
        return dx_N, None, None, None, None, *(None for _ in ctx.masters)


def _joined(masters: Sequence[Tensor], dim: int) -> Tensor:
    return masters[0] if len(masters) == 1 else torch.cat(list(masters), dim)


def _times(values_Nr: Tensor, factor: Tensor | float) -> Tensor:
    # Most adapters' scale is 1, and small models wait for each kernel to be launched.
    return values_Nr if isinstance(factor, float) and factor == 1.0 else values_Nr.mul_(factor)
