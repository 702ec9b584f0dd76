"""LoRA behind the experts of a megatron-core layer, which are computed one after another.

The adapters of a layer's experts are stacked in tensors with Hugging Face's names, whole at every
rank (`adapters`); `lora` says which halves are one for all. A rank uses the part of those experts
that it holds, and where experts are divided by their width, a slice of each. Terms need no
communication of their own: tokens have been gathered from the ranks that divide an expert before,
and what these make of them is added up behind.

Where the ranks of a tensor-parallel group hold the same positions, an expert gets each token once
from every one of them, and so its gradient: that is divided by their number.

Shape legend: E experts of a layer, r rank.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from tinkercloud_worker.lora import Target
from tinkercloud_worker.megatron_trainer.adapters import (
    AdaptedLinears,
    beside,
    concatenated,
    plus,
)

_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)\.(.*)\.weight")


def located(weight: str) -> tuple[str, int]:
    """Return which adapters are about an expert's weight: their name, and the expert's number.

    Args:
        weight: its name in Hugging Face's checkpoints.
    """
    found = _NUMBERED.fullmatch(weight)
    assert found is not None  # noqa: S101 - bridges name the weights of experts so
    return found[1] + found[3], int(found[2])


class AdaptedExperts:
    """The experts of a layer that are at this rank, with hooks that add an adapter's terms."""

    def __init__(
        self,
        linears: AdaptedLinears,
        experts: SequentialMLP,
        targets: tuple[Target, Target, Target],
        first: int,
    ) -> None:
        """Adapt them.

        Args:
            linears: know the adapter that a pass runs with.
            experts: of a layer.
            targets: gate, up and down projections of all experts of the layer.
            first: number among those of the first one here.
        """
        self._linears = linears
        self._targets = targets
        self._here = slice(first, first + experts.num_local_experts)
        divided = experts.config.sequence_parallel
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        self._arrivals = 1 if divided else tensor
        """Of each token at an expert."""
        self._own: Mapping[str, Sequence[Tensor]] = {}
        """By name, what each expert here uses of A and B while they are computed; else nothing."""
        experts.register_forward_pre_hook(self._take)
        # A recomputation may stop before the end.
        experts.register_forward_hook(self._let_go, always_call=True)
        for number, expert in enumerate(experts.local_experts):
            expert.linear_fc1.register_forward_hook(partial(self._add_gate_and_up, number))
            expert.linear_fc2.register_forward_hook(partial(self._add_down, number))

    def _take(self, *_: object) -> None:
        active = self._linears.active
        gate, up, down = self._targets
        if active is None or gate.a_name not in active.tensors:
            self._own = {}
            return
        names = [each.a_name for each in self._targets] + [each.b_name for each in self._targets]
        # Of what the experts' width divides, a slice is used here.
        divided = {gate.b_name: 1, up.b_name: 1, down.a_name: 2}
        self._own = {
            name: self._part(active.tensors[name], divided.get(name)).unbind() for name in names
        }

    def _let_go(self, *_: object) -> None:
        self._own = {}

    def _part(self, stacked: Tensor, divided_dim: int | None) -> Tensor:
        """Return what is used here of A [E, r, in] or B [E, out, r], of one for all [1, ...]."""
        # All experts at once: each by itself would cost a gradient of all of them.
        is_shared, here = len(stacked) == 1, self._here
        count = here.stop - here.start
        part = stacked.expand(count, -1, -1) if is_shared else stacked[here]
        if part.requires_grad and self._arrivals > 1:
            part.register_hook(lambda gradient: gradient / self._arrivals)
        if divided_dim is None:
            return part
        parts = part.chunk(parallel_state.get_expert_tensor_parallel_world_size(), divided_dim)
        rank: int = parallel_state.get_expert_tensor_parallel_rank()
        return parts[rank]

    def _add_gate_and_up(
        self,
        number: int,
        _module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        if not self._own:
            return None
        gate, up, _ = self._targets
        a = torch.cat([self._own[each.a_name][number] for each in (gate, up)])
        b = concatenated(beside([self._own[each.b_name][number] for each in (gate, up)]))
        return self._sum(inputs[0], output, a, b)

    def _add_down(
        self,
        number: int,
        _module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None] | None:
        if not self._own:
            return None
        *_, down = self._targets
        a, b = (self._own[name][number] for name in (down.a_name, down.b_name))
        return self._sum(inputs[0], output, a, b.T)

    def _sum(
        self, x: Tensor, output: tuple[Tensor, Tensor | None], a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        active = self._linears.active
        assert active is not None  # noqa: S101 - the layer's experts were taken from it
        y, bias = output
        return plus(y, x @ a.to(x.dtype).T, b, active.scale), bias
