"""The expected gradient of embeddings."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn


def gradient_of_lookups(embedding: nn.Module) -> Callable[[], Tensor]:
    """Return a function that sums the gradients of all later lookups in float64.

    Args:
        embedding: Embedding of ids in any order; its output has the same order.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_module: nn.Module, ids: tuple[Tensor], found: Tensor) -> None:
        if found.requires_grad:
            found.register_hook(lambda gradient: seen.append((ids[0], gradient)))

    embedding.register_forward_hook(note)

    def add_up() -> Tensor:
        total = torch.zeros(cast("Tensor", embedding.weight).shape, dtype=torch.float64)
        for ids, gradient in seen:
            total.index_add_(0, ids.flatten(), gradient.flatten(0, -2).double())
        return total

    return add_up
