"""Adapted layers over a half-precision base, many adapters with as many kernels as one.

A small pass is bound by the host, which launches its kernels. Adapters with the same layers and of
similar sizes are therefore multiplied as a stack: batched products whose factors are independent,
so a non-finite value of one adapter stays there. Their weights are rounded and stacked once for a
pass, not once for each layer.

Positions of a stack's members that follow each other with equal lengths are a view. Others are
gathered, and those of fewer positions padded by repeating their first one, whose low-rank
intermediate is set to zero. Missing ranks are zeros of A and B.

Shape legend: N positions of a pass, G adapters of a stack, L most positions of one of them, r their
highest rank, P parameters of an adapter, M positions of all members.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tinkercloud_worker.device.matmul import bmm_float32, matmul_float32
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.groups import groups_of
from tinkercloud_worker.lora.parameters import TensorLayout
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment

Halves = tuple[Tensor, Tensor]
"""A and B of a layer, in the dtype of the base."""


class LoraProducts:
    """The adapted layers of a pass over a half-precision base."""

    def __init__(self, segments: Sequence[WeightSegment]) -> None:
        """Prepare a pass.

        Args:
            segments: the weights of its positions; those without an adapter are left as they are.
                Weights with a tensor scale must be the only ones.
        """
        self._members = [
            (segment.rows, segment.weights)
            for segment in segments
            if segment.weights is not None and segment.weights.lora_scale is not None
        ]
        self._groups: list[Adapters] | None = None

    def adapts(self, target: Target) -> bool:
        """Whether any position has an adapter of a layer."""
        return any(target.a_name in weights.tensors for _, weights in self._members)

    def linear(self, target: Target, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product [..., out] of a layer plus the deltas of its input.

        Differentiable with respect to x, unless a scale is a tensor. Gradients of A and B
        accumulate in their `.grad`, if they have one, each from the adapter's own positions only.

        Args:
            target: the layer; some position has an adapter of it.
            x: [..., in], of the weight's dtype.
            weight: [out, in].
            bias: [out], or None.
        """
        x_N = x.flatten(0, -2)
        (_, first), *_ = self._members
        if isinstance(first.lora_scale, Tensor):
            product = nn.functional.linear(x_N, weight, bias)
            product = _of_concatenated(target, first, first.lora_scale, x_N, product)
        elif groups := self._groups_of(target, x_N):
            members = [
                weights.tensors[target.a_name] for each in groups for weights in each.members
            ]
            # One trained tensor makes it differentiable: each would be a node of the graph.
            anchor = next((a for a in members if a.requires_grad), members[0])
            product = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
                x_N, anchor, weight, bias, target, groups
            )
        else:
            product = nn.functional.linear(x_N, weight, bias)
        return product.view(*x.shape[:-1], -1)

    def _groups_of(self, target: Target, x_N: Tensor) -> "list[Adapters]":
        if self._groups is None:
            self._groups = adapters_of(self._members, x_N)
        return [group for group in self._groups if target.a_name in group.members[0].tensors]


def _of_concatenated(
    target: Target, weights: ActiveWeights, scale_NK: Tensor, x_N: Tensor, total_N: Tensor
) -> Tensor:
    """Add the deltas of adapters whose ranks are concatenated (`torch_sampler.lora_slots`)."""
    a, b = (weights.tensors[name].to(x_N.dtype) for name in (target.a_name, target.b_name))
    return total_N.addmm_((x_N @ a.T).mul_(scale_NK), b.T)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any,  # noqa: ANN401 - torch's
        x_N: Tensor,
        _anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Target,
        groups: Sequence["Adapters"],
    ) -> Tensor:
        total_N = nn.functional.linear(x_N, weight, bias)
        halves = [group.halves(target) for group in groups]
        middles = [
            group.add_to(total_N, x_N, own) for group, own in zip(groups, halves, strict=True)
        ]
        ctx.save_for_backward(x_N, weight, *middles)
        ctx.target, ctx.groups, ctx.halves = target, groups, halves
        return total_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy_N: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x_N, weight, *middles = ctx.saved_tensors
        dx_N = dy_N @ weight if ctx.needs_input_grad[0] else None
        held, added = list[Tensor](), list[Tensor]()
        for group, u, halves in zip(ctx.groups, middles, ctx.halves, strict=True):
            gradients = group.backward(dy_N, x_N, u, halves, dx_N)
            names = ctx.target.a_name, ctx.target.b_name
            for name, of_members in zip(names, gradients, strict=True):
                for weights, gradient in zip(group.members, of_members, strict=True):
                    if (total := weights.tensors[name].grad) is not None:
                        held.append(total)
                        added.append(gradient)
        if held:
            # Accumulated here, instead of by one graph node each.
            torch._foreach_add_(held, added)
        return dx_N, None, None, None, None, None


