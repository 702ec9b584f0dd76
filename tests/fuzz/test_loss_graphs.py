"""Random losses of allowed operations with extreme values: each ends in one of three ways.

A loss has a value, is refused, or is ended with its process. Anything else ends the head, or leaves
it with an answer that it can't read; here, the test's process stands for the head.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkercloud_protocol.losses import loss_operations
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.training.uploaded_losses import (
    a_method,
    a_node,
    of_nodes,
    on,
    processes,
    ref,
    stored,
)
from tinkercloud_testing.training.uploaded_losses import total as total_of
from tinkercloud_worker.custom_losses.nursery import LossEnded

_EDGES = [0, 1, -1, 2, 7, 2**31, -(2**31), 2**53, -(2**53), 2**62]
_INTEGERS = [*_EDGES, 2**63 - 1, -(2**63)]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e38, -1e38, 1e-45, 3.4e38]
_FUNCTIONS = [
    *(f"torch.{name}" for name in sorted(loss_operations.TORCH)),
    *(f"torch.nn.functional.{name}" for name in sorted(loss_operations.FUNCTIONAL)),
    *(f"torch.special.{name}" for name in sorted(loss_operations.SPECIAL)),
    *(f"operator.{name}" for name in sorted(loss_operations.OPERATORS)),
]
_DTYPES = [{"dtype": name} for name in ("int8", "int16", "int32", "int64", "uint8", "float16")]
_CONSTANTS: list[Any] = [
    *_EDGES,
    *_FLOATS,
    *({"float": name} for name in ("inf", "-inf", "nan")),
    *_DTYPES,
    *sorted(loss_operations.TEXTS),
    True,
    None,
    [0, 1],
    {"tuple": [1, -1]},
    {"slice": [None, 2, None]},
]
_NAMED = [
    *("dim", "keepdim", "p", "rounding_mode", "dtype", "min", "max", "correction", "reduction"),
    *("n", "k"),
]


@st.composite
def graphs(draw: st.DrawFn) -> list[Any]:
    """Draw nodes on logprobs, x (integers) and y (floats), the last of which is the loss."""
    known, nodes = ["logprobs", "x", "y"], list[Any]()
    for index in range(draw(st.integers(1, 5))):
        argument = st.sampled_from(known).map(ref) | st.sampled_from(_CONSTANTS)
        args = [ref(draw(st.sampled_from(known))), *draw(st.lists(argument, max_size=3))]
        named = draw(st.dictionaries(st.sampled_from(_NAMED), argument, max_size=1))
        name = f"n{index}"
        if draw(st.booleans()):
            nodes.append(a_node(name, draw(st.sampled_from(_FUNCTIONS)), *args))
        else:
            methods = sorted(loss_operations.METHODS)
            nodes.append(a_method(name, draw(st.sampled_from(methods)), *args))
        nodes[-1]["kwargs"] = named
        known.append(name)
    return [*nodes, *total_of(known[-1])]


def test_random_losses_with_extreme_values_never_reach_the_head(cases: Cases) -> None:
    outcomes = Counter[str]()
    those = processes(max_loss_seconds=10, max_loss_bytes=1 << 28)
    integers = st.lists(st.sampled_from(_INTEGERS), min_size=4, max_size=4)
    floats = st.lists(st.sampled_from(_FLOATS), min_size=4, max_size=4)

    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graphs(), integers, floats)
    def send(nodes: list[Any], x: list[int], y: list[float]) -> None:
        logprobs = -torch.rand(4)
        try:
            definition = stored(of_nodes(*nodes, inputs={"logprobs": 1, "x": 1, "y": 1}))
            on(those, definition, logprobs, x=np.array(x, np.int64), y=np.array(y, np.float32))
        except InvalidRequest:
            outcomes["refused"] += 1
        except LossEnded as error:
            outcomes["ended"] += 1
            # `make fuzz` shows which operations end processes.
            print(error.message, nodes)  # noqa: T201
        else:
            outcomes["computed"] += 1
        cases.count()

    send()

    assert outcomes["computed"]
