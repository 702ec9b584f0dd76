"""Custom losses of clients: what is allowed, that it equals torch, and what it may cost."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tinkercloud_protocol.losses import loss_operations
from tinkercloud_protocol.losses import traced_losses as format_1
from tinkercloud_protocol.losses.traced_losses import CustomLoss
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.training.uploaded_losses import (
    LossFunction,
    a_node,
    of_nodes,
    on_server,
    stored,
    uploaded,
)
from tinkercloud_worker.custom_losses import costs, graphs
from tinkercloud_worker.custom_losses.inputs import DatumInputs

# The first loss waits until a process that computes losses has imported torch.
pytestmark = pytest.mark.timeout(180)


def a_call(target: str, *args: object, op: str = "call_function", **kwargs: object) -> Any:
    return {**a_node("n", target, {"ref": "logprobs"}, *args, **kwargs), "op": op}


def on_client(fn: LossFunction, logprobs: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    loss, _ = fn(leaf, *inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def policy_gradient(
    logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss with what such functions use: shapes, slices, ratios, reductions, metrics."""
    n = logprobs.shape[0]
    ratio = torch.exp(logprobs - logprobs.detach())
    clipped = ratio.clamp(0.8, 1.2)
    kept = torch.where(mask > 0, torch.minimum(ratio * advantages, clipped * advantages), 0.0)
    total = -kept.sum() / mask.sum().clamp(min=1)
    total += 0.1 * functional.softplus(-logprobs[1:]).mean() + abs(logprobs[:-1]).max(dim=0).values
    best = functional.logsigmoid(logprobs).max() + torch.logsumexp(logprobs, dim=-1)
    entropy = -(torch.softmax(logprobs, -1) * torch.log_softmax(logprobs, -1)).sum()
    loss = total + 0.01 * entropy + best / n
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": mask.sum()}


def test_a_usual_loss_equals_torch() -> None:
    logprobs = -torch.rand(7)
    advantages, mask = torch.randn(7), (torch.rand(7) > 0.3).float()
    definition = uploaded(policy_gradient)

    loss, gradient, metrics = on_server(
        definition, logprobs, advantages=advantages.numpy(), mask=mask.numpy()
    )

    expected, its_gradient = on_client(policy_gradient, logprobs, advantages, mask)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, its_gradient, atol=1e-6, rtol=1e-6)
    assert metrics == {
        "custom/ratio:mean": pytest.approx(1.0),
        "custom/tokens:sum": pytest.approx(float(mask.sum())),
    }


def test_targets_of_several_tokens_and_integer_inputs_are_read() -> None:
    def distillation(logprobs: Tensor, teacher: Tensor, target_tokens: Tensor) -> Any:
        kept = (target_tokens >= 5).float()
        gap = (teacher.exp() * (teacher - logprobs) * kept).sum(-1)
        return gap.sum(), {}

    logprobs, teacher = -torch.rand(4, 3), -torch.rand(4, 3)
    targets = torch.arange(12).reshape(4, 3)
    definition = uploaded(distillation, logprobs=2, teacher=2, target_tokens=2)

    loss, gradient, _ = on_server(
        definition, logprobs, teacher=teacher.numpy(), target_tokens=targets.numpy()
    )

    expected, its_gradient = on_client(distillation, logprobs, teacher, targets)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, its_gradient, atol=1e-6, rtol=1e-6)


UNARY: Sequence[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.sigmoid,
    torch.tanh,
    torch.abs,
    functional.softplus,
    functional.logsigmoid,
    functional.gelu,
    lambda x: -x,
    lambda x: x**2,
    lambda x: x.clamp(-1.0, 1.0),
    lambda x: x / (1 + abs(x)),
    lambda x: x[1:].mean() + x,
    lambda x: x - x.mean(),
    lambda x: torch.softmax(x, dim=-1),
    lambda x: x.cumsum(0) / x.shape[0],
    lambda x: torch.flip(x, [0]),
    lambda x: x.unsqueeze(1).expand(-1, 2).sum(dim=1),
    torch.special.expit,
    lambda x: x.sort().values,
]
BINARY: Sequence[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: 1 - x + 2 * y,
    torch.minimum,
    torch.maximum,
    lambda x, y: torch.where(x > y, x, y.detach()),
    lambda x, y: torch.stack([x, y]).mean(0),
    lambda x, y: torch.cat([x[:1], y[1:]]),
    lambda x, y: x * (torch.dot(x, y) / (1 + torch.dot(y, y))),
    lambda x, y: functional.huber_loss(x, y, reduction="none"),
]


