"""Which positions of a pass run with which trained weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.experts import ExpertTerms, FusedExperts
from tinkercloud_worker.lora.linear import Term


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ActiveWeights:
    """Trained tensors a pass runs with, by Hugging Face name.

    With `lora_scale` they are an adapter's A and B; without it, the whole model's weights.
    """

    tensors: Mapping[str, Tensor]
    lora_scale: float | Tensor | None
    """A tensor has the scale of each row and rank, where several adapters are side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Consecutive positions of a pass, and the weights they run with (None: the base as it is).

    The routes of a pass cover all of its positions, in order.
    """

    rows: slice
    """Of the positions [B, T], flattened."""
    weights: ActiveWeights | None


def route_all(weights: ActiveWeights | None) -> list[Route]:
    """Return the routing of a pass whose positions all run with the same weights."""
    return [Route(slice(None), weights)]


def term_of(target: Target, weights: ActiveWeights | None) -> Term | None:
    """Return the term that weights add to a linear layer; None if none."""
    if weights is None or weights.lora_scale is None or target.a_name not in weights.tensors:
        return None
    tensors = weights.tensors
    return Term(tensors[target.a_name], tensors[target.b_name], weights.lora_scale)


def expert_terms(experts: FusedExperts, weights: ActiveWeights | None) -> ExpertTerms | None:
    """Return the terms that weights add to the experts of a layer; None if none."""
    gate, up, down = (term_of(target, weights) for target in experts.targets)
    # One switch is about all three: all of them are adapted, or none.
    return ExpertTerms(gate, up, down) if gate and up and down else None
