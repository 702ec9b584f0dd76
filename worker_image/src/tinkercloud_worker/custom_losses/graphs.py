"""Interprets the custom losses of clients (`tinkercloud_protocol.losses.traced_losses`).

A loss runs on the CPU, node by node, on one datum's tensors, or on tensors without data (torch's
meta device), which finds errors in shapes. Nothing here is safe from what a loss may do to its
process: torch trusts its callers, and some values end it. So losses with data run in processes that
may die (`child`).
"""

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tinkercloud_protocol.losses import loss_operations
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.custom_losses.inputs import LossInput

_LARGEST_NUMBER = 1 << 53
_LARGEST_EXPONENT = 64

Value = Any
"""An argument or a result of an operation: a tensor, a number, a shape and others."""

_NAMESPACES = {"torch": torch, "functional": functional, "special": torch.special}
_NUMBERS = (int, float, bool)
_SPLITS = {"unbind", "split", "chunk"}
_MOST_PIECES = 4096


@dataclass(frozen=True, slots=True)
class _Ref:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class _Device:
    """The device on which the loss runs, whichever the client named."""


@dataclass(frozen=True, slots=True)
class Step:
    """A node that can be run."""

    name: str
    operation: str
    """Name of the function or method, without its module."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    last_of: tuple[str, ...] = ()
    """Earlier results that no later node uses."""


Apply = Callable[[Step, tuple[Any, ...], Mapping[str, Any]], Value]
"""Runs a node with its arguments; returns its result."""


def apply(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Run a node.

    Raises:
        InvalidRequest: the result would have too many parts.
        Exception: whatever torch raises.
    """
    if step.operation in _SPLITS and _num_pieces(step.operation, args, kwargs) > _MOST_PIECES:
        raise InvalidRequest(f"{step.operation} may return at most {_MOST_PIECES} tensors")
    return step.function(*args, **kwargs)


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
        steps = [_step(node) for node in nodes if node["op"] != "placeholder"]
        self._steps = _with_last_uses(steps, {self._loss, *self._metrics.values()})

    @property
    def num_nodes(self) -> int:
        """Number of operations."""
        return len(self._steps)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics, in the order in which `run` returns them."""
        return list(self._metrics)

    def run(
        self, inputs: Sequence[Tensor], apply_step: Apply = apply
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the metrics of one datum.

        Results that no later node needs are freed, unless the gradient needs them.

        Args:
            inputs: one for each of the loss's inputs; in-place operations may change them.
            apply_step: runs each node.

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
                    values[step.name] = apply_step(step, args, kwargs)
                except InvalidRequest as error:
                    raise self._failed(step.name, error.message) from None
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - of any operation, on a client's values
                    if is_out_of_memory(error):
                        raise MemoryError from None
                    raise self._failed(step.name, str(error).split("\n", maxsplit=1)[0]) from None
                del args, kwargs
                for name in step.last_of:
                    del values[name]
        return self._checked(values)

    def _failed(self, node: str, reason: str) -> InvalidRequest:
        return InvalidRequest(f"custom loss {self.name!r}, node {node!r}: {reason[:300]}")

    def _checked(self, values: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
        loss = values[self._loss]
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.requires_grad:
            raise self._failed(self._loss, "the loss must be a scalar that depends on logprobs")
        metrics = []
        for key, node in self._metrics.items():
            value = values[node]
            if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
                raise self._failed(node, f"metric {key!r} must be a scalar tensor")
            metrics.append(value)
        return loss, metrics


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an operation failed because its process may not take more memory."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "bad_alloc")
    )


def _with_last_uses(steps: Sequence[Step], needed: AbstractSet[str]) -> list[Step]:
    """Return steps that say which results no later one uses, except those that are needed."""
    seen, found = set(needed), list[Step]()
    for step in reversed(steps):
        used = {step.name, *_names_in([*step.args, *step.kwargs.values()])}
        found.append(replace(step, last_of=tuple(sorted(used - seen))))
        seen |= used
    return found[::-1]


def _names_in(value: Value) -> Iterator[str]:
    """Yield the names of the results in an argument."""
    match value:
        case _Ref():
            yield value.name
        case _Slice():
            yield from _names_in(value.parts)
        case tuple() | list():
            for each in value:
                yield from _names_in(each)
        case dict():
            yield from _names_in(list(value.values()))
        case _:
            pass


@lru_cache(maxsize=256)
def compiled(definition: bytes) -> CompiledLoss:
    """Return a stored loss that was checked, ready to run."""
    return CompiledLoss(definition)


def _step(node: Mapping[str, Value]) -> Step:
    name, target = node["name"], node["target"]
    args = tuple(_decoded(arg) for arg in node["args"])
    kwargs = {key: _decoded(arg) for key, arg in node["kwargs"].items()}
    if "device" in kwargs:
        kwargs["device"] = _Device()
    if node["op"] == "call_function":
        function = loss_operations.canonical(target) or ""
        return Step(name, function.rpartition(".")[2], function_of(function), args, kwargs)
    if target == "to":
        args = tuple(_Device() if isinstance(arg, str) else arg for arg in args)
    return Step(name, target, _method(target), args, kwargs)


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
