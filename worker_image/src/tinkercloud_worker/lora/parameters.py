"""Trainable tensors as views of one flat buffer.

A model under training is a flat float32 vector of parameters, one of gradients and two of moments,
and each tensor is a view into them. Zeroing, clipping, stepping, copying and saving are therefore a
handful of operations on long vectors, regardless of the number of tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud_protocol.wire.errors import InvalidRequest

_PART = 4096
"""Elements of a flat vector whose squares are summed in float32."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and shape of one trainable tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())


class TensorLayout:
    """The offset of each tensor in a flat buffer."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        offset = 0
        for spec in specs:
            self._places[spec.name] = (offset, spec)
            offset += spec.size
        self.size = offset
        """Elements of the buffer."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "TensorLayout":
        """Return the layout of named tensors, in their order."""
        return cls(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items())

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> Iterable[str]:
        """Return the tensors' names, in their order in the buffer."""
        return self._places.keys()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes by name, in their order in the buffer."""
        return {name: spec.shape for name, (_, spec) in self._places.items()}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a flat buffer, sharing its memory."""
        return {
            name: flat[offset : offset + spec.size].view(spec.shape)
            for name, (offset, spec) in self._places.items()
        }

    def rows(self, flat_GP: Tensor, name: str) -> Tensor:
        """Return one tensor [G, ...] of each of several flat buffers, sharing their memory."""
        offset, spec = self._places[name]
        return flat_GP[:, offset : offset + spec.size].view(len(flat_GP), *spec.shape)

    def check(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Check that names and shapes match this layout.

        Raises:
            InvalidRequest: names or shapes do not match this layout.
        """
        missing = sorted(self._places.keys() - tensors.keys())
        extra = sorted(tensors.keys() - self._places.keys())
        if missing or extra:
            why = "the base model differs, or train_attn, train_mlp or train_unembed"
            raise InvalidRequest(
                f"{what} does not match this model: it lacks {missing[:3]} and has extra"
                f" {extra[:3]} ({why})"
            )
        for name, (_, spec) in self._places.items():
            if tensors[name].shape != spec.shape:
                raise InvalidRequest(
                    f"{what}: {name!r} has shape {list(tensors[name].shape)}, but this model needs"
                    f" {list(spec.shape)} (different rank or base model)"
                )

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], what: str) -> None:
        """Copy named tensors into a flat buffer.

        Raises:
            InvalidRequest: names or shapes do not match this layout.
        """
        self.check(tensors, what)
        self.put(flat, tensors.items())

    def put(self, flat: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of this layout's tensors into a flat buffer, one by one."""
        views = self.views(flat)
        for name, tensor in tensors:
            views[name].copy_(tensor)


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the `.grad` of a tensor of a `Trainable`, which exists before any pass."""
    gradient = tensor.grad
    assert gradient is not None  # noqa: S101 - `Trainable` gives every tensor one
    return gradient


def norm_of(flat: Tensor) -> Tensor:
    """Return the norm of a flat float32 vector as a float64 scalar on its device.

    Squares are summed in float32 part by part, and the partial sums in float64. A single float32
    sum of hundreds of millions of elements loses the last ones: on a CPU the norm would be 10% too
    small.
    """
    even = flat.numel() // _PART * _PART
    parts = torch.linalg.vector_norm(flat[:even].view(-1, _PART), dim=1)
    rest = torch.linalg.vector_norm(flat[even:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, rest[None]]).double())
    return norm


def is_zero(flat: Tensor) -> bool:
    """Whether all elements of a flat vector are zero; NaN is not.

    On a CPU this takes a quarter of the time of `Tensor.any`.
    """
    low, high = flat.aminmax()
    return not (bool(low) or bool(high))


@contextmanager
def unchanged_if_it_fails(gradients: Sequence[Tensor]) -> Iterator[None]:
    """Give flat gradients their values back if the body raises.

    Only nonzero gradients are copied.
    """
    # On a CPU this takes a tenth of the time of the infinity norm.
    extremes = [torch.stack(gradient.aminmax()) for gradient in gradients]
    bounds = torch.stack(extremes).tolist() if extremes else []
    copies = [
        gradient.clone() if low or high else None
        for gradient, (low, high) in zip(gradients, bounds, strict=True)
    ]
    try:
        yield
    except BaseException:
        for gradient, copy in zip(gradients, copies, strict=True):
            if copy is None:
                gradient.zero_()
            else:
                gradient.copy_(copy)
        raise


class Trainable:
    """A flat float32 parameter vector and its gradient, both also accessible as named tensors.

    The named tensors are autograd leaves whose `.grad` is the matching view of the flat gradient:
    autograd adds into it in place, so a backward pass needs no further step.
    """

    def __init__(self, layout: TensorLayout, device: torch.device | None = None) -> None:
        self.layout = layout
        self.flat = torch.nn.Parameter(torch.zeros(layout.size, device=device))
        self.flat.grad = torch.zeros(layout.size, device=device)
        self.tensors = layout.views(self.flat.detach())
        gradients = layout.views(self.flat.grad)
        for name, tensor in self.tensors.items():
            tensor.requires_grad_()
            tensor.grad = gradients[name]

    @property
    def gradient(self) -> Tensor:
        """The accumulated gradient, flat."""
        gradient = self.flat.grad
        assert gradient is not None  # noqa: S101 - set in __init__, never cleared
        return gradient
