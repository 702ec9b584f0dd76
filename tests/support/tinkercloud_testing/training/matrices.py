"""Records the shapes of the matrices that a computation creates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class _Matrices(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        self.shapes |= {tuple(t.shape) for t in made if t.ndim > 1 and not t._is_view()}
        return result


def matrices_of(computation: Callable[[], object]) -> set[tuple[int, ...]]:
    """Return the shapes of the matrices that a computation creates from Python in this thread.

    This includes backward passes that are written in Python or recompute layers. Views and vectors
    are excluded: flat weights and gradients have any length.
    """
    matrices = _Matrices()
    with matrices:
        computation()
    return matrices.shapes
