"""Losses as the SDK uploads them, and the processes that compute them in tests."""

import atexit
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from tinkercloud_protocol.losses import traced_losses
from tinkercloud_protocol.losses.loss_limits import LossLimits
from tinkercloud_protocol.losses.traced_losses import CustomLoss
from tinkercloud_worker.custom_losses.inputs import DatumInputs
from tinkercloud_worker.custom_losses.messages import LossValues
from tinkercloud_worker.custom_losses.nursery import Nursery
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.custom_losses.uploaded import LossIsComputing, UploadedLoss

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Node = dict[str, Any]


def uploaded(fn: LossFunction, **ranks: int) -> bytes:
    """Return the definition of a function as the SDK uploads it; inputs have rank 1 by default."""
    names = list(inspect.signature(fn).parameters)
    handle = trace_loss(fn, {name: ranks.get(name, 1) for name in names}, "s")  # type: ignore[misc]
    graph = encode_graph(handle)
    inputs = [{"name": each.name, "rank": each.rank} for each in handle.inputs]
    return stored(
        CustomLoss.model_validate({"name": "test", "inputs": inputs, "graph": graph.model_dump()})
    )


def stored(loss: CustomLoss) -> bytes:
    """Return the definition of a loss.

    Raises:
        InvalidRequest: it is not allowed.
    """
    traced_losses.check(loss)
    return loss.model_dump_json().encode()


def of_nodes(*nodes: Node, inputs: Mapping[str, int] | None = None) -> CustomLoss:
    """Return a loss with these nodes between its inputs and its output, which is the last one.

    Args:
        nodes: the nodes.
        inputs: ranks of the inputs; None: logprobs only.
    """
    ranks = inputs or {"logprobs": 1}
    first = [{"op": "placeholder", "name": name, "target": name} for name in ranks]
    output = {"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {}}]}
    last = {"op": "output", "name": "output", "target": "output", "args": [output]}
    return CustomLoss.model_validate(
        {
            "name": "raw",
            "inputs": [{"name": name, "rank": rank} for name, rank in ranks.items()],
            "graph": {"format": 1, "nodes": [*first, *nodes, last]},
        }
    )


def a_node(name: str, target: str, *args: object, **kwargs: object) -> Node:
    """Return a node that calls a function."""
    return {"op": "call_function", "name": name, "target": target, "args": [*args]} | (
        {"kwargs": kwargs} if kwargs else {}
    )


def a_method(name: str, target: str, *args: object, **kwargs: object) -> Node:
    """Return a node that calls a method of its first argument."""
    return {**a_node(name, target, *args, **kwargs), "op": "call_method"}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a node."""
    return {"ref": name}


def total(*names: str) -> list[Node]:
    """Return nodes whose last one is the sum of logprobs and of the sums of these results."""
    nodes = [a_method("sum_0", "sum", ref("logprobs"))]
    for index, name in enumerate(names, 1):
        nodes += [
            a_method(f"float_{index}", "float", ref(name)),
            a_method(f"part_{index}", "sum", ref(f"float_{index}")),
            a_node(f"sum_{index}", "operator.add", ref(f"sum_{index - 1}"), ref(f"part_{index}")),
        ]
    return nodes


@cache
def nursery() -> Nursery:
    """Return the nursery of this test process."""
    started = Nursery.started()
    atexit.register(started.close)
    return started


@cache
def processes(**limits: float) -> LossProcesses:
    """Return processes with these limits, kept for all tests of this process."""
    return LossProcesses(LossLimits.model_validate(limits), nursery())


def computed(
    loss: UploadedLoss, logprobs: Sequence[Tensor], data: Sequence[DatumInputs]
) -> LossValues:
    """Wait for a loss, and return its values."""
    while True:
        try:
            return loss.values([each.numpy() for each in logprobs], data)
        except LossIsComputing as computing:
            computing.done.exception()


def on_server(
    definition: bytes, logprobs: Tensor, **inputs: np.ndarray[Any, Any]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return loss, gradient and metrics of one datum, as a head computes them."""
    return on(processes(), definition, logprobs, **inputs)


def on(
    those: LossProcesses, definition: bytes, logprobs: Tensor, **inputs: np.ndarray[Any, Any]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return loss, gradient and metrics of one datum, computed by certain processes."""
    loss = UploadedLoss(those, "owner", definition)
    data = [DatumInputs(tuple(logprobs.shape), inputs)]
    loss.check_cost(data).result()
    values = computed(loss, [logprobs], data)
    metrics = loss.metrics(data)
    return Tensor(values.losses)[0], Tensor(values.gradients[0]), metrics
