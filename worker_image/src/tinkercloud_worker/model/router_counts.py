"""Counts the tokens that experts are sent, in the passes that are counted.

Shape legend: L layers that have experts, E experts of a layer, N positions of a pass, K experts
that each is sent to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RouterCounts:
    """Watches the experts of models. One pass at a time is counted."""

    def __init__(self) -> None:
        self._experts = 0
        self._chosen: list[Tensor] | None = None
        """Of the layers that have run in the pass that is counted: which experts, [N, K]."""

    def watch(self, experts: nn.Module) -> None:
        """Count what a layer's experts are sent from now on.

        Args:
            experts: their module, of `experts.find_experts`.
        """
        self._experts = int(experts.num_experts)  # type: ignore[arg-type] # an int, typed as any attribute
        experts.register_forward_pre_hook(self._note, with_kwargs=True)

    @contextmanager
    def counting(self, rows: Sequence[slice]) -> Iterator[list[Tensor | None]]:
        """Count a forward pass; layers that are recomputed afterwards are not counted again.

        Args:
            rows: positions of the pass that are counted together.

        Yields:
            A list that has, once the pass has run, for each of `rows` int64 [L, E]; None if the
            model has no experts.
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
            # The name is transformers'.
            self._chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def _counted(self, chosen: Sequence[Tensor], rows: slice) -> Tensor | None:
        if not chosen:
            return None
        index_LNK = torch.stack([index_NK[rows] for index_NK in chosen])
        flat_LS = index_LNK.flatten(1)
        zeros_LE = flat_LS.new_zeros(len(chosen), self._experts)
        # Unlike bincount, it does not wait for the GPU.
        return zeros_LE.scatter_add_(1, flat_LS, torch.ones_like(flat_LS))
