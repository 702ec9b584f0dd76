"""Copies of models that the ranks of a group have made, each of its own part.

The parts are in the object stores of the ranks' nodes. They are assembled where they are needed, on
any thread and in any process of the cluster, while the ranks continue.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.engine.ranks import Outline
from tinkercloud_worker.engine.tensor_slices import Piece, joined
from tinkercloud_worker.engine.trainer import Gradient, TrainingState, WeightsCopy
from tinkercloud_worker.training.trained_model import MOMENTS


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What the ranks have exported of a model (`engine.ranks.Share`).

    Call one of its methods, once: parts are released when they are read. Each raises Unavailable if
    a part was lost with its node.
    """

    outline: Outline
    """What rank 0 says of the model."""
    size_bytes: int
    """Bytes of all tensors together."""
    parts: list[Any]
    """References to lists of pieces."""

    @classmethod
    def of(cls, shares: Sequence[tuple[Outline, list[Any]]]) -> "Shares":
        """Return those of all ranks, from what `RankGroup.call_in_parts` returns."""
        size = sum(outline.shared_bytes for outline, _ in shares)
        return cls(shares[0][0], size, [part for _, parts in shares for part in parts])

    def weights(self) -> WeightsCopy:
        """Assemble weights."""
        return WeightsCopy(self.outline.lora, self._tensors())

    def state(self) -> TrainingState:
        """Assemble weights and moments."""
        tensors = self._tensors()
        suffixes = tuple(f".{moment}" for moment in MOMENTS)
        moments = {name: each for name, each in tensors.items() if name.endswith(suffixes)}
        weights = {name: each for name, each in tensors.items() if name not in moments}
        return TrainingState(WeightsCopy(self.outline.lora, weights), moments, self.outline.step)

    def gradient(self) -> Gradient | None:
        """Assemble a gradient; None if it is zero."""
        tensors = self._tensors()
        return tensors if any(each.any() for each in tensors.values()) else None

    def _tensors(self) -> dict[str, Tensor]:
        return joined(self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        while self.parts:
            try:
                pieces: Sequence[Piece] = ray.get(self.parts.pop())
            except RayError as error:
                raise Unavailable(
                    "a node of the trainer's ranks was lost before its part of a model was read;"
                    " send the request again"
                ) from error
            yield from pieces