class Adapters(Protocol):
    """Adapters whose deltas of a layer are computed together."""

    @property
    def members(self) -> Sequence[ActiveWeights]:
        """Their weights, with the same layers."""
        ...

    def halves(self, target: Target) -> Halves:
        """Return A and B of a layer; stacked, if there are several members."""
        ...

    def add_to(self, total_N: Tensor, x_N: Tensor, halves: Halves) -> Tensor:
        """Add the deltas of an input to the members' positions of a layer's output.

        Args:
            total_N: [N, out], changed in place.
            x_N: [N, in].
            halves: of the layer.

        Returns:
            The scaled low-rank intermediate, which `backward` needs.
        """
        ...

    def backward(
        self, dy_N: Tensor, x_N: Tensor, u: Tensor, halves: Halves, dx_N: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the gradients of A [rank, in] and of B [out, rank] of each member, in float32.

        Args:
            dy_N: [N, out], the gradient of the layer's output.
            x_N: [N, in], the input of `add_to`.
            u: the result of `add_to`.
            halves: of the layer.
            dx_N: [N, in], to which the gradient of the input is added; None if none is needed.
        """
        ...


def adapters_of(members: Iterable[tuple[slice, ActiveWeights]], like_N: Tensor) -> list[Adapters]:
    """Return the groups in which the adapters of a pass are multiplied.

    Args:
        members: the positions of adapters, and their weights. An adapter without positions is left
            out.
        like_N: [N, ...], an input of the pass, of the base's dtype.
    """
    same_layers: dict[frozenset[str], list[tuple[slice, ActiveWeights]]] = defaultdict(list)
    for rows, weights in members:
        start, stop, _ = rows.indices(len(like_N))
        if start < stop:
            same_layers[frozenset(weights.tensors)].append((slice(start, stop), weights))
    found: list[Adapters] = []
    for each in same_layers.values():
        sizes = tuple((rows.stop - rows.start, weights.rank) for rows, weights in each)
        for group in groups_of(sizes):
            own = [each[index] for index in group]
            found.append(
                AdapterStack(own, like_N) if len(own) > 1 else SingleAdapter(*own[0], like_N.dtype)
            )
    return found


class SingleAdapter:
    """An adapter that is multiplied by itself: a run alone in a pass."""

    def __init__(self, rows: slice, weights: ActiveWeights, dtype: torch.dtype) -> None:
        self.members = (weights,)
        self._rows, self._dtype = rows, dtype
        self._scale = _scale(weights)
        self._rounded = _Rounded([weights], dtype)

    def halves(self, target: Target) -> Halves:
        """See `Adapters.halves`: [r, in] and [out, r]."""
        a_1, b_1 = self._rounded.of(target)
        return a_1[0], b_1[0]

    def add_to(self, total_N: Tensor, x_N: Tensor, halves: Halves) -> Tensor:
        """See `Adapters.add_to`: it is [rows, r]."""
        a, b = halves
        u_Nr = _scaled_(x_N[self._rows] @ a.T, self._scale)
        total_N[self._rows].addmm_(u_Nr, b.T)
        return u_Nr

    def backward(
        self, dy_N: Tensor, x_N: Tensor, u: Tensor, halves: Halves, dx_N: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `Adapters.backward`."""
        a, b = halves
        own_dy_N = dy_N[self._rows]
        du_Nr = _scaled_(own_dy_N @ b, self._scale)
        if dx_N is not None:
            dx_N[self._rows].addmm_(du_Nr, a)
        return [matmul_float32(du_Nr.T, x_N[self._rows])], [matmul_float32(own_dy_N.T, u)]


class AdapterStack:
    """Adapters that are multiplied together."""

    def __init__(self, members: Sequence[tuple[slice, ActiveWeights]], like_N: Tensor) -> None:
        """Prepare the indexes; weights are rounded when the first layer needs them."""
        self.members = [weights for _, weights in members]
        self._ranks = [weights.rank for weights in self.members]
        self._rounded = _Rounded(self.members, like_N.dtype)
        scales = [_scale(weights) for weights in self.members]
        self._scale: float | Tensor = (
            scales[0]
            if len(set(scales)) == 1
            # In float32: half precision would round 32 / 24.
            else torch.tensor(scales, device=like_N.device)[:, None, None]
        )
        self._places = _Places.of([rows for rows, _ in members], like_N.device)

    def halves(self, target: Target) -> Halves:
        """See `Adapters.halves`: [G, r, in] and [G, out, r]."""
        return self._rounded.of(target)

    def add_to(self, total_N: Tensor, x_N: Tensor, halves: Halves) -> Tensor:
        """See `Adapters.add_to`: it is [G, L, r]."""
        a, b = halves
        u_GLr = self._low(self._places.gathered(x_N), a.mT)
        self._places.add_product(total_N, u_GLr, b.mT)
        return u_GLr

    def backward(
        self, dy_N: Tensor, x_N: Tensor, u: Tensor, halves: Halves, dx_N: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `Adapters.backward`."""
        a, b = halves
        dy_GL = self._places.gathered(dy_N)
        du_GLr = self._low(dy_GL, b)
        if dx_N is not None:
            self._places.add_product(dx_N, du_GLr, a)
        of_a = bmm_float32(du_GLr.mT, self._places.gathered(x_N)).unbind(0)
        of_b = bmm_float32(dy_GL.mT, u).unbind(0)
        if len(set(self._ranks)) == 1:
            return of_a, of_b
        return (
            [own[:rank] for own, rank in zip(of_a, self._ranks, strict=True)],
            [own[:, :rank] for own, rank in zip(of_b, self._ranks, strict=True)],
        )

    def _low(self, values_GL: Tensor, right: Tensor) -> Tensor:
        """Return the scaled low-rank intermediate [G, L, r], zero at padded positions."""
        low_GLr = _scaled_(torch.bmm(values_GL, right), self._scale)
        is_padding = self._places.is_padding_GL1
        return low_GLr if is_padding is None else low_GLr.masked_fill_(is_padding, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The positions of a stack's members."""

    lengths: Sequence[int]
    span: slice | None
    """Range of all members' positions; None if others are between them."""
    rows_GL: Tensor | None = None
    """Which positions are gathered; None if the span is [G, L] already."""
    is_padding_GL1: Tensor | None = None
    """True where a position repeats another one; None if none does."""
    padded_M: Tensor | None = None
    """Index of each position in the flattened [G, L]."""
    rows_M: Tensor | None = None
    """Each position's index in the pass."""

    @classmethod
    def of(cls, members: Sequence[slice], device: torch.device) -> "_Places":
        lengths = [rows.stop - rows.start for rows in members]
        follow = all(one.stop == following.start for one, following in pairwise(members))
        span = slice(members[0].start, members[-1].stop) if follow else None
        if span is not None and len(set(lengths)) == 1:
            return cls(lengths, span)
        positions = torch.arange(max(lengths))
        starts_G1 = torch.tensor([rows.start for rows in members])[:, None]
        is_own_GL = positions < torch.tensor(lengths)[:, None]
        rows_GL = starts_G1 + torch.where(is_own_GL, positions, 0)
        return cls(
            lengths,
            span,
            rows_GL.to(device),
            None if len(set(lengths)) == 1 else ~is_own_GL[:, :, None].to(device),
            is_own_GL.flatten().nonzero()[:, 0].to(device),
            rows_GL[is_own_GL].to(device),
        )

    def gathered(self, values_N: Tensor) -> Tensor:
        """Return the positions of all members [G, L, features]."""
        shape = (len(self.lengths), max(self.lengths), values_N.shape[1])
        if self.rows_GL is None:
            return values_N[self.span].view(shape)
        return values_N.index_select(0, self.rows_GL.flatten()).view(shape)

    def add_product(self, total_N: Tensor, left_GLr: Tensor, right: Tensor) -> None:
        """Add a product [G, L, features] to the members' positions."""
        if self.padded_M is None or self.rows_M is None:
            self.gathered(total_N).baddbmm_(left_GLr, right)
            return
        # The sum is rounded once, as for an adapter alone, and not the product before it.
        sum_GL = self.gathered(total_N).baddbmm_(left_GLr, right)
        own_M = sum_GL.flatten(0, 1).index_select(0, self.padded_M)
        if self.span is not None:
            total_N[self.span].copy_(own_M)
        else:
            total_N.index_copy_(0, self.rows_M, own_M)


class _Rounded:
    """The weights of adapters, rounded to a dtype and stacked.

    Where they are views of flat vectors, the vectors are rounded once, when the first layer needs
    them. Adapters of experts are left out of that: most of their parameters are multiplied
    elsewhere.
    """

    def __init__(self, members: Sequence[ActiveWeights], dtype: torch.dtype) -> None:
        self._members, self._dtype = members, dtype
        flats = [weights.trainable for weights in members if weights.trainable is not None]
        has_experts = any(tensor.ndim > 2 for tensor in members[0].tensors.values())
        self._is_flat = len(flats) == len(members) and not has_experts
        self._flat_GP: Tensor | None = None
        self._layout: TensorLayout | None = None

    def of(self, target: Target) -> Halves:
        """Return A [G, r, in] and B [G, out, r] of a layer."""
        if not self._is_flat:
            return self._stacked_a(target.a_name), self._stacked_b(target.b_name)
        if self._flat_GP is None or self._layout is None:
            self._layout, self._flat_GP = self._round_all()
        return (
            self._layout.rows(self._flat_GP, target.a_name),
            self._layout.rows(self._flat_GP, target.b_name),
        )

    def _stacked_a(self, name: str) -> Tensor:
        """Return A [G, r, in]; missing ranks are zero."""
        joined = self._joined(name, 0)
        return joined.view(len(self._members), -1, joined.shape[1])

    def _stacked_b(self, name: str) -> Tensor:
        """Return B [G, out, r]; missing ranks are zero."""
        joined = self._joined(name, 1)
        return joined.view(joined.shape[0], len(self._members), -1).transpose(0, 1)

    def _joined(self, name: str, rank_dim: int) -> Tensor:
        """Return the tensors of all members side by side: one kernel, however many they are."""
        tensors = [weights.tensors[name].detach() for weights in self._members]
        if len(tensors) == 1:
            return tensors[0].to(self._dtype)
        highest = max(weights.rank for weights in self._members)
        shape = list(tensors[0].shape)
        shape[rank_dim] = highest
        zeros = None
        parts = list[Tensor]()
        for tensor in tensors:
            parts.append(tensor)
            missing = highest - tensor.shape[rank_dim]
            if missing:
                zeros = tensor.new_zeros(shape) if zeros is None else zeros
                parts.append(zeros.narrow(rank_dim, 0, missing))
        return torch.cat(parts, rank_dim).to(self._dtype)

    def _round_all(self) -> tuple[TensorLayout, Tensor]:
        widest = max(self._members, key=lambda weights: weights.rank)
        assert widest.trainable is not None  # noqa: S101 - `_is_flat`
        layout, flat = widest.trainable.layout, widest.trainable.flat.detach()
        flat_GP = flat.new_zeros(len(self._members), layout.size, dtype=self._dtype)
        for own_P, weights in zip(flat_GP.unbind(0), self._members, strict=True):
            if weights.rank == widest.rank and weights.trainable is not None:
                own_P.copy_(weights.trainable.flat.detach())
                continue
            places = layout.views(own_P)
            for name, tensor in weights.tensors.items():
                place = places[name]
                place[: tensor.shape[0], : tensor.shape[1]].copy_(tensor.detach())
        return layout, flat_GP


def _scaled_(values: Tensor, scale: float | Tensor) -> Tensor:
    # Most adapters have scale 1, and small models are bound by kernel launches.
    return values if isinstance(scale, float) and scale == 1.0 else values.mul_(scale)


def _scale(weights: ActiveWeights) -> float:
    assert isinstance(weights.lora_scale, float)  # noqa: S101 - the only other kind is alone
    return weights.lora_scale
