"""Attention masks of a decoding step, in the form the base model's architecture wants.

Shape legend: B running sequences, L positions read.
"""

from typing import Any

import torch
from torch import Tensor

from tinkercloud_worker.packing import mask_kinds


class Masks:
    """Which cached positions each sequence's new position may attend to."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - transformers' have no common type
        self._kinds = mask_kinds(config)
        self._window = int(getattr(config, "sliding_window", None) or 0)

    def of(self, positions_B: Tensor, length: int) -> object:
        """Return which of `length` cached positions each row's new position may attend to.

        A boolean tensor [B, 1, 1, L], or one for each kind of layer where a model has several.
        """
        return self._for_model(self._allowed(positions_B, length))

    def added(self, positions_B: Tensor, length: int, dtype: torch.dtype) -> object:
        """Return the same as what is added to scores: 0 and minus infinity.

        It is what torch makes of a boolean mask in every layer, made once.
        """
        masks = self._allowed(positions_B, length)
        for kind, mask in masks.items():
            masks[kind] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        return self._for_model(masks)

    def _allowed(self, positions_B: Tensor, length: int) -> dict[str, Tensor]:
        query_B1 = positions_B.unsqueeze(1)
        key_L = torch.arange(length, device=positions_B.device)
        causal_BL = key_L <= query_B1
        masks = {}
        for kind in self._kinds:
            recent_BL = key_L > query_B1 - self._window
            mask_BL = causal_BL & recent_BL if kind == "sliding_attention" else causal_BL
            masks[kind] = mask_BL[:, None, None]
        return masks

    def _for_model(self, masks: dict[str, Tensor]) -> object:
        return masks if len(masks) > 1 else masks[self._kinds[0]]
