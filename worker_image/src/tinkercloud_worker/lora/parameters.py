"""Trainable tensors as views of one flat buffer.

A model under training is a flat float32 vector of parameters, one of gradients and two of moments,
each tensor a view into them. So zeroing, clipping, stepping, copying and saving are a handful of
operations on long vectors, whatever the number of tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud_protocol.errors import InvalidRequest

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


class Layout:
    """Where each tensor lies in a flat buffer."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        offset = 0
        for spec in specs:
            self._places[spec.name] = (offset, spec)
            offset += spec.size
        self.size = offset
        """Elements of the whole buffer."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
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

    def check(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Check that tensors are those of this layout.

        Raises:
            InvalidRequest: names or shapes are not this layout's.
        """
        missing = sorted(self._places.keys() - tensors.keys())
        extra = sorted(tensors.keys() - self._places.keys())
        if missing or extra:
            raise InvalidRequest(
                f"{what} does not fit this model: missing {missing[:3]}, unexpected {extra[:3]}"
                " (another base model, or other train_attn/train_mlp/train_unembed switches)"
            )
        for name, (_, spec) in self._places.items():
            if tensors[name].shape != spec.shape:
                raise InvalidRequest(
                    f"{what}: {name!r} has shape {list(tensors[name].shape)}, this model's is"
                    f" {list(spec.shape)} (another rank or base model)"
                )

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor], what: str) -> None:
        """Copy named tensors into a flat buffer.

        Raises:
            InvalidRequest: names or shapes are not this layout's.
        """
        self.check(tensors, what)
        self.put(flat, tensors.items())

    def put(self, flat: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of this layout's tensors into a flat buffer, one by one."""
        views = self.views(flat)
        for name, tensor in tensors:
            views[name].copy_(tensor)


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the `.grad` of a tensor of a `Trainable`, which is there before any pass."""
    gradient = tensor.grad
    assert gradient is not None  # noqa: S101 - `Trainable` gives every tensor one
    return gradient


def norm_of(flat: Tensor) -> Tensor:
    """Return the norm of a flat float32 vector of any length, as a float64 scalar on its device.

    Squares are summed in float32 part by part, and those sums in float64. One float32 sum of
    hundreds of millions would lose the last ones: on a CPU the norm comes out a tenth too small.
    """
    even = flat.numel() // _PART * _PART
    parts = torch.linalg.vector_norm(flat[:even].view(-1, _PART), dim=1)
    rest = torch.linalg.vector_norm(flat[even:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, rest[None]]).double())
    return norm


class Trainable:
    """A flat float32 parameter vector with its gradient, both also seen as named tensors.

    The named tensors are autograd leaves whose `.grad` is the matching view of the flat gradient:
    autograd adds into it in place, so a backward pass needs no further step.
    """

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
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
