"""Interprets the custom losses of clients (`tinkercloud_protocol.custom_losses`).

A loss runs on the CPU, node by node, on copies of one datum's tensors. Before any datum runs, the
graph runs on tensors without data (torch's meta device), which costs next to nothing: that finds
errors in shapes, and bounds what the real run will compute, forward and backward. The time of the
real run is bounded too, because some operations are slower for their size than others. A loss that
fails, or that costs too much, fails its own request only.

Shape legend: N positions of a datum, K targets per position, R positions of a pack.
"""

import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tinkercloud_protocol import loss_operations
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import Array, Datum, FloatArray

MAX_DATUM_ELEMENTS = 1 << 26
"""Elements that a loss may compute for one datum, over all nodes and their gradients."""
MAX_BATCH_ELEMENTS = 1 << 28
"""Elements that a loss may compute for one request; takes seconds on a CPU."""
MAX_SECONDS = 60.0
"""CPU time that a loss may take for the data of one pass: a bound for unusually slow operations."""
_NODE_ELEMENTS = 1024
"""What a node counts as at least: the interpreter takes longer than torch for small tensors."""
_LARGEST_NUMBER = 1 << 53
_LARGEST_EXPONENT = 64

Value = Any
"""An argument or a result of an operation: a tensor, a number, a shape and others."""

