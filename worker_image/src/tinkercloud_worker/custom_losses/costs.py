"""What a custom loss will cost, before it runs.

The graph runs on tensors without data (torch's meta device), forward and backward, under a meter
that sees each operation of torch's lowest level. So it counts what the results of the nodes do not
show: values within an operation, its gradient, and tensors that are alive at the same time. A loss
that is accepted may still be slow or end its process: values decide that, which nothing here sees.

The check has a cost too, about a tenth of a millisecond for each operation. It therefore examines
only some of the shapes of a request.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.custom_losses.graphs import Step, Value, apply, compiled
from tinkercloud_worker.custom_losses.inputs import DatumShape

MAX_DATUM_ELEMENTS = 1 << 26
"""Elements that a loss may compute for one datum, over all nodes and their gradients."""
MAX_BATCH_ELEMENTS = 1 << 28
"""Elements that a loss may compute for one request; takes seconds on a CPU."""
NODE_ELEMENTS = 1024
"""What a node counts as at least: the interpreter takes longer than torch for small tensors."""
_MAX_EXAMINED_NODES = 512
"""Nodes that are examined for a request, but of two shapes at least."""
_MAX_EXAMINED_SHAPES = 8
_PRODUCTS = {"matmul", "mm", "mv", "dot", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "vdot"}
_REDUCING = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_similarity"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
"""Operations that broadcast their tensors before they reduce them."""


def check_cost(definition: bytes, shapes: Mapping[DatumShape, int], max_bytes: int) -> None:
    """Check the shapes and the cost of a loss for all data of a request.

    If the data have many shapes, the smallest, the largest and some between them are examined; each
    other one counts as the next larger one.

    Args:
        definition: the stored loss.
        shapes: the shapes of the data, with the number of data of each.
        max_bytes: most bytes of tensors that may exist at the same time.

    Raises:
        InvalidRequest: an operation does not fit the shapes, or the loss costs too much.
    """
    loss = compiled(definition)
    total, cost = 0, 0
    ordered = sorted(shapes, key=_size)
    examined = set(_sample(ordered, loss.num_nodes))
    # The last one was examined, so that none counts as nothing.
    for shape in reversed(ordered):
        if shape in examined:
            cost = _cost(definition, shape, max_bytes)
        total += cost * shapes[shape]
        if total > MAX_BATCH_ELEMENTS:
            raise InvalidRequest(
                f"custom loss {loss.name!r}: computes more than"
                f" {MAX_BATCH_ELEMENTS} elements for this request, with those of gradients (each"
                f" node counts as at least {NODE_ELEMENTS}); send less data per request, or use a"
                " simpler loss"
            )


def import_all() -> None:
    """Import what torch imports at its first operation on tensors without data: for seconds."""
    values = torch.empty(2, device="meta", requires_grad=True)
    with Meter("", DatumShape((2,), ()), 1 << 20):
        torch.where(values > 0, values.exp(), 0.0).sum()


def _size(shape: DatumShape) -> int:
    return shape.num_elements


def _sample(shapes: Sequence[DatumShape], num_nodes: int) -> Sequence[DatumShape]:
    """Return some of the shapes, with the first and the last one."""
    most = min(_MAX_EXAMINED_SHAPES, max(_MAX_EXAMINED_NODES // max(num_nodes, 1), 2))
    if len(shapes) <= most:
        return shapes
    return [shapes[round(place * (len(shapes) - 1) / (most - 1))] for place in range(most)]


@lru_cache(maxsize=4096)
def _cost(definition: bytes, shape: DatumShape, max_bytes: int) -> int:
    """Return the number of elements that a loss computes for a datum of this shape."""
    loss = compiled(definition)
    meter = Meter(loss.name, shape, max_bytes)
    empty = {
        name: torch.empty(size, dtype=_dtype(np.dtype(kind)), device="meta")
        for name, size, kind in shape.values
    }
    empty["logprobs"] = torch.empty(shape.logprobs, device="meta", requires_grad=True)
    with torch.enable_grad(), meter:
        value, _ = loss.run([empty[given.name] for given in loss.inputs], meter.apply)
        try:
            torch.autograd.grad(value, empty["logprobs"], allow_unused=True)
        except RuntimeError as error:
            # Other errors are of operations whose gradient needs values, which these tensors lack.
            if "inplace operation" in str(error):
                raise InvalidRequest(
                    f"custom loss {loss.name!r}: it changes a tensor in place that its gradient"
                    " needs; use an operation that returns a new one"
                ) from None
    return meter.elements


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts the elements that operations compute, and the bytes that exist at the same time.

    It raises InvalidRequest once a datum costs too much.
    """

    def __init__(self, name: str, shape: DatumShape, max_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._shape, self._max_bytes = name, shape, max_bytes
        self._of_nodes = 0
        """Elements by the results of nodes."""
        self._measured = 0
        """Elements by torch's own operations."""
        self._alive = 0
        self.peak_bytes = 0
        """The most bytes of tensors that existed at the same time."""
        self._storages: set[int] = set()

    @property
    def elements(self) -> int:
        """Elements so far: by nodes, or by torch's own operations if these are more."""
        return max(self._of_nodes, self._measured)

    def apply(self, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        """Run a node, and count it (`graphs.Apply`)."""
        cost = _cost_before(step, args, kwargs)
        result = apply(step, args, kwargs)
        cost += _elements(result, _terms(step.operation, args))
        self._of_nodes += cost + _cost_of_gradients(args, kwargs, cost)
        self._check()
        return result

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Value],
        types: Sequence[type],
        args: tuple[Value, ...] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        """Run an operation of torch, and count it."""
        given = [tensor for value in (args, *(kwargs or {}).values()) for tensor in _tensors(value)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **(kwargs or {}))
        is_view, computed = not func._schema.is_mutable, 0
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                is_view = False
                self._note(storage)
            computed += tensor.numel()
        if not is_view:
            terms = _terms(func._schema.name.rpartition("::")[2], args)
            read = sum(tensor.numel() for tensor in given)
            self._measured += max(computed * terms, read)
        self._check()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._alive += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._alive)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self._alive -= size

    def _check(self) -> None:
        where = f"for one datum with logprobs of shape {list(self._shape.logprobs)}"
        if self.elements > MAX_DATUM_ELEMENTS:
            raise InvalidRequest(
                f"custom loss {self._name!r}: computes more than {MAX_DATUM_ELEMENTS} elements"
                f" {where}; use a simpler loss"
            )
        if self._alive > self._max_bytes:
            raise InvalidRequest(
                f"custom loss {self._name!r}: has more than {self._max_bytes} bytes of tensors at"
                f" the same time {where} (half of limits.max_loss_bytes); use shorter sequences or"
                " a simpler loss"
            )


