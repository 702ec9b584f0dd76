"""create_custom_loss: a loss that a client has traced, as data.

The SDK traces a function of one datum's tensors with torch.fx and sends the nodes of the graph
(`tinker.types.CustomLossGraph`, format 1). Nothing in it is code: each node names an operation of
`loss_operations`; others are refused.

A loss belongs to a session. It is stored in the object store, where every head finds it.
"""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkercloud_protocol.losses.loss_operations import (
    ATTRIBUTES,
    DTYPES,
    METHODS,
    TEXTS,
    canonical,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Items, Name, WireModel, parse_json

MAX_NODES = 512
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_LOSSES_PER_SESSION = 256
_MAX_ARGUMENTS = 2048
"""Values in the arguments of one node."""
_MAX_DEPTH = 6
_MAX_INTEGER = 1 << 53

Json = Any
"""A value of JSON."""

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_CUDA = re.compile(r"cuda:[0-9]{1,3}")
_WRAPPERS = ("ref", "tuple", "dict", "slice", "ellipsis", "float", "dtype", "device", "layout")


class CustomLossInput(WireModel):
    """An input: `logprobs`, or a key of `loss_fn_inputs`."""

    name: Name
    rank: Literal[0, 1, 2]
    """0 is a scalar, 1 is [N], 2 is [N, K]."""


class CustomLossNode(WireModel):  # type: ignore[no-redef]  # pydantic's plugin adds **kwargs
    """A node of the graph, as torch.fx records it."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Name
    target: Name
    args: Annotated[list[Any], Field(max_length=64)] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(WireModel):
    """A graph, in the order of execution."""

    format: Literal[1] = 1
    nodes: Annotated[Items[CustomLossNode], Field(min_length=2, max_length=MAX_NODES)]


class CustomLoss(WireModel):
    """A loss of one datum: what create_custom_loss sends, and what is stored."""

    name: Name
    inputs: Annotated[Items[CustomLossInput], Field(min_length=1, max_length=MAX_INPUTS)]
    graph: CustomLossGraph


class CreateCustomLossRequest(CustomLoss):
    """POST create_custom_loss."""

    session_id: Name
    custom_loss_seq_id: Annotated[int, Field(ge=0, lt=MAX_LOSSES_PER_SESSION)]


@dataclass(frozen=True, slots=True)
class CustomLossId:
    """The id of a loss, which is also the id of the request that created it."""

    session_id: str
    index: int

    @classmethod
    def parse(cls, text: str) -> "CustomLossId":
        """Read an id.

        Raises:
            InvalidRequest: it is not of the form `<session>:loss:<index>`.
        """
        session_id, role, index = [*text.split(":"), "", ""][:3]
        is_number = index.isascii() and index.isdigit() and len(index) < 10
        if role != "loss" or text.count(":") != 2 or not session_id or not is_number:
            raise InvalidRequest(
                f"loss_id {text[:160]!r} is malformed: expected the loss_id that create_custom_loss"
                " has returned, '<session>:loss:<index>'"
            )
        return cls(session_id, int(index))

    def __str__(self) -> str:
        return f"{self.session_id}:loss:{self.index}"

    @property
    def key(self) -> str:
        """Key in the object store."""
        return f"{folder_of(self.session_id)}/{self.index}.json"


def folder_of(session_id: str) -> str:
    """Return the folder of a session's losses in the object store."""
    return f"losses/{session_id}"


def encode(loss: CustomLoss) -> bytes:
    """Return the file of a loss: the SHA-256 of its definition, a line break, and the definition.

    The definition is the loss as JSON.
    """
    fields = {"name", "inputs", "graph"}
    definition = loss.model_dump_json(include=fields).encode()
    return sha256(definition).hexdigest().encode() + b"\n" + definition


def read(content: bytes, loss_id: CustomLossId) -> bytes:
    """Return the definition in the file of a loss, which `compiled` takes.

    Args:
        content: content of the file.
        loss_id: the loss, for messages.

    Raises:
        InvalidRequest: the file is damaged, or this release does not allow the loss.
    """
    digest, _, definition = content.partition(b"\n")
    if digest != sha256(definition).hexdigest().encode():
        raise InvalidRequest(
            f"loss {str(loss_id)!r} can't be read: its file {loss_id.key} is damaged (it differs"
            " from its checksum); create the loss again"
        )
    check(parse_json(CustomLoss, definition))
    return definition


def check(loss: CustomLoss) -> None:
    """Check that a loss consists of allowed operations on earlier results.

    Raises:
        InvalidRequest: it does not; the message names the node.
    """
    _check_inputs(loss.inputs)
    *inner, output = loss.graph.nodes
    placeholders = [node.target for node in inner if node.op == "placeholder"]
    if placeholders != [given.name for given in loss.inputs]:
        raise InvalidRequest(
            f"graph.nodes: the placeholders are {placeholders}, but inputs lists"
            f" {[given.name for given in loss.inputs]}; they must be equal, in the same order"
        )
    known: set[str] = set()
    for index, node in enumerate(inner):
        where = f"graph.nodes[{index}] ({node.name!r})"
        if node.name in known:
            raise InvalidRequest(f"{where}: two nodes have this name; each needs its own")
        _check_operation(node, where)
        _check_arguments(node, known, where)
        known.add(node.name)
    _check_output(output, known)


_REFUSED_ARGUMENTS = {"out", "generator", "requires_grad"}


def _check_inputs(inputs: list[CustomLossInput]) -> None:
    names = [given.name for given in inputs]
    if names[0] != "logprobs" or inputs[0].rank == 0 or len(set(names)) < len(names):
        raise InvalidRequest(
            f"inputs: must begin with 'logprobs' of rank 1 or 2 and name each input once, got"
            f" {[(given.name, given.rank) for given in inputs]}"
        )
    for name in names:
        if not _INPUT_NAME.fullmatch(name):
            raise InvalidRequest(
                f"inputs: {name!r} must consist of lowercase letters, digits and underscores"
            )


def _check_operation(node: CustomLossNode, where: str) -> None:
    match node.op:
        case "placeholder":
            is_allowed = not node.args and not node.kwargs
        case "call_function":
            is_allowed = canonical(node.target) is not None
        case "call_method":
            is_allowed = node.target in METHODS
        case _:
            is_allowed = False
    if not is_allowed:
        raise InvalidRequest(
            f"{where}: {node.op} {node.target!r} is not allowed in a custom loss. Allowed are the"
            " usual functions of torch, torch.nn.functional and operator whose result has a shape"
            " that does not depend on values, without random numbers and side effects; or pass a"
            " function instead of a LossHandle to forward_backward_custom, which runs it on the"
            " client"
        )
    if canonical(node.target) == "getattr" and node.op == "call_function":
        attribute = node.args[1] if len(node.args) == 2 else None
        if not isinstance(attribute, str) or attribute not in ATTRIBUTES:
            raise InvalidRequest(
                f"{where}: attribute {str(attribute)[:80]!r} is not allowed; use one of"
                f" {', '.join(sorted(ATTRIBUTES))}"
            )


def _check_arguments(node: CustomLossNode, known: set[str], where: str) -> None:
    refused = _REFUSED_ARGUMENTS & node.kwargs.keys()
    if refused:
        raise InvalidRequest(f"{where}: the argument {min(refused)!r} is not allowed")
    pending: list[tuple[Any, int]] = [([*node.args, *node.kwargs.values()], 0)]
    count = 0
    while pending:
        value, depth = pending.pop()
        count += 1
        if depth > _MAX_DEPTH or count > _MAX_ARGUMENTS:
            raise InvalidRequest(
                f"{where}: has more than {_MAX_ARGUMENTS} values as arguments, or more than"
                f" {_MAX_DEPTH} levels of them"
            )
        pending.extend((part, depth + 1) for part in _parts(value, known, where))


def _parts(value: Json, known: set[str], where: str) -> list[Any]:
    """Return the values within an argument, which is checked itself."""
    match value:
        case list():
            return value
        case dict():
            return _wrapped_parts(value, known, where)
        case bool() | None | float():
            return []
        case int() if abs(value) <= _MAX_INTEGER:
            return []
        case str():
            if value in TEXTS or value in ATTRIBUTES or _CUDA.fullmatch(value):
                return []
            raise InvalidRequest(
                f"{where}: the text {value[:80]!r} is not allowed as an argument; allowed are"
                f" {', '.join(sorted(TEXTS))} (norms: a number, or 'fro')"
            )
        case _:
            pass
    raise InvalidRequest(f"{where}: argument {str(value)[:80]!r} is too large")


def _wrapped_parts(value: dict[str, Any], known: set[str], where: str) -> list[Any]:
    if len(value) == 1:
        ((kind, content),) = value.items()
        match kind, content:
            case "ref", str() if content in known:
                return []
            case "ref", _:
                raise InvalidRequest(f"{where}: refers to {str(content)[:80]!r}, no earlier node")
            case (("tuple" | "slice"), list()):
                return content
            case "dict", dict():
                return list(content.values())
            case "ellipsis", True:
                return []
            case "float", ("inf" | "-inf" | "nan"):
                return []
            case "dtype", str() if content in DTYPES:
                return []
            case (("device" | "layout" | "memory_format"), str()):
                return []
            case _:
                pass
    raise InvalidRequest(
        f"{where}: argument {str(value)[:80]!r} is not in format 1; use one of the one-key objects"
        f" {', '.join(_WRAPPERS)} with a value that they accept"
    )


def _pair(value: Json) -> tuple[Json, Json]:
    """Return the two values that a loss returns."""
    values = value["tuple"] if isinstance(value, dict) and "tuple" in value else value
    if isinstance(values, list) and len(values) == 2:
        return values[0], values[1]
    return None, None


def _check_output(node: CustomLossNode, known: set[str]) -> None:
    loss, metrics = _pair(node.args[0]) if node.op == "output" and node.args else (None, None)
    values = metrics.get("dict") if isinstance(metrics, dict) else None
    if not _is_ref(loss, known) or not isinstance(values, dict) or len(values) > MAX_METRICS:
        raise InvalidRequest(
            "graph.nodes: the last node must be the output (loss, metrics): a tensor, and a dict of"
            f" at most {MAX_METRICS} tensors"
        )
    for key, value in values.items():
        if not _METRIC.fullmatch(key) or not _is_ref(value, known):
            raise InvalidRequest(
                f"graph.nodes: metric {key[:80]!r} must be a tensor named custom/<name>:sum or"
                " custom/<name>:mean, in lowercase"
            )


def _is_ref(value: Json, known: set[str]) -> bool:
    if not isinstance(value, dict) or value.keys() != {"ref"}:
        return False
    return isinstance(value["ref"], str) and value["ref"] in known
