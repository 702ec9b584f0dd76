"""LoRA for the experts of a mixture, whose weights transformers keeps in two tensors per layer.

`lora.adapters` describes which halves of an adapter the experts share. A shared half is multiplied
once per position, with its hidden state or with the sum over its experts; the other halves are
stacked like the weights. Positions are sorted by expert, so that one product computes a projection
of all experts (`torch.nn.functional.grouped_mm`), and another one half of an adapter: the number of
launches does not depend on the number of experts. The result of a position does not depend on other
positions.

Over a half-precision base, A and B are rounded to its dtype, as in other layers, and so is each
pass's contribution to an expert's gradient; gradients accumulate in float32.

Shape legend: N positions, K experts per position, S = N * K pairs of position and expert, sorted by
expert; E experts, D hidden size, F intermediate size, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from torch.nn.modules.conv import _ConvNd
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.deltas import LoraDelta

_MIXTRALS = frozenset({"minimax", "minimax_m2", "mixtral", "phimoe"})
"""Families whose checkpoints use Mixtral's names for experts, as do vLLM and SGLang for them."""
ALIGNED_BYTES = 16
"""Rows of factors of `grouped_linear` start at multiples of this."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden states [N, D], their experts [N, K] and the routing weights [N, K] to the weighted
sum of the experts' outputs [N, D]."""


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The experts of a layer, stacked in one module."""

    name: str
    """Name of the module in the Hugging Face model."""
    gate: Target
    up: Target
    down: Target

    @property
    def targets(self) -> tuple[Target, Target, Target]:
        """Its LoRA targets."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class ExpertDeltas:
    """An adapter's deltas for the experts of a layer; the first dimension of A and B is E or 1."""

    gate: LoraDelta
    up: LoraDelta
    down: LoraDelta


def find_experts(model: PreTrainedModel) -> list[FusedExperts]:
    """Return the adaptable experts of a model, in the order of its modules.

    Adaptable experts are gated, and of one of two forms: without biases, with the gate before the
    up projection, each [out, in]; or that of gpt-oss, with biases and alternating outputs of gate
    and up projection, each [in, out]. This holds for all mixtures that transformers computes by its
    common code, with a few exceptions (`unadaptable_experts`). Adapters have the names of expert
    weights in the family's checkpoints, without the expert's number: `...mlp.experts.gate_proj`, or
    in Mixtral `...block_sparse_moe.experts.w1`. Checkpoints of gpt-oss stack the experts; adapters
    have the names that `tinker_cookbook.weights` merges into them.
    """
    family = model.config.get_text_config().model_type
    return [
        _fused(name, module, family)
        for name, module in model.named_modules()
        if _is_adaptable(module)
    ]


def unadaptable_experts(experts: Sequence[FusedExperts], model: PreTrainedModel) -> str | None:
    """Return the class of a model's experts if they can't be adapted, else None."""
    known = {each.name for each in experts}
    for name, module in model.named_modules():
        kept = module.named_parameters(recurse=False)
        is_known = name in known or isinstance(module, _ConvNd)
        if not is_known and any(weight.ndim == 3 for _, weight in kept):
            return type(module).__name__
    return None


def _is_adaptable(module: nn.Module) -> bool:
    names = ("is_concatenated", "has_bias", "is_transposed")
    form = tuple(getattr(module, each, None) for each in names)
    known = form in {(True, False, False), (False, True, True)}
    return known and bool(module.has_gate) and not module.has_post_expert_norm


def _fused(name: str, module: Any, family: str) -> FusedExperts:  # noqa: ANN401 - of 60 classes
    count, *sizes = module.down_proj.shape
    width, hidden = sizes if module.is_transposed else reversed(sizes)
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


def guard_gradients(experts: nn.Module) -> None:
    """Compute the experts of a layer by `grouped_linear` in passes that train their weights.

    Args:
        experts: their module, from `find_experts`.
    """
    plain: Forward = experts.forward

    # transformers passes these parameters by name.
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if torch.is_grad_enabled() and cast("Tensor", experts.gate_up_proj).requires_grad:
            return _computed(experts, None, hidden_states, top_k_index, top_k_weights)
        return plain(hidden_states, top_k_index, top_k_weights)

    # Assigned to the instance, so that the module keeps its class and parameter names.
    experts.forward = forward


