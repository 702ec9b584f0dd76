"""The experts of a megatron-core layer, computed as one, with an adapter's terms.

megatron-core computes them one after another unless other packages bring kernels. Here the weights
of those at this rank lie in one tensor for each projection, of which megatron-core's own parameters
are views, and one product computes a projection of all of them, as the torch trainer (`experts`).

The adapters of a layer's experts are stacked in tensors with Hugging Face's names; `lora` says
which halves are one for all. Of the others a rank has the part of those experts that it holds, and
where experts are divided by their width, a slice of each (`TensorSlice`). Terms need no
communication of their own: tokens are gathered before from the ranks that divide an expert, and
what these compute of them is summed behind.

Shape legend: S tokens at this rank's experts, sorted by expert; E experts at this rank; D hidden
size, F this rank's part of an expert's width, r rank of the adapter.
"""

import re
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.experts import grouped_linear
from tinkercloud_worker.megatron_trainer.adapters import Active, AdaptedLinears, plus
from tinkercloud_worker.megatron_trainer.tensor_slices import TensorSlice

_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)\.(.*)\.weight")


def located(weight: str) -> tuple[str, int]:
    """Return which adapters are about an expert's weight: their name, and the expert's number.

    Args:
        weight: its name in Hugging Face's checkpoints.
    """
    found = _NUMBERED.fullmatch(weight)
    assert found is not None  # noqa: S101 - bridges name the weights of experts so
    return found[1] + found[3], int(found[2])


class GroupedExperts:
    """The experts of a layer that are at this rank."""

    def __init__(
        self,
        linears: AdaptedLinears,
        experts: SequentialMLP,
        targets: tuple[Target, Target, Target],
        first: int,
    ) -> None:
        """Take over the computation of a layer's experts.

        Args:
            linears: know the adapter that a pass runs with.
            experts: of a layer. Their own weights are frozen, and set in place only.
            targets: gate, up and down projections of all experts of the layer.
            first: number among those of the first one here.
        """
        self._linears = linears
        *self._before, self._down = targets
        self._here = (first, first + experts.num_local_experts)
        self._activation = experts.config.activation_func
        self._gate_up_EGD = Stack([expert.linear_fc1 for expert in experts.local_experts])
        """Gates before ups, [E, 2F, D]."""
        self._down_EDF = Stack([expert.linear_fc2 for expert in experts.local_experts])
        # Assigned to the instance, so that the module stays what it is, names and all.
        experts.forward = self._forward

    def slices(self, rank: int) -> Sequence[TensorSlice]:
        """Return this rank's slices of the adapter tensors that experts have for themselves.

        Args:
            rank: of the adapter.
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
            terms = [self._inward(active, target, hidden_SD, ends_E) for target in self._before]
            gate_up = gate_up + torch.cat(terms, -1)
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
        # Switches are about attention or MLP: all of the targets are adapted, or none.
        return active if active is not None and self._down.a_name in active.tensors else None

    def _inward(self, active: Active, target: Target, hidden_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the term of a gate or up projection, [S, F]."""
        [a] = active.tensors[target.a_name]
        low = hidden_SD @ a.to(hidden_SD.dtype).T * active.scale
        return grouped_linear(low, active.tensors[target.b_name], ends_E)


class Stack:
    """The weights of layers of one shape, in one tensor: [number of them, out, in]."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        """Move the layers' weights into one tensor, of which they become views."""
        self._linears = linears
        self._own = [linear.get_parameter("weight") for linear in linears]
        self._stacked = torch.stack([weight.data for weight in self._own])
        for weight, place in zip(self._own, self._stacked, strict=True):
            weight.data = place

    def weights(self) -> Tensor:
        """Return them, or those that replace them in a pass of a model that is trained whole."""
        used: list[Tensor] = [linear.weight for linear in self._linears]  # type: ignore[misc]
        return self._stacked if used[0] is self._own[0] else torch.stack(used)
