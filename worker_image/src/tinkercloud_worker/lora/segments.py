"""Assigns trained weights to the positions of a pass."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.deltas import LoraDelta
from tinkercloud_worker.lora.experts import ExpertDeltas, FusedExperts
from tinkercloud_worker.lora.parameters import Trainable

_A = ".lora_A."


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ActiveWeights:
    """The trained tensors of a pass, by Hugging Face name.

    With `lora_scale` they are an adapter's A and B; without it, the weights of a full model.
    """

    tensors: Mapping[str, Tensor]
    lora_scale: float | Tensor | None
    """A tensor holds the scale of each row and rank, where several adapters are concatenated."""
    trainable: Trainable | None = None
    """What the tensors are views of, where that is known."""

    @property
    def rank(self) -> int:
        """Rank of an adapter."""
        return next(tensor.shape[-2] for name, tensor in self.tensors.items() if _A in name)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSegment:
    """Consecutive positions of a pass, and the weights they run with (None: the base model).

    The segments of a pass cover all of its positions in order.
    """

    rows: slice
    """Range of the flattened positions [B, T]."""
    weights: ActiveWeights | None


def single_segment(weights: ActiveWeights | None) -> list[WeightSegment]:
    """Return the segments of a pass whose positions all run with the same weights."""
    return [WeightSegment(slice(None), weights)]


def delta_of(target: Target, weights: ActiveWeights | None) -> LoraDelta | None:
    """Return the delta that weights add to a linear layer; None if there is none."""
    if weights is None or weights.lora_scale is None or target.a_name not in weights.tensors:
        return None
    tensors = weights.tensors
    return LoraDelta(tensors[target.a_name], tensors[target.b_name], weights.lora_scale)


def expert_deltas(experts: FusedExperts, weights: ActiveWeights | None) -> ExpertDeltas | None:
    """Return the deltas that weights add to the experts of a layer; None if there are none."""
    gate, up, down = (delta_of(target, weights) for target in experts.targets)
    # One switch selects all three: either all are adapted, or none.
    return ExpertDeltas(gate, up, down) if gate and up and down else None
