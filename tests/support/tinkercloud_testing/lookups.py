"""What embeddings should have for a gradient."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn


def gradient_of_lookups(embedding: nn.Module) -> Callable[[], Tensor]:
    """Return what adds up the gradients of all that is looked up from here on, in float64.

    Args:
        embedding: of ids in any order; what it finds is in the same.
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
