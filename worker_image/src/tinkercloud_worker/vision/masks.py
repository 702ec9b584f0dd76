"""Attention masks under which the tokens of an image see each other (Gemma 3).

Each sequence of a pack has its own mask. One mask over a pack would let a model with NaN in its
keys or values change other sequences, because a hidden key still takes part in the products.

Shape legend: R rows of a sequence, L keys that they read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud_worker.vision.spans import ImageSpan, visible


class ImageMasks:
    """The masks of the sequences of a pass."""

    def __init__(self, spans: Sequence[ImageSpan], device: torch.device) -> None:
        self._spans = spans
        self._device = device
        self._made: dict[tuple[int, int | None], Tensor] = {}

    def of(self, number: int, window: int | None) -> Tensor | None:
        """Return the mask [1, 1, R, L] of a sequence; None if it has no images.

        Args:
            number: index of the sequence in the pass.
            window: number of positions visible to each, including itself; None for all before it.
        """
        span = self._spans[number]
        if not span.images:
            return None
        key = number, window
        if key not in self._made:
            seen_RL = torch.from_numpy(visible(span, window))
            self._made[key] = seen_RL.to(self._device)[None, None]
        return self._made[key]