def _cost_before(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return what the result does not show of the cost: values that are computed on the way."""
    if step.operation not in _REDUCING:
        return 0
    shapes = [v.shape for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _terms(operation: str, args: tuple[Any, ...]) -> int:
    """Return how many products are summed for each element of the result."""
    if operation not in _PRODUCTS:
        return 1
    lengths = [arg.shape[-1] for arg in args if isinstance(arg, Tensor) and arg.ndim]
    # Some add a tensor to the product of the next two.
    return max(lengths[1] if operation.startswith(("add", "badd")) else lengths[0], 1)


def _cost_of_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: int) -> int:
    """Return what the backward pass of a node costs.

    The gradient of an argument has its elements, and takes as many operations as the node: a single
    element of a long tensor has a gradient of the tensor's length, and the gradient of a product is
    a product.

    Args:
        args: the arguments.
        kwargs: the named arguments.
        forward: what the node itself costs.
    """
    given = [list(_tensors(value)) for value in (*args, *kwargs.values())]
    adapted = [[v for v in tensors if v.requires_grad] for tensors in given]
    return sum(
        forward + sum(max(value.numel(), NODE_ELEMENTS) for value in tensors)
        for tensors in adapted
        if tensors
    )


def _elements(result: Value, inner: int) -> int:
    """Return what a node has cost: the elements of its results, times those summed for each."""
    if isinstance(result, Tensor):
        # A dimension counts even in a tensor without elements: it can be split into parts.
        return int(max(result.numel() * inner, NODE_ELEMENTS, *result.shape))
    if isinstance(result, tuple | list):
        return sum((_elements(each, inner) for each in result), NODE_ELEMENTS)
    return NODE_ELEMENTS


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
