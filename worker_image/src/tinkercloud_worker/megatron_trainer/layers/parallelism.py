"""How a model is divided over ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The number of ranks along each dimension; the remaining ranks are data-parallel replicas."""

    tensor: int = 1
    """Ranks that share each weight."""
    pipeline: int = 1
    """Ranks that share the layers (pipeline stages)."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of a layer; they are among the other ranks, not in addition."""
