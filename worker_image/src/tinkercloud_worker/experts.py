"""Adapters of the experts of a mixture, whose weights transformers keeps in two tensors of a layer.

Every expert has an adapter of its own for each of its three projections, of the same rank as any
other layer's. They are stacked as the weights are: A [E, r, in] and B [E, out, r]. Positions are
sorted by the expert that they are sent to, so that one product computes a projection of all experts
(`torch.nn.functional.grouped_mm`), and another one half of an adapter: how many launches there are
does not depend on how many experts. What a position gets depends on no other.

Over a base of lower precision A and B are rounded to it, as in other layers, and so is what a pass
adds to each expert's gradient; gradients are added up in float32.

Shape legend: N positions, K experts that each is sent to, S = N * K pairs of those, sorted by
expert; E experts, D hidden size, F intermediate size, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.lora import Target
from tinkercloud_worker.low_rank import Term

_MIXTRALS = frozenset({"minimax", "minimax_m2", "mixtral", "phimoe"})
"""Families whose checkpoints, and vLLM and SGLang with them, have Mixtral's names for experts."""
_ALIGNED_BYTES = 16
"""That rows of what is multiplied start at multiples of."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states [N, D], the experts of each [N, K] and their shares [N, K] to the sum of what
the experts return [N, D]."""


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The experts of a layer, all in one module."""

    name: str
    """Of the module in the Hugging Face model."""
    gate: Target
    up: Target
    down: Target

    @property
    def targets(self) -> tuple[Target, Target, Target]:
        """What of it can be adapted."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTerms:
    """An adapter's parts of the experts of a layer; their A and B have a first dimension [E]."""

    gate: Term
    up: Term
    down: Term


def find_experts(model: PreTrainedModel) -> list[FusedExperts]:
    """Return the experts of a model that can be adapted, in the order of its modules.

    These are gated, without biases, gates before ups, and [out, in] each: what all mixtures have
    that transformers computes by its common code, but for a few (`others_than`).

    Their adapters are named as the family's checkpoints name the weights of an expert, less its
    number: `...mlp.experts.gate_proj`, and of Mixtral `...block_sparse_moe.experts.w1`.
    """
    return [
        _fused(name, module, model.config.model_type)
        for name, module in model.named_modules()
        if _is_adaptable(module)
    ]


def others_than(experts: Sequence[FusedExperts], model: PreTrainedModel) -> str | None:
    """Return what class of experts a model has that can't be adapted; None: it has none such."""
    known = {each.name for each in experts}
    for name, module in model.named_modules():
        kept = module.named_parameters(recurse=False)
        if name not in known and any(weight.ndim == 3 for _, weight in kept):
            return type(module).__name__
    return None


def _is_adaptable(module: nn.Module) -> bool:
    form = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")
    return tuple(getattr(module, each, None) for each in form) == (True, True, False, False, False)


def _fused(name: str, module: Any, family: str) -> FusedExperts:  # noqa: ANN401 - of 60 classes
    count, hidden, width = module.down_proj.shape
    leaves, prefix = ("gate_proj", "up_proj", "down_proj"), name
    if family in _MIXTRALS:
        leaves, prefix = ("w1", "w3", "w2"), name.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = (f"{prefix}.{leaf}" for leaf in leaves)
    return FusedExperts(
        name,
        Target(gate, hidden, width, "mlp", experts=count),
        Target(up, hidden, width, "mlp", experts=count),
        Target(down, width, hidden, "mlp", experts=count),
    )


def with_terms(
    experts: nn.Module, plain: Forward, parts: Sequence[tuple[slice, ExpertTerms | None]]
) -> Forward:
    """Return what computes the experts of a layer with the terms of adapters.

    Args:
        experts: their module, of `find_experts`.
        plain: what computes it as it is.
        parts: consecutive positions, all of them between them, and the terms that are theirs.
    """

    def forward(hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        results = []
        for rows, terms in parts:
            inputs = hidden_ND[rows], index_NK[rows], weights_NK[rows]
            results.append(plain(*inputs) if terms is None else _adapted(experts, terms, *inputs))
        return results[0] if len(results) == 1 else torch.cat(results)

    return forward


def _adapted(
    experts: Any,  # noqa: ANN401 - of 60 classes
    terms: ExpertTerms,
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
) -> Tensor:
    chosen = index_NK.shape[1]
    numbers_S, order_S = torch.sort(index_NK.flatten(), stable=True)
    positions_S = order_S // chosen
    pairs = _Pairs(_ends(numbers_S, experts.num_experts), positions_S)
    x_SD = hidden_ND[positions_S]
    gate_up = pairs.product(x_SD, experts.gate_up_proj)
    gate_up += torch.cat([pairs.term(x_SD, terms.gate), pairs.term(x_SD, terms.up)], -1)
    inner_SF = cast("Tensor", experts._apply_gate(gate_up))
    y_SD = pairs.product(inner_SF, experts.down_proj) + pairs.term(inner_SF, terms.down)
    y_SD = y_SD * weights_NK.flatten()[order_S].unsqueeze(1)
    # Added up in the order of each position's experts, not in that of all pairs.
    back_S = torch.empty_like(order_S).scatter_(
        0, order_S, torch.arange(len(order_S), device=order_S.device)
    )
    return y_SD[back_S].view(*index_NK.shape, -1).sum(1).to(hidden_ND.dtype)


def _ends(numbers_S: Tensor, count: int) -> Tensor:
    """Return where the pairs of each expert end, int32 [E]."""
    every_E = torch.arange(count, device=numbers_S.device)
    return torch.searchsorted(numbers_S, every_E, right=True, out_int32=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Positions, each once for every expert that it is sent to, sorted by expert."""

    ends_E: Tensor
    """int32, where each expert's pairs end."""
    positions_S: Tensor
    """int64, whose pair it is."""

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return x [S, in] times the transposed weight of each row's expert, of [E, out, in]."""
        return grouped_mm(x, weights.transpose(1, 2), offs=self.ends_E)

    def term(self, x: Tensor, term: Term) -> Tensor:
        """Return an adapter's term [S, out] for x [S, in]."""
        extra = -term.a.shape[1] % (_ALIGNED_BYTES // x.element_size())
        a, b = term.a.to(x.dtype), term.b.to(x.dtype)
        if extra:
            a, b = nn.functional.pad(a, (0, 0, 0, extra)), nn.functional.pad(b, (0, extra))
        low_Sr = self.product(x, a)
        return self.product(low_Sr * self._scale(term.scale, extra, x.dtype), b)

    def _scale(self, scale: float | Tensor, extra: int, dtype: torch.dtype) -> float | Tensor:
        if isinstance(scale, float):
            return scale
        return nn.functional.pad(scale[self.positions_S], (0, extra)).to(dtype)
