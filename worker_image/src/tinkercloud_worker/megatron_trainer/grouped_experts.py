"""The experts of a megatron-core layer, computed as one, with an adapter's terms.

megatron-core computes them one after another unless other packages bring kernels. Here the weights
of those at this rank lie in one tensor for each projection, of which megatron-core's own parameters
are views, and one product computes a projection of all of them, as the torch trainer (`experts`).

The adapters of a layer's experts are stacked in tensors with Hugging Face's names; `lora` says
which halves are one for all. Of the others a rank has the part of those experts that it holds, and
where experts are divided by their width, a slice of each: a `Piece`. Terms need no communication of
their own: tokens have been gathered from the ranks that divide an expert before, and what these
make of them is added up behind.

Where the ranks of a tensor-parallel group hold the same positions, an expert gets each token once
from every one of them, and so its gradient: that is divided by their number.

Shape legend: S tokens at this rank's experts, sorted by expert; E experts at this rank; D hidden
size, F this rank's part of an expert's width, r rank of the adapter.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from tinkercloud_worker.experts import grouped
from tinkercloud_worker.lora import Target
from tinkercloud_worker.megatron_trainer.adapters import Active, AdaptedLinears, plus

_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)\.(.*)\.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """Where in a tensor that all experts of a layer are stacked in, a rank's part of it is."""

    bounds: tuple[tuple[int, int], ...]
    """Of each dimension, the first of its indices and the one behind the last."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the part's shape."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return what takes it out of the tensor."""
        return tuple(slice(start, stop) for start, stop in self.bounds)


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
        """Compute them from here on.

        Args:
            linears: know the adapter that a pass runs with.
            experts: of a layer. Their weights are frozen, and set in place only.
            targets: gate, up and down projections of all experts of the layer.
            first: number among those of the first one here.
        """
        self._linears = linears
        *self._before, self._down = targets
        self._here = (first, first + experts.num_local_experts)
        divided = experts.config.sequence_parallel
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._arrivals = 1 if divided else tensor
        """Of each token at an expert."""
        self._activation = experts.config.activation_func
        self._gate_up_EGD = _stacked([expert.linear_fc1 for expert in experts.local_experts])
        """Gates before ups, [E, 2F, D]."""
        self._down_EDF = _stacked([expert.linear_fc2 for expert in experts.local_experts])
        # Assigned to the instance, so that the module stays what it is, names and all.
        experts.forward = self._forward

    def pieces(self, rank: int) -> Mapping[str, Piece]:
        """Return what is used here of adapters' tensors that experts have for themselves.

        Args:
            rank: of the adapter.
        """
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        width = self._down.in_features // ranks
        number: int = parallel_state.get_expert_tensor_parallel_rank()
        here, all_of = (number * width, (number + 1) * width), (0, rank)
        into = {target.own_name: Piece((self._here, here, all_of)) for target in self._before}
        return into | {self._down.own_name: Piece((self._here, all_of, here))}

    def _forward(
        self, hidden_SD: Tensor, tokens_per_expert: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, None]:
        ends_E = tokens_per_expert.cumsum(0).to(hidden_SD.device, torch.int32)
        gate_up = grouped(hidden_SD, self._gate_up_EGD, ends_E)
        active = self._active
        if active is not None:
            terms = [self._inward(active, target, hidden_SD, ends_E) for target in self._before]
            gate_up = gate_up + torch.cat(terms, -1)
        gate, up = gate_up.chunk(2, -1)
        inner_SF = (self._activation(gate) * up * shares_S.unsqueeze(-1)).to(hidden_SD.dtype)
        output_SD = grouped(inner_SF, self._down_EDF, ends_E)
        if active is not None:
            low = grouped(inner_SF, self._counted(active.tensors[self._down.a_name]), ends_E)
            [b] = self._counted(active.tensors[self._down.b_name])
            output_SD = plus(output_SD, low, b.T, active.scale)
        return output_SD, None

    @property
    def _active(self) -> Active | None:
        active = self._linears.active
        # Switches are about attention or MLP: all of the targets are adapted, or none.
        return active if active is not None and self._down.a_name in active.tensors else None

    def _inward(self, active: Active, target: Target, hidden_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the term of a gate or up projection, [S, F]."""
        [a] = self._counted(active.tensors[target.a_name])
        low = hidden_SD @ a.to(hidden_SD.dtype).T * active.scale
        return grouped(low, self._counted(active.tensors[target.b_name]), ends_E)

    def _counted(self, half: Tensor) -> Tensor:
        """Return a half of an adapter, whose gradient counts each token once."""
        if not half.requires_grad or self._arrivals == 1:
            return half
        half = half.view_as(half)
        half.register_hook(lambda gradient: gradient / self._arrivals)
        return half


def _stacked(linears: Sequence[nn.Module]) -> Tensor:
    """Let the weights of layers lie in one tensor, and return it: [number of them, out, in]."""
    weights = [linear.get_parameter("weight") for linear in linears]
    stacked = torch.stack([weight.data for weight in weights])
    for weight, place in zip(weights, stacked, strict=True):
        weight.data = place
    return stacked