_NAMESPACES = {"torch": torch, "functional": functional, "special": torch.special}
_NUMBERS = (int, float, bool)
_PRODUCTS = {"matmul", "mm", "mv", "dot"}
_REDUCING = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_similarity"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
"""Operations that broadcast their tensors before they reduce them."""
_SPLITS = {"unbind", "split", "chunk"}
_MOST_PIECES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class DatumInputs:
    """The inputs of a custom loss for one datum."""

    logprobs_shape: tuple[int, ...]
    """[N] or [N, K], as the client's targets."""
    values: Mapping[str, Array]
    """By name, without `logprobs`: float32 or int64, of the declared rank."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class _Device:
    """The device on which the loss runs, whichever the client named."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A node that can be run."""

    name: str
    operation: str
    """Name of the function or method, without its module."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def cost_before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return what the result does not show of the cost: values that are computed on the way.

        Raises:
            InvalidRequest: the result would have too many parts.
        """
        if self.operation in _SPLITS and _num_pieces(self.operation, args, kwargs) > _MOST_PIECES:
            raise InvalidRequest(f"{self.operation} may return at most {_MOST_PIECES} tensors")
        if self.operation not in _REDUCING:
            return 0
        shapes = [v.shape for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    def terms(self, args: tuple[Any, ...]) -> int:
        """Return how many products are summed for each element of the result."""
        if self.operation not in _PRODUCTS or not args or not isinstance(args[0], Tensor):
            return 1
        return max(args[0].shape[-1], 1) if args[0].ndim else 1

    def cost_of_gradients(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: int
    ) -> int:
        """Return what the backward pass of the node costs.

        The gradient of an argument has its elements, and takes as many operations as the node: a
        single element of a long tensor has a gradient of the tensor's length, and the gradient of
        a product is a product.

        Args:
            args: the arguments.
            kwargs: the named arguments.
            forward: what the node itself costs.
        """
        given = [list(_tensors(value)) for value in (*args, *kwargs.values())]
        adapted = [[v for v in tensors if v.requires_grad] for tensors in given]
        return sum(
            forward + sum(max(value.numel(), _NODE_ELEMENTS) for value in tensors)
            for tensors in adapted
            if tensors
        )


@dataclass(frozen=True, slots=True)
class LossInput:
    """An input of a loss: `logprobs`, or a key of `loss_fn_inputs`."""

    name: str
    rank: int


class CompiledLoss:
    """A checked loss whose operations were looked up."""

    def __init__(self, definition: bytes) -> None:
        """Look up the operations of a loss that was checked, as it is stored."""
        stored = json.loads(definition)
        self.name: str = stored["name"]
        self.inputs = [LossInput(each["name"], each["rank"]) for each in stored["inputs"]]
        *nodes, output = stored["graph"]["nodes"]
        loss, metrics = _decoded(output["args"][0])
        self._loss: str = loss.name
        self._metrics: dict[str, str] = {key: value.name for key, value in metrics.items()}
        self._placeholders = [node["name"] for node in nodes if node["op"] == "placeholder"]
        self._steps = [_step(node) for node in nodes if node["op"] != "placeholder"]

    def run(
        self, inputs: Sequence[Tensor], spend: Callable[[int], None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of one datum.

        Args:
            inputs: one for each of the loss's inputs; in-place operations may change them.
            spend: called after each node with the elements of its results and gradients.

        Raises:
            InvalidRequest: an operation failed, or the results are not scalars.
        """
        values: dict[str, Any] = dict(zip(self._placeholders, inputs, strict=True))
        device = inputs[0].device
        with torch.device(device):
            for step in self._steps:
                args = tuple(_resolved(arg, values, device) for arg in step.args)
                kwargs = {key: _resolved(arg, values, device) for key, arg in step.kwargs.items()}
                try:
                    cost = step.cost_before(args, kwargs)
                    values[step.name] = step.function(*args, **kwargs)
                    cost += _elements(values[step.name], step.terms(args))
                    cost += step.cost_of_gradients(args, kwargs, cost)
                except InvalidRequest as error:
                    raise self._failed(step.name, error.message) from None
                except Exception as error:  # noqa: BLE001 - of any operation, on a client's values
                    raise self._failed(step.name, str(error).split("\n", maxsplit=1)[0]) from None
                spend(cost)
        return self._checked(values)

    def _failed(self, node: str, reason: str) -> InvalidRequest:
        return InvalidRequest(f"custom loss {self.name!r}, node {node!r}: {reason[:300]}")

    def _checked(self, values: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = values[self._loss], {k: values[v] for k, v in self._metrics.items()}
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.requires_grad:
            raise self._failed(self._loss, "the loss must be a scalar that depends on logprobs")
        for key, value in metrics.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise self._failed(self._metrics[key], f"metric {key!r} must be a scalar tensor")
        return loss, metrics


@lru_cache(maxsize=256)
def compiled(definition: bytes) -> CompiledLoss:
    """Return a stored loss that was checked, ready to run."""
    return CompiledLoss(definition)


def inputs_of(inputs: Sequence[LossInput], datum: Datum, where: str) -> DatumInputs:
    """Return the inputs of a loss for a datum, whose targets were checked.

    Raises:
        InvalidRequest: one is missing, or has another rank than the loss has declared.
    """
    logprobs, *others = inputs
    values: dict[str, Array] = {}
    for given in others:
        place = f"{where}.loss_fn_inputs[{given.name!r}]"
        array = datum.inputs.get(given.name)
        if array is None:
            raise InvalidRequest(f"{place}: required by the custom loss")
        if given.rank == 0 and array.size == 1:
            array = array.reshape(())
        if array.ndim != given.rank:
            raise InvalidRequest(
                f"{place}: has rank {array.ndim}, but the custom loss declared {given.rank}"
            )
        values[given.name] = array
    shape = datum.inputs["target_tokens"].shape
    if len(shape) != logprobs.rank:
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['target_tokens']: has rank {len(shape)}, but the custom loss"
            f" declared logprobs with {logprobs.rank}"
        )
    return DatumInputs(shape, values)


def check_cost(definition: bytes, data: Sequence[DatumInputs]) -> None:
    """Check the shapes and the cost of a loss for all data of a request.

    Raises:
        InvalidRequest: an operation does not fit the shapes, or the loss costs too much.
    """
    total, in_time = 0, _time_limit(compiled(definition).name)
    for datum in data:
        shapes = tuple((v.shape, v.dtype.str) for _, v in sorted(datum.values.items()))
        names = tuple(sorted(datum.values))
        total += _cost(definition, datum.logprobs_shape, names, shapes)
        in_time(total)
        if total > MAX_BATCH_ELEMENTS:
            raise InvalidRequest(
                f"custom loss {compiled(definition).name!r}: computes more than"
                f" {MAX_BATCH_ELEMENTS} elements for this request, with those of gradients (each"
                f" node counts as at least {_NODE_ELEMENTS}); send less data per request, or use a"
                " simpler loss"
            )


@lru_cache(maxsize=4096)
def _cost(
    definition: bytes,
    logprobs_shape: tuple[int, ...],
    names: tuple[str, ...],
    shapes: tuple[tuple[tuple[int, ...], str], ...],
) -> int:
    """Return the number of elements that a loss computes for a datum of these shapes."""
    loss = compiled(definition)
    spent = 0

    def spend(elements: int) -> None:
        nonlocal spent
        spent += elements
        if spent > MAX_DATUM_ELEMENTS:
            raise InvalidRequest(
                f"custom loss {loss.name!r}: computes more than {MAX_DATUM_ELEMENTS} elements for"
                f" one datum with logprobs of shape {list(logprobs_shape)}; use a simpler loss"
            )

    empty = {
        name: torch.empty(shape, dtype=_dtype(np.dtype(kind)), device="meta")
        for name, (shape, kind) in zip(names, shapes, strict=True)
    }
    empty["logprobs"] = torch.empty(logprobs_shape, device="meta", requires_grad=True)
    with torch.enable_grad():
        value, _ = loss.run([empty[given.name] for given in loss.inputs], spend)
        try:
            torch.autograd.grad(value, empty["logprobs"], allow_unused=True)
        except RuntimeError as error:
            # Other errors are of operations whose gradient needs values, which these tensors lack.
            if "inplace operation" in str(error):
                raise InvalidRequest(
                    f"custom loss {loss.name!r}: it changes a tensor in place that its gradient"
                    " needs; use an operation that returns a new one"
                ) from None
    return spent


def losses_of_data(
    definition: bytes, logprobs: Sequence[Tensor], data: Sequence[DatumInputs]
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Run a loss on each datum.

    Args:
        definition: the stored loss.
        logprobs: for each datum, [N] or [N, K] on the CPU; the losses are differentiable in them.
        data: the other inputs of each datum.

    Returns:
        The losses, float64, one for each datum, and the metrics of each.

    Raises:
        InvalidRequest: an operation failed, or the losses take more than `MAX_SECONDS`.
    """
    loss = compiled(definition)
    results, in_time = [], _time_limit(loss.name)
    for lp, datum in zip(logprobs, data, strict=True):
        # Copies, because operations in place change them.
        given = {name: torch.from_numpy(value.copy()) for name, value in datum.values.items()}
        given["logprobs"] = lp
        results.append(loss.run([given[each.name] for each in loss.inputs], in_time))
    return torch.stack([value.double() for value, _ in results]), [found for _, found in results]


def metrics_of(
    definition: bytes, logprobs: Sequence[FloatArray], data: Sequence[DatumInputs]
) -> dict[str, float]:
    """Return the metrics of a request: the sum over its data, or their mean.

    Args:
        definition: the stored loss.
        logprobs: for each datum, float32 [N] or [N, K].
        data: the other inputs of each datum.
    """
    leaves = [torch.from_numpy(array).clone().requires_grad_() for array in logprobs]
    with torch.enable_grad():
        _, found = losses_of_data(definition, leaves, data)
    totals: dict[str, float] = {}
    for metrics in found:
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + float(value.detach())
    return {
        key: value / len(data) if key.endswith(":mean") else value for key, value in totals.items()
    }


def _time_limit(name: str) -> Callable[[int], None]:
    """Return a function, called after each node, that raises once the time of a loss is over."""
    end = time.thread_time() + MAX_SECONDS

    def check(_elements: int) -> None:
        if time.thread_time() > end:
            raise InvalidRequest(
                f"custom loss {name!r}: took more than {MAX_SECONDS:g} seconds; send less data per"
                " request, or use a simpler loss"
            )

    return check


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _step(node: Mapping[str, Value]) -> _Step:
    name, target = node["name"], node["target"]
    args = tuple(_decoded(arg) for arg in node["args"])
    kwargs = {key: _decoded(arg) for key, arg in node["kwargs"].items()}
    if "device" in kwargs:
        kwargs["device"] = _Device()
    if node["op"] == "call_function":
        function = loss_operations.canonical(target) or ""
        return _Step(name, function.rpartition(".")[2], function_of(function), args, kwargs)
    if target == "to":
        args = tuple(_Device() if isinstance(arg, str) else arg for arg in args)
    return _Step(name, target, _method(target), args, kwargs)


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a canonical name."""
    if name == "getattr":
        return _attribute
    namespace, _, function = name.partition(".")
    if namespace == "operator":
        return operator.getitem if function == "getitem" else _arithmetic(function)
    found: Callable[..., Any] = getattr(_NAMESPACES[namespace], function)
    return found


def _method(name: str) -> Callable[..., Any]:
    def call(value: object, *args: Value, **kwargs: Value) -> Value:
        if not isinstance(value, Tensor):
            raise InvalidRequest(f"{name}() needs a tensor, got {type(value).__name__}")
        return getattr(value, name)(*args, **kwargs)

    return call


def _attribute(value: object, name: str) -> Value:
    # Of tensors, and of the named tuples of reductions. Anything else has more attributes than a
    # client may read.
    if not isinstance(value, Tensor | tuple):
        raise InvalidRequest(f"{name} needs a tensor, got {type(value).__name__}")
    return getattr(value, name)


def _arithmetic(name: str) -> Callable[..., Any]:
    """Return a function of the module operator, for tensors and bounded numbers only."""
    function: Callable[..., Any] = getattr(operator, name)

    def apply(*args: Value) -> Value:
        if not all(isinstance(arg, (Tensor, *_NUMBERS)) for arg in args):
            kinds = ", ".join(type(arg).__name__ for arg in args)
            raise InvalidRequest(f"operator.{name} needs tensors or numbers, got {kinds}")
        is_plain = all(isinstance(arg, _NUMBERS) for arg in args)
        if name == "pow" and is_plain and abs(args[1]) > _LARGEST_EXPONENT:
            raise InvalidRequest(f"exponents of numbers may be at most {_LARGEST_EXPONENT}")
        result = function(*args)
        if is_plain and isinstance(result, int) and abs(result) > _LARGEST_NUMBER:
            raise InvalidRequest(f"an integer of more than {_LARGEST_NUMBER}")
        return result

    return apply


def _decoded(value: Value) -> Value:
    """Return an argument in which results of nodes are `_Ref`s; it was checked."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _CONSTANTS:
        return _CONSTANTS[kind](content)
    if kind == "dict":
        return {key: _decoded(each) for key, each in content.items()}
    parts = tuple(_decoded(each) for each in content)
    return _Slice(parts) if kind == "slice" else parts


_CONSTANTS: Mapping[str, Callable[[Value], Value]] = {
    "ref": _Ref,
    "ellipsis": lambda _: Ellipsis,
    "float": float,
    "dtype": lambda name: getattr(torch, name),
    "device": lambda _: _Device(),
    "layout": lambda _: torch.strided,
    "memory_format": lambda _: torch.contiguous_format,
}
"""How arguments of format 1 that contain no others are read."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The parts of a slice, which may be results of nodes."""

    parts: tuple[Any, ...]


def _resolved(value: Value, values: Mapping[str, Any], device: torch.device) -> Value:
    match value:
        case _Ref():
            return values[value.name]
        case _Device():
            return device
        case _Slice():
            return slice(*(_resolved(each, values, device) for each in value.parts))
        case tuple() | list():
            return type(value)(_resolved(each, values, device) for each in value)
        case dict():
            return {key: _resolved(each, values, device) for key, each in value.items()}
        case _:
            return value


def _num_pieces(operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return how many tensors an operation returns, or more."""
    if not args or not isinstance(args[0], Tensor) or not args[0].ndim:
        return 1
    longest = int(max(args[0].shape))
    if operation == "unbind":
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return int(args[0].shape[dim])
    names = ("chunks",) if operation == "chunk" else ("split_size", "split_size_or_sections")
    size = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), 1)
    if not isinstance(size, int):
        return 1  # as many as a list that a request has in full
    return int(size) if operation == "chunk" else math.ceil(longest / max(size, 1))


def _elements(result: Value, inner: int) -> int:
    """Return what a node has cost: the elements of its results, times those summed for each."""
    if isinstance(result, Tensor):
        # A dimension counts even in a tensor without elements: it can be split into parts.
        return int(max(result.numel() * inner, _NODE_ELEMENTS, *result.shape))
    if isinstance(result, tuple | list):
        return sum((_elements(each, inner) for each in result), _NODE_ELEMENTS)
    return _NODE_ELEMENTS


def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
