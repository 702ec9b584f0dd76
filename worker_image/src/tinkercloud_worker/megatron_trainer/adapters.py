"""LoRA behind megatron-core's parallel linear layers.

Adapters have Hugging Face's names and shapes, and are whole at every rank but for the tensors that
each expert has for itself (`grouped_experts`): a layer that holds a slice of a weight uses the same
slice of the adapter, as views. So queries, keys and values, which megatron computes as one, have an
adapter each, and exports need no conversion.

A and B are float32; over a base of lower precision they are rounded to it, as in the torch trainer
(`low_rank`), and their gradients added up in float32.

A rank's gradient of an adapter is its part of a sum over all ranks. Those of a tensor-parallel
group divide the sequence between the weights (sequence parallelism): of what they all have whole, A
before a layer divided by its outputs and B behind one divided by its inputs, each computes the
gradient from its own positions. The output layer's adapter is added elsewhere (`logprobs`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
"""From the outputs of the layers that megatron computes as one, or what makes columns of them, to
those of that one."""


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """The adapter a pass runs with."""

    tensors: Mapping[str, Tensor]
    """Of those that experts have for themselves, slices of this rank's experts."""
    scale: float


class AdaptedLinears:
    """The linear layers of a rank's part of the model, with hooks that add an adapter's terms."""

    def __init__(self) -> None:
        self.active: Active | None = None
        """Of the pass that runs; None adds nothing."""

    def attach(self, linear: nn.Module, targets: Sequence[Target], merge: Merge) -> None:
        """Adapt a layer.

        Args:
            linear: a Column- or RowParallelLinear.
            targets: the Hugging Face layers it computes.
            merge: how their outputs are arranged in its own.
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
        active = self.active
        # Switches are about attention or MLP: all of the targets are adapted, or none.
        if active is None or targets[0].a_name not in active.tensors:
            return None
        a = torch.cat([active.tensors[target.a_name] for target in targets])
        b = [part_of(active.tensors[target.b_name], 0) for target in targets]
        low = gather_from_sequence_parallel_region(inputs[0] @ a.to(inputs[0].dtype).T)
        y, bias = output
        return plus(y, low, merge(beside(b)), active.scale), bias

    def _add_rows(
        self,
        target: Target,
        _module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        active = self.active
        if active is None or target.a_name not in active.tensors:
            return None
        a, b = part_of(active.tensors[target.a_name], 1), active.tensors[target.b_name]
        low = reduce_scatter_to_sequence_parallel_region(inputs[0] @ a.to(inputs[0].dtype).T)
        y, bias = output
        return plus(y, low, b.T, active.scale), bias


def plus(y: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale * low @ b, computed as one.

    Args:
        y: [..., out], what a layer makes of its input.
        low: [..., rank], of the layer's type.
        b: [rank, out], float32.
        scale: of the adapter.
    """
    flat, low = y.flatten(0, -2), low.flatten(0, -2)
    return torch.addmm(flat, low, b.to(y.dtype), alpha=scale).view_as(y)


def beside(bs: Sequence[Tensor]) -> list[Tensor]:
    """Return the B of several adapters, transposed, for all their low-rank values in one row.

    Each has rows of zeros for those of the others, so that one product serves all.
    """
    rank, others = bs[0].shape[1], len(bs) - 1
    return [
        nn.functional.pad(b.T, (0, 0, number * rank, (others - number) * rank))
        for number, b in enumerate(bs)
    ]


def part_of(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's part of an adapter's tensor."""
    parts = tensor.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return parts[rank]


def concatenated(terms: Sequence[Tensor]) -> Tensor:
    """Arrange outputs one after another: the gate and the up projection, or a single layer."""
    return torch.cat(list(terms), dim=-1)


def interleaved(config: TransformerConfig) -> Merge:
    """Return the arrangement of queries, keys and values: group by group."""
    head = config.kv_channels

    def merge(terms: Sequence[Tensor]) -> Tensor:
        groups = terms[1].shape[-1] // head
        return torch.cat([t.unflatten(-1, (groups, -1)) for t in terms], dim=-1).flatten(-2)

    return merge