@st.composite
def programs(draw: st.DrawFn) -> LossFunction:
    """Random functions of two inputs: each step applies an operation to earlier results."""
    steps = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 18), st.integers(0, 9), st.integers(0, 9)),
            min_size=1,
            max_size=12,
        )
    )

    def loss(logprobs: Tensor, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = [logprobs, other]
        for is_binary, operation, left, right in steps:
            x, y = values[left % len(values)], values[right % len(values)]
            if is_binary:
                values.append(BINARY[operation % len(BINARY)](x, y))
            else:
                values.append(UNARY[operation % len(UNARY)](x))
        total = values[-1].mean() + 0.5 * logprobs.sum()
        return total, {"custom/last:mean": values[-1].sum()}

    return loss


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 1 << 30), st.integers(2, 9))
def test_random_graphs_equal_torch(fn: LossFunction, seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(length, generator=generator)
    other = torch.randn(length, generator=generator)

    loss, gradient, metrics = on_server(uploaded(fn), logprobs, other=other.numpy())

    expected, its_gradient = on_client(fn, logprobs, other)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(gradient, its_gradient, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert metrics.keys() == {"custom/last:mean"}


@pytest.mark.parametrize(
    "node",
    [
        a_call("builtins.eval", "1"),
        a_call("eval", "1"),
        a_call("torch.load", "x"),
        a_call("torch.ops.load_library", "x"),
        a_call("torch.rand", 3),
        a_call("torch.nn.functional.dropout"),
        a_call("operator.methodcaller", "x"),
        a_call("operator.attrgetter", "x"),
        a_call("math.factorial"),
        a_call("getattr", "__class__"),
        a_call("getattr", "grad_fn"),
        a_call("item", op="call_method"),
        a_call("__reduce__", op="call_method"),
        a_call("register_hook", {"ref": "logprobs"}, op="call_method"),
        a_call("tolist", op="call_method"),
        a_call("weight", op="get_attr"),
        a_call("module", op="call_module"),
        a_call("torch.add", {"ref": "later"}),
        a_call("torch.add", {"code": "x"}),
        a_call("torch.add", 1, out={"ref": "logprobs"}),
        a_call("torch.sum", {"dtype": "object"}),
        a_call("torch.add", 1 << 80),
        a_call("torch.sum", [[[[[[[[1]]]]]]]]),
        a_call("torch.norm", "nuc"),
        a_call("torch.norm", p="nuc"),
        a_call("norm", p="nuc", op="call_method"),
        a_call("torch.nn.functional.normalize", "nuc", 0),
        a_call("torch.nn.functional.normalize", p="nuc"),
    ],
    ids=lambda node: str(node["target"]),
)
def test_other_operations_are_refused(node: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"graph\.nodes"):
        format_1.check(of_nodes(node))


def test_each_allowed_name_exists_in_torch() -> None:
    names = [f"torch.{name}" for name in loss_operations.TORCH]
    names += [f"functional.{name}" for name in loss_operations.FUNCTIONAL]
    names += [f"special.{name}" for name in loss_operations.SPECIAL]
    names += [f"operator.{name}" for name in loss_operations.OPERATORS]

    assert all(callable(graphs.function_of(name)) for name in names)
    assert [name for name in loss_operations.METHODS if not hasattr(Tensor, name)] == []


def cost_of(loss: CustomLoss, length: int = 8, data: int = 1) -> None:
    check_cost(stored(loss), [DatumInputs((length,), {})] * data)


def check_cost(definition: bytes, data: Sequence[DatumInputs]) -> None:
    costs.check_cost(definition, Counter(datum.shape for datum in data), 1 << 29)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (a_call("repeat", 1 << 40, op="call_method"), "more than"),
        (a_call("expand", 1 << 30, 8, op="call_method"), "more than"),
        (a_call("new_zeros", {"tuple": [1 << 20, 1 << 20]}, op="call_method"), "more than"),
        (a_call("sum", 5, op="call_method"), "Dimension out of range"),
        (a_call("view", 3, op="call_method"), "invalid for input of size"),
        (a_call("torch.exp"), "must be a scalar"),
        (a_call("detach", op="call_method"), "must be a scalar"),
        (a_call("torch.add", "mean"), "node 'n'"),
    ],
)
def test_errors_and_excessive_costs_are_found_without_data(node: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        cost_of(of_nodes(node))


def test_numbers_stay_small() -> None:
    length: dict[str, Any] = {"op": "call_method", "name": "size", "target": "size"}
    length["args"] = [{"ref": "logprobs"}, 0]
    power = {"op": "call_function", "name": "n", "target": "operator.pow"}

    for base, exponent in (({"ref": "size"}, 10**9), (1 << 50, {"ref": "size"})):
        with pytest.raises(InvalidRequest, match=r"at most 64|more than"):
            cost_of(of_nodes(length, {**power, "args": [base, exponent]}))


def test_shapes_that_depend_on_values_are_refused() -> None:
    mask: dict[str, Any] = {"op": "call_function", "name": "m", "target": "operator.gt"}
    mask["args"] = [{"ref": "logprobs"}, 0]
    picked = a_call("operator.getitem", {"ref": "m"})
    total = {"op": "call_method", "name": "t", "target": "sum", "args": [{"ref": "n"}]}

    with pytest.raises(InvalidRequest, match="node 'n'"):
        cost_of(of_nodes(mask, picked, total))


def test_the_cost_of_all_data_is_bounded() -> None:
    loss = of_nodes(a_call("sum", op="call_method"))

    cost_of(loss, data=1000)
    with pytest.raises(InvalidRequest, match="send less data per request"):
        cost_of(loss, data=300_000)


def test_gradients_are_part_of_the_cost() -> None:
    def one_by_one(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = logprobs[0]
        for place in range(1, 200):
            total = total + logprobs[place]
        return total, {}

    def detached(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        constant = logprobs.detach()
        return logprobs[0] + sum(constant[place] for place in range(1, 200)), {}

    # The gradient of each element is as long as the sequence.
    length = costs.MAX_DATUM_ELEMENTS // 200
    with pytest.raises(InvalidRequest, match="for one datum"):
        check_cost(uploaded(one_by_one), [DatumInputs((length,), {})])
    check_cost(uploaded(one_by_one), [DatumInputs((length // 8,), {})])
    check_cost(uploaded(detached), [DatumInputs((length,), {})])


def test_the_gradient_of_a_product_costs_products() -> None:
    def squared(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.mm(logprobs, logprobs).sum(), {}

    definition = uploaded(squared, logprobs=2)
    side = round((costs.MAX_DATUM_ELEMENTS / 2) ** (1 / 3))

    with pytest.raises(InvalidRequest, match="for one datum"):
        check_cost(definition, [DatumInputs((side, side), {})])
    check_cost(definition, [DatumInputs((side // 2, side // 2), {})])


def test_a_wrong_index_fails_without_affecting_others() -> None:
    def pick(logprobs: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.gather(0, places).sum(), {}

    definition = uploaded(pick)
    logprobs = -torch.rand(3)

    with pytest.raises(InvalidRequest, match="out of bounds"):
        on_server(definition, logprobs, places=np.array([7]))
    loss, _, _ = on_server(definition, logprobs, places=np.array([2]))
    assert float(loss) == pytest.approx(float(logprobs[2]))


@pytest.mark.parametrize(
    "nodes",
    [
        [a_node("z", "torch.zeros", [1 << 30, 0]), a_node("n", "torch.unbind", {"ref": "z"}, 0)],
        [a_node("z", "torch.zeros", [1 << 16]), a_node("n", "torch.split", {"ref": "z"}, 1)],
        [
            a_node("a", "torch.zeros", [1 << 17, 1]),
            a_node("b", "torch.zeros", [1, 1 << 16]),
            a_node("n", "torch.nn.functional.kl_div", {"ref": "a"}, {"ref": "b"}, reduction="sum"),
        ],
    ],
    ids=["parts of nothing", "many parts", "broadcast before a reduction"],
)
def test_costs_that_the_result_does_not_show_are_found(nodes: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"computes more than|at most 4096 tensors"):
        cost_of(of_nodes(*nodes))


@pytest.mark.parametrize(
    "node",
    [
        a_node("n", "getattr", {"ref": "logprobs"}, ["shape"]),
        a_node("n", "torch.zeros", [2], requires_grad=True),
    ],
    ids=["an attribute that is no name", "a leaf of its own"],
)
def test_arguments_of_other_types_are_refused(node: Any) -> None:
    with pytest.raises(InvalidRequest, match="not allowed"):
        format_1.check(of_nodes(node))


def test_an_output_that_refers_to_no_name_is_refused() -> None:
    loss = of_nodes(a_call("torch.sum"))
    loss.graph.nodes[-1].args[0]["tuple"][0]["ref"] = []

    with pytest.raises(InvalidRequest, match="must be the output"):
        format_1.check(loss)


def test_a_gradient_that_cannot_be_computed_is_found_without_data() -> None:
    ratio = a_node("e", "torch.exp", {"ref": "logprobs"})
    overwritten = a_node("i", "operator.iadd", {"ref": "e"}, 1)

    with pytest.raises(InvalidRequest, match="in place"):
        cost_of(of_nodes(ratio, overwritten, a_node("n", "torch.sum", {"ref": "i"})))
