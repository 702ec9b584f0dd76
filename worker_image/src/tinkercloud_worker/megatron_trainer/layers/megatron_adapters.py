"""LoRA for megatron-core's parallel linear layers.

Adapters have Hugging Face's names and shapes, and are replicated on every rank except for tensors
specific to each expert (`grouped_experts`): a layer that holds a slice of a weight uses a view of
the same slice of the adapter. Queries, keys and values, which megatron-core computes in one layer,
therefore have separate adapters, and exports need no conversion.

A and B are float32; over a half-precision base they are rounded to its dtype, as in the torch
trainer (`lora.linear`), and their gradients accumulate in float32.

Each rank's gradient of an adapter is a partial sum over all ranks. Within a tensor-parallel group,
sequence parallelism divides the sequence between the weights, so each rank computes the gradient of
replicated tensors (A before a column-parallel layer, B after a row-parallel layer) from its own
positions. The adapter of the LM head is applied elsewhere (`vocabulary_logprobs`).

Several adapters can share a pass (`Active`). Each multiplies its own positions only, so that a
non-finite value of one stays there; their low-rank values are padded to the same width and
communicated together. On every rank the output of a layer depends on all adapters of the layer,
also on those that have no position there: ranks that communicate in the forward pass must do so in
the backward pass, all or none of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from tinkercloud_worker.lora.adapters import Target

Merge = Callable[[Sequence[Tensor]], Tensor]
"""Merges the outputs of separate Hugging Face layers, or the weights of their columns, into those
of the one megatron-core layer that computes them."""


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """An adapter of a pass, and its positions."""

    tensors: Mapping[str, Tensor]
    """Adapter tensors by name; of tensors specific to each expert, only the slices of this rank's
    experts."""
    scale: float
    inside: slice
    """Range among the positions of layers divided by tensor parallelism: S of a micro-batch."""
    between: slice
    """Range among those positions that this rank holds between such layers."""


class AdaptedLinears:
    """The linear layers of a rank's part of the model, with hooks that add LoRA deltas."""

    def __init__(self) -> None:
        self.active: Sequence[Active] = ()
        """The adapters of the current pass; none add nothing. Together they have all positions, in
        order, and some may have none."""

    def attach(self, linear: nn.Module, targets: Sequence[Target], merge: Merge) -> None:
        """Attach the hooks to a layer.

        Args:
            linear: a Column- or RowParallelLinear.
            targets: the Hugging Face layers that it computes.
            merge: arranges their outputs in the layer's output.
        """
        if isinstance(linear, ColumnParallelLinear):
            linear.register_forward_hook(partial(self._add_columns, targets, merge))
        else:
            (target,) = targets
            linear.register_forward_hook(partial(self._add_rows, target))

    def _add_columns(
        self,
        targets: Sequence[Target],
        merge: Merge,
        _module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        factors = []
        for active in self.active:
            factor = _Factors(active.between, active.inside, active.scale)
            # The switches select attention or MLP as a whole: all targets are adapted, or none.
            if targets[0].a_name in active.tensors:
                a = torch.cat([active.tensors[target.a_name] for target in targets])
                b = [part_of(active.tensors[target.b_name], 0) for target in targets]
                factor = replace(factor, a=a, b=merge(as_blocks(b)))
            factors.append(factor)
        if all(factor.a is None for factor in factors):
            return None
        low = gather_from_sequence_parallel_region(_low_rank(inputs[0], factors))
        y, bias = output
        return _with_deltas(y, low, factors), bias

    def _add_rows(
        self,
        target: Target,
        _module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        factors = []
        for active in self.active:
            factor = _Factors(active.inside, active.between, active.scale)
            if target.a_name in active.tensors:
                a, b = part_of(active.tensors[target.a_name], 1), active.tensors[target.b_name]
                factor = replace(factor, a=a, b=b.T)
            factors.append(factor)
        if all(factor.a is None for factor in factors):
            return None
        low = reduce_scatter_to_sequence_parallel_region(_low_rank(inputs[0], factors))
        y, bias = output
        return _with_deltas(y, low, factors), bias


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """What an adapter of a pass has for a layer."""

    rows_in: slice
    """Range of its positions in the layer's input."""
    rows_out: slice
    """Range of its positions in the layer's output."""
    scale: float
    a: Tensor | None = None
    """This rank's part of A, float32 [rank, in]; None if the adapter does not adapt the layer."""
    b: Tensor | None = None
    """This rank's part of the transposed B, float32 [rank, out]."""


def _low_rank(x: Tensor, factors: Sequence[_Factors]) -> Tensor:
    """Return the low-rank values [..., most ranks] of an input [..., in], each with its A.

    They are zero for ranks that an adapter lacks.
    """
    most = max(len(factor.a) for factor in factors if factor.a is not None)
    parts = []
    for factor in factors:
        own = x[factor.rows_in]
        if factor.a is None:
            parts.append(own.new_zeros(*own.shape[:-1], most))
            continue
        low, missing = own @ factor.a.to(x.dtype).T, most - len(factor.a)
        parts.append(nn.functional.pad(low, (0, missing)) if missing else low)
    return _joined(parts)


def _with_deltas(y: Tensor, low: Tensor, factors: Sequence[_Factors]) -> Tensor:
    """Return an output [..., out] plus the products of low-rank values, each with its B."""
    parts = []
    for factor in factors:
        own = y[factor.rows_out]
        if factor.b is not None:
            own_low = low[factor.rows_out][..., : len(factor.b)]
            own = plus(own, own_low, factor.b, factor.scale)
        parts.append(own)
    return _joined(parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def plus(y: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale * low @ b, computed in one operation.

    Args:
        y: [..., out], the output of a layer.
        low: [..., rank], in the layer's dtype.
        b: [rank, out], float32.
        scale: the scale of the adapter.
    """
    flat, low = y.flatten(0, -2), low.flatten(0, -2)
    return torch.addmm(flat, low, b.to(y.dtype), alpha=scale).view_as(y)


def as_blocks(bs: Sequence[Tensor]) -> list[Tensor]:
    """Return the transposed B of several adapters, as blocks for concatenated low-rank values.

    Each block has zeros for the values of the others, so that one product computes all of them.
    """
    rank, others = bs[0].shape[1], len(bs) - 1
    return [
        nn.functional.pad(b.T, (0, 0, number * rank, (others - number) * rank))
        for number, b in enumerate(bs)
    ]


def part_of(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's slice of an adapter's tensor."""
    parts = tensor.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return parts[rank]


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate outputs: of the gate and the up projection, or of a single layer."""
    return torch.cat(list(parts), dim=-1)


def interleaved(config: TransformerConfig) -> Merge:
    """Return a function that interleaves queries, keys and values group by group."""
    head = config.kv_channels

    def merge(parts: Sequence[Tensor]) -> Tensor:
        groups = parts[1].shape[-1] // head
        return torch.cat([t.unflatten(-1, (groups, -1)) for t in parts], dim=-1).flatten(-2)

    return merge
