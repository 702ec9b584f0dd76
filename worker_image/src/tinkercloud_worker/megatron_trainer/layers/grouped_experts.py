"""The experts of a megatron-core layer as grouped products, with LoRA.

megatron-core computes experts one after another unless other packages provide kernels. Here the
weights of this rank's experts are in one tensor per projection, of which megatron-core's own
parameters are views, and one product computes a projection of all experts, as in the torch trainer
(`lora.experts`).

The adapters of a layer's experts are stacked in tensors with Hugging Face's names; `lora.adapters`
describes which halves all experts share. Of the other halves a rank holds those of its own experts,
or, where experts are split by width, a slice of each (`TensorSlice`). Deltas need no additional
communication: the ranks that share an expert gather its tokens before and sum the results after it.

Tokens come from other ranks too. In a pass that adapters share, the number of its adapter therefore
travels with each token, in columns behind its hidden state, and each adapter multiplies its own
tokens. `megatron_adapters` states why an adapter without a token here does it too.

Shape legend: S tokens of this rank's experts, sorted by expert; E experts on this rank; D hidden
size, C columns with those of the adapter's number; F this rank's part of an expert's width, r rank
of the adapter; T tokens that this rank sends; M tokens of S that have an adapter of experts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from tinkercloud_worker.engine.tensor_slices import TensorSlice
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.experts import ALIGNED_BYTES, grouped_linear
from tinkercloud_worker.megatron_trainer.layers.megatron_adapters import (
    Active,
    AdaptedLinears,
    plus,
)

_BASE = 256
"""bfloat16 represents all integers up to it."""
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
        layer: MoELayer,
        targets: tuple[Target, Target, Target],
        first: int,
    ) -> None:
        """Take over the computation of a layer's experts.

        Args:
            linears: provides the adapters of the current pass.
            layer: the layer; the weights of its experts are frozen and only changed in place.
            targets: gate, up and down projections of all experts of the layer.
            first: number of the first expert on this rank.
        """
        experts, self._dispatcher = layer.experts, layer.token_dispatcher
        self._linears = linears
        *self._before, self._down = targets
        self._here = (first, first + experts.num_local_experts)
        self._activation = experts.config.activation_func
        self._gate_up_EGD = Stack([expert.linear_fc1 for expert in experts.local_experts])
        """Gate projections before up projections, [E, 2F, D]."""
        self._down_EDF = Stack([expert.linear_fc2 for expert in experts.local_experts])
        # Assigned to the instance, so that the module keeps its class and parameter names.
        experts.forward = self._forward
        self._prepare = self._dispatcher.dispatch_preprocess
        self._dispatcher.dispatch_preprocess = self._numbered

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

    def _numbered(
        self, hidden_T1D: Tensor, is_sent_TE: Tensor, shares_TE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Prepare tokens for the dispatcher, with the numbers of their adapters if necessary."""
        if not self._has_several:
            alone: tuple[Tensor, Tensor] = self._prepare(hidden_T1D, is_sent_TE, shares_TE)
            return alone
        hidden_T1C = torch.cat([hidden_T1D, _columns(self._linears.active, hidden_T1D)], -1)
        prepared: tuple[Tensor, Tensor] = self._prepare(hidden_T1C, is_sent_TE, shares_TE)
        # The dispatcher gives its output the shape of its input, but experts return no numbers.
        self._dispatcher.hidden_shape = hidden_T1D.shape
        self._dispatcher.hidden_shape_before_permute = hidden_T1D.flatten(0, 1).shape
        return prepared

    def _forward(
        self, hidden_SC: Tensor, tokens_per_expert: Tensor, shares_S: Tensor
    ) -> tuple[Tensor, None]:
        ends_E = tokens_per_expert.cumsum(0).to(hidden_SC.device, torch.int32)
        shares = self._shares(hidden_SC, tokens_per_expert, ends_E)
        hidden_SD = hidden_SC[:, : self._down.out_features] if self._has_several else hidden_SC
        gate_up = grouped_linear(hidden_SD, self._gate_up_EGD.weights(), ends_E)
        gate_up = _updated(gate_up, shares, lambda own, y: y + self._inward(own, hidden_SD))
        gate, up = gate_up.chunk(2, -1)
        inner_SF = (self._activation(gate) * up * shares_S.unsqueeze(-1)).to(hidden_SD.dtype)
        output_SD = grouped_linear(inner_SF, self._down_EDF.weights(), ends_E)
        return _updated(output_SD, shares, lambda own, y: self._outward(own, inner_SF, y)), None

    @property
    def _has_several(self) -> bool:
        """Whether several adapters share the pass, some of them with adapters of experts."""
        active = self._linears.active
        return len(active) > 1 and any(map(self._is_adapted, active))

    def _is_adapted(self, active: Active) -> bool:
        # The switches select attention or MLP as a whole: either all targets are adapted, or none.
        return self._down.a_name in active.tensors

    def _shares(
        self, hidden_SC: Tensor, tokens_per_expert: Tensor, ends_E: Tensor
    ) -> "list[_Share]":
        """Return the tokens of each adapter of experts."""
        active = self._linears.active
        if not self._has_several:
            return [_Share(each, None, ends_E) for each in active if self._is_adapted(each)]
        numbers_S = _numbers(hidden_SC[:, self._down.out_features :])
        every_E = torch.arange(len(ends_E), device=ends_E.device)
        experts_S = every_E.repeat_interleave(
            tokens_per_expert.to(ends_E.device), output_size=len(hidden_SC)
        )
        sizes = numbers_S.bincount(minlength=len(active)).tolist()
        # Within each adapter they stay sorted by expert.
        places = numbers_S.argsort(stable=True).split(sizes)
        return [
            _Share(
                each,
                places_M,
                torch.searchsorted(experts_S[places_M], every_E, right=True, out_int32=True),
            )
            for each, places_M in zip(active, places, strict=True)
            if self._is_adapted(each)
        ]

    def _inward(self, share: "_Share", hidden_SD: Tensor) -> Tensor:
        """Return the deltas of gate and up projection, [M, 2F]."""
        hidden_MD, tensors = share.of(hidden_SD), share.active.tensors
        deltas = []
        for target in self._before:
            [a] = tensors[target.a_name]
            low = hidden_MD @ a.to(hidden_MD.dtype).T * share.active.scale
            deltas.append(grouped_linear(low, tensors[target.b_name], share.ends_E))
        return torch.cat(deltas, -1)

    def _outward(self, share: "_Share", inner_SF: Tensor, y_MD: Tensor) -> Tensor:
        """Return the output of the down projection plus its delta, [M, D]."""
        tensors = share.active.tensors
        low = grouped_linear(share.of(inner_SF), tensors[self._down.a_name], share.ends_E)
        [b] = tensors[self._down.b_name]
        return plus(y_MD, low, b.T, share.active.scale)


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """The tokens of an adapter of experts, sorted by expert."""

    active: Active
    places_M: Tensor | None
    """int64: their indices among the S tokens; None: all of them."""
    ends_E: Tensor
    """int32: the end offset of each expert's tokens."""

    def of(self, values: Tensor) -> Tensor:
        """Return the values [M, ...] of these tokens from those of all, [S, ...]."""
        return values if self.places_M is None else values[self.places_M]


