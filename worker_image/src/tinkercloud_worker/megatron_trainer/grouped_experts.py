"""The experts of a megatron-core layer as grouped products, with LoRA.

megatron-core computes experts one after another unless other packages provide kernels. Here the
weights of this rank's experts are in one tensor per projection, of which megatron-core's own
parameters are views, and one product computes a projection of all experts, as in the torch trainer
(`lora.experts`).

The adapters of a layer's experts are stacked in tensors with Hugging Face's names; `lora.adapters`
describes which halves all experts share. Of the other halves a rank holds those of its own experts,
or, where experts are split by width, a slice of each (`TensorSlice`). Deltas need no additional
communication: the ranks that share an expert gather its tokens before and sum the results after it.

Shape legend: S tokens of this rank's experts, sorted by expert; E experts on this rank; D hidden
size, F this rank's part of an expert's width, r rank of the adapter.
"""

import re
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from tinkercloud_worker.engine.tensor_slices import TensorSlice
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.experts import grouped_linear
from tinkercloud_worker.megatron_trainer.adapters import Active, AdaptedLinears, plus

_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)\.(.*)\.weight")


def located(weight: str) -> tuple[str, int]:
    """Return the LoRA target of an expert's weight: its name and the expert's number.

    Args:
        weight: the name in Hugging Face checkpoints.
    """
    found = _NUMBERED.fullmatch(weight)
    assert found is not None  # noqa: S101 - bridges name the weights of experts so
    return found[1] + found[3], int(found[2])


class GroupedExperts:
    """The experts of a layer on this rank."""

    def __init__(
        self,
        linears: AdaptedLinears,
        experts: SequentialMLP,
        targets: tuple[Target, Target, Target],
        first: int,
    ) -> None:
        """Take over the computation of a layer's experts.

        Args:
            linears: provides the adapter of the current pass.
            experts: the experts of a layer, whose weights are frozen and only changed in place.
            targets: gate, up and down projections of all experts of the layer.
            first: number of the first expert on this rank.
        """
        self._linears = linears
        *self._before, self._down = targets
        self._here = (first, first + experts.num_local_experts)
        self._activation = experts.config.activation_func
        self._gate_up_EGD = Stack([expert.linear_fc1 for expert in experts.local_experts])
        """Gate projections before up projections, [E, 2F, D]."""
        self._down_EDF = Stack([expert.linear_fc2 for expert in experts.local_experts])
        # Assigned to the instance, so that the module keeps its class and parameter names.
        experts.forward = self._forward

    def slices(self, rank: int) -> Sequence[TensorSlice]:
        """Return this rank's slices of the adapter tensors that are specific to each expert.

        Args:
            rank: the LoRA rank.
        """
        number: int = parallel_state.get_expert_tensor_parallel_rank()
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        width = (0, self._down.in_features)
        into = [TensorSlice(t.own_name, (self._here, width, (0, rank))) for t in self._before]
        back = TensorSlice(self._down.own_name, (self._here, (0, rank), width))
        return [*(block.chunk(number, ranks, 1) for block in into), back.chunk(number, ranks, 2)]

    def _forward(
        self, hidden_SD: Tensor, tokens_per_expert: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, None]:
        ends_E = tokens_per_expert.cumsum(0).to(hidden_SD.device, torch.int32)
        gate_up = grouped_linear(hidden_SD, self._gate_up_EGD.weights(), ends_E)
        active = self._active
        if active is not None:
            deltas = [self._inward(active, target, hidden_SD, ends_E) for target in self._before]
            gate_up = gate_up + torch.cat(deltas, -1)
        gate, up = gate_up.chunk(2, -1)
        inner_SF = (self._activation(gate) * up * shares_S.unsqueeze(-1)).to(hidden_SD.dtype)
        output_SD = grouped_linear(inner_SF, self._down_EDF.weights(), ends_E)
        if active is not None:
            low = grouped_linear(inner_SF, active.tensors[self._down.a_name], ends_E)
            [b] = active.tensors[self._down.b_name]
            output_SD = plus(output_SD, low, b.T, active.scale)
        return output_SD, None

    @property
    def _active(self) -> Active | None:
        active = self._linears.active
        # The switches select attention or MLP as a whole: either all targets are adapted, or none.
        return active if active is not None and self._down.a_name in active.tensors else None

    def _inward(self, active: Active, target: Target, hidden_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the delta of a gate or up projection, [S, F]."""
        [a] = active.tensors[target.a_name]
        low = hidden_SD @ a.to(hidden_SD.dtype).T * active.scale
        return grouped_linear(low, active.tensors[target.b_name], ends_E)


class Stack:
    """The weights of layers with the same shape in one tensor: [number of layers, out, in]."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        """Move the layers' weights into one tensor and replace them by views of it."""
        self._linears = linears
        self._own = [linear.get_parameter("weight") for linear in linears]
        self._stacked = torch.stack([weight.data for weight in self._own])
        for weight, place in zip(self._own, self._stacked, strict=True):
            weight.data = place

    def weights(self) -> Tensor:
        """Return the weights, or their replacements in a pass of a fully fine-tuned model."""
        used: list[Tensor] = [linear.weight for linear in self._linears]  # type: ignore[misc]
        return self._stacked if used[0] is self._own[0] else torch.stack(used)
