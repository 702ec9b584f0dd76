"""Counts the tokens that routers send to each expert.

Shape legend: L layers with experts, E experts of a layer, N positions of a pass, K experts per
position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RouterCounts:
    """Counts the tokens of experts, one pass at a time."""

    def __init__(self) -> None:
        self._experts = 0
        self._chosen: list[Tensor] | None = None
        """The chosen experts [N, K] of each layer that has run in the counted pass."""

    def watch(self, experts: nn.Module) -> None:
        """Start counting the tokens of a layer's experts.

        Args:
            experts: their module, from `experts.find_experts`.
        """
        self._experts = int(experts.num_experts)  # type: ignore[arg-type] # an int, typed as any attribute
        experts.register_forward_pre_hook(self._note, with_kwargs=True)

    @contextmanager
    def counting(self, rows: Sequence[slice]) -> Iterator[list[Tensor | None]]:
        """Count a forward pass; recomputation in the backward pass is not counted again.

        Args:
            rows: ranges of positions, each counted separately.

        Yields:
            A list that holds int64 [L, E] for each of `rows` after the pass; None if the model has
            no experts.
        """
        counts: list[Tensor | None] = []
        self._chosen = []
        try:
            yield counts
            counts += [self._counted(self._chosen, each) for each in rows]
        finally:
            self._chosen = None

    def _note(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._chosen is not None:
            # transformers passes this parameter by name.
            self._chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def _counted(self, chosen: Sequence[Tensor], rows: slice) -> Tensor | None:
        if not chosen:
            return None
        index_LNK = torch.stack([index_NK[rows] for index_NK in chosen])
        flat_LS = index_LNK.flatten(1)
        zeros_LE = flat_LS.new_zeros(len(chosen), self._experts)
        # Unlike bincount, this does not synchronize with the GPU.
        return zeros_LE.scatter_add_(1, flat_LS, torch.ones_like(flat_LS))