def _updated(
    values: Tensor, shares: Sequence[_Share], update: Callable[[_Share, Tensor], Tensor]
) -> Tensor:
    """Return values of all tokens, [S, ...], with those of each adapter's tokens updated."""
    updated = [update(share, share.of(values)) for share in shares]
    places = [share.places_M for share in shares if share.places_M is not None]
    if places:
        return values.index_copy(0, torch.cat(places), torch.cat(updated))
    return updated[0] if updated else values


def _columns(active: Sequence[Active], hidden_T1D: Tensor) -> Tensor:
    """Return the number of each token's adapter in digits that every dtype represents exactly."""
    # As many as keep the rows aligned for grouped products.
    count = ALIGNED_BYTES // hidden_T1D.element_size()
    columns_T1C = hidden_T1D.new_zeros(*hidden_T1D.shape[:-1], count)
    for number, each in enumerate(active):
        high, low = divmod(number, _BASE)
        columns_T1C[each.between, :, 0] = low
        columns_T1C[each.between, :, 1] = high
    return columns_T1C


def _numbers(columns_SC: Tensor) -> Tensor:
    """Return the number of each token's adapter, int64 [S], from what `_columns` returns."""
    return columns_SC[:, 0].long() + _BASE * columns_SC[:, 1].long()


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