def with_deltas(
    experts: nn.Module, plain: Forward, parts: Sequence[tuple[slice, ExpertDeltas | None]]
) -> Forward:
    """Return a forward function of a layer's experts that applies adapters.

    Args:
        experts: their module, from `find_experts`.
        plain: the forward function without adapters.
        parts: consecutive positions that cover the pass, each with its deltas.
    """

    def forward(hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        results = []
        for rows, deltas in parts:
            inputs = hidden_ND[rows], index_NK[rows], weights_NK[rows]
            results.append(
                plain(*inputs) if deltas is None else _computed(experts, deltas, *inputs)
            )
        return results[0] if len(results) == 1 else torch.cat(results)

    return forward


def _computed(
    experts: Any,  # noqa: ANN401 - of 60 classes
    deltas: ExpertDeltas | None,
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
) -> Tensor:
    chosen, dtype = index_NK.shape[1], hidden_ND.dtype
    numbers_S, order_S = torch.sort(index_NK.flatten(), stable=True)
    positions_S = order_S // chosen
    ends_E = _ends(numbers_S, experts.num_experts)

    def added(delta: LoraDelta) -> Tensor:
        low_Nr = hidden_ND @ delta.a[0].to(dtype).T * delta.scale
        return grouped_linear(low_Nr.to(dtype)[positions_S], delta.b, ends_E)

    def product(x: Tensor, name: str) -> Tensor:
        weights = getattr(experts, name)
        result = grouped_linear(
            x, weights.transpose(1, 2) if experts.is_transposed else weights, ends_E
        )
        return result + getattr(experts, f"{name}_bias")[numbers_S] if experts.has_bias else result

    gate_up = product(hidden_ND[positions_S], "gate_up_proj")
    if deltas is not None:
        delta = torch.cat([added(deltas.gate), added(deltas.up)], -1)
        if not experts.is_concatenated:
            delta = delta.view(len(delta), 2, -1).transpose(1, 2).flatten(1)
        gate_up = gate_up + delta
    inner_SF = cast("Tensor", experts._apply_gate(gate_up))

    # Summed in the order of each position's experts, not in the order of all pairs.
    back_S = torch.empty_like(order_S).scatter_(
        0, order_S, torch.arange(len(order_S), device=order_S.device)
    )
    shares_S1 = weights_NK.flatten()[order_S].unsqueeze(1)

    def sums(values: Tensor) -> Tensor:
        return (values * shares_S1)[back_S].view(*index_NK.shape, -1).sum(1).to(dtype)

    whole_ND = sums(product(inner_SF, "down_proj"))
    if deltas is None:
        return whole_ND
    low_Nr = sums(grouped_linear(inner_SF, deltas.down.a, ends_E)) * deltas.down.scale
    return whole_ND + low_Nr.to(dtype) @ deltas.down.b[0].to(dtype).T


def _ends(numbers_S: Tensor, count: int) -> Tensor:
    """Return the end offsets of each expert's pairs, int32 [E]."""
    every_E = torch.arange(count, device=numbers_S.device)
    return torch.searchsorted(numbers_S, every_E, right=True, out_int32=True)


def grouped_linear(x: Tensor, weights: Tensor, ends_E: Tensor) -> Tensor:
    """Return [S, out]: each row multiplied by the transposed weight of its expert.

    Args:
        x: [S, in], sorted by expert; experts may have no rows.
        weights: [E, out, in], rounded to the type of x.
        ends_E: int32, the end offset of each expert's rows; the last one is the length of x.
    """
    if not len(x):
        # torch has no backward pass for a product without rows.
        return grouped_linear(nn.functional.pad(x, (0, 0, 0, 1)), weights, torch.ones_like(ends_E))[
            :0
        ]
    step, out = ALIGNED_BYTES // x.element_size(), weights.shape[1]
    inner, outer = -x.shape[1] % step, -out % step
    weights = weights.to(x.dtype)
    if inner or outer:
        weights = nn.functional.pad(weights, (0, inner, 0, outer))
        x = nn.functional.pad(x, (0, inner))
    weights = weights.view_as(weights)
    if weights.requires_grad:
        weights.register_hook(partial(_of_rows, ends_E))  # type: ignore[no-untyped-call]
    return grouped_mm(x, weights.transpose(1, 2), offs=ends_E)[:, :out]


def _of_rows(ends_E: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of expert weights, zeroed where an expert has no rows.

    On some GPUs torch's product leaves uninitialized memory there (pytorch#172439).
    """
    starts_E = nn.functional.pad(ends_E[:-1], (1, 0))
    return gradient.masked_fill((starts_E == ends_E)[:, None, None], 0.0)
