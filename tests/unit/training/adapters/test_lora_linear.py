"""LoRA deltas over a float32 and a half-precision base."""

import pytest
import torch
from torch import Tensor, nn

from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.deltas import DeltaSpans, LoraDelta, add_deltas
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment
from tinkercloud_worker.lora.stacks import LoraProducts

SCALE = 4.0
ALL = slice(None)
LAYER = Target("layer", 48, 64, "mlp")


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, bias, A and B; A and B are float32 masters."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 48), torch.randn(64, 48) / 7, torch.randn(64)
    a, b = torch.randn(8, 48) / 7, torch.randn(64, 8) / 3
    x, weight, bias = (t.to(torch.bfloat16).to(dtype) for t in (x, weight, bias))
    for tensor in (x, a, b):
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    return x, weight, bias, a, b


def by_autograd(x: Tensor, weight: Tensor, bias: Tensor, parts: DeltaSpans) -> Tensor:
    """Return the same by the formula, in float32, left to autograd."""
    flat = x.flatten(0, -2)
    product = nn.functional.linear(flat, weight, bias)
    pieces = [
        product[rows]
        if term is None
        else product[rows] + term.scale * (flat[rows] @ term.a.T) @ term.b.T
        for rows, term in parts
    ]
    return torch.cat(pieces).view(*x.shape[:-1], -1)


def in_bfloat16(x: Tensor, weight: Tensor, bias: Tensor, parts: DeltaSpans) -> Tensor:
    """Return the product of a half-precision layer plus the deltas of its input."""
    segments = [
        WeightSegment(
            rows,
            ActiveWeights({LAYER.a_name: delta.a, LAYER.b_name: delta.b}, delta.scale)
            if delta
            else None,
        )
        for rows, delta in parts
    ]
    return LoraProducts(segments).linear(LAYER, x, weight, bias)


def relative_errors(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """Return by how much of its length each tensor is off."""
    return [
        float(
            (one.detach().float() - other.detach().float()).norm() / other.detach().float().norm()
        )
        for one, other in zip(ours, theirs, strict=True)
    ]


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of a sum of squares."""
    output.float().square().sum().backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


def test_product_and_gradients_are_those_of_float32_but_for_rounding() -> None:
    x, weight, bias, a, b = tensors(torch.bfloat16)
    output = in_bfloat16(x, weight, bias, [(ALL, LoraDelta(a, b, SCALE))])
    x32, weight32, bias32, a32, b32 = tensors(torch.float32)
    exact = by_autograd(x32, weight32, bias32, [(ALL, LoraDelta(a32, b32, SCALE))])

    errors = relative_errors(
        [output, *gradients(output, x, a, b)], [exact, *gradients(exact, x32, a32, b32)]
    )

    assert max(errors) < 0.01


def test_each_span_of_positions_gets_its_own_delta() -> None:
    x, weight, bias, a, b = tensors(torch.bfloat16)
    other = LoraDelta(2 * a.detach()[:5], b.detach()[:, :5], 1.0)
    parts: DeltaSpans = [
        (slice(0, 3), LoraDelta(a, b, SCALE)),
        (slice(3, 6), None),
        (slice(6, 10), other),
    ]
    output = in_bfloat16(x, weight, bias, parts)
    x32, weight32, bias32, a32, b32 = tensors(torch.float32)
    parts32: DeltaSpans = [(slice(0, 3), LoraDelta(a32, b32, SCALE)), *parts[1:]]
    exact = by_autograd(x32, weight32, bias32, parts32)

    errors = relative_errors(
        [output, *gradients(output, x, a, b)], [exact, *gradients(exact, x32, a32, b32)]
    )

    assert max(errors) < 0.01


def test_gradients_of_the_masters_are_float32() -> None:
    x, weight, bias, a, b = tensors(torch.bfloat16)

    output = in_bfloat16(x, weight, bias, [(ALL, LoraDelta(a, b, SCALE))])

    assert [g.dtype for g in gradients(output, a, b)] == [torch.float32, torch.float32]


def test_a_fresh_adapter_changes_no_bit() -> None:
    x, weight, bias, a, b = tensors(torch.bfloat16)

    output = in_bfloat16(x, weight, bias, [(ALL, LoraDelta(a, torch.zeros_like(b), SCALE))])

    assert torch.equal(output, nn.functional.linear(x, weight, bias))


def in_float32(x: Tensor, weight: Tensor, bias: Tensor, parts: DeltaSpans) -> Tensor:
    """Return the product of a float32 layer plus the deltas of its input."""
    return add_deltas(x, nn.functional.linear(x, weight, bias), parts)


@pytest.mark.parametrize("held", [0.0, 3.0], ids=["no gradient before", "a gradient before"])
def test_float32_deltas_and_the_gradients_they_add_are_those_of_autograd(held: float) -> None:
    results = []
    for compute in (in_float32, by_autograd):
        x, weight, bias, a, b = tensors(torch.float32)
        other_a, other_b = (2 * a.detach()[:5], b.detach()[:, :5].contiguous())
        trained = (x, a, b, other_a, other_b)
        for tensor in trained:
            tensor.requires_grad_().grad = torch.full_like(tensor, held)
        parts: DeltaSpans = [
            (slice(0, 3), LoraDelta(a, b, SCALE)),
            (slice(3, 6), None),
            (slice(6, 10), LoraDelta(other_a, other_b, 1.0)),
        ]
        output = compute(x, weight, bias, parts)
        results.append([output, *gradients(output, *trained)])

    assert max(relative_errors(*results)) < 1e-6


def test_tensors_without_a_gradient_are_not_differentiated() -> None:
    x, weight, bias, a, b = tensors(torch.float32)
    a.grad = None

    gradients(in_float32(x, weight, bias, [(ALL, LoraDelta(a, b, SCALE))]))

    assert a.grad is None
    assert b.grad is not None
    assert b.grad.any()
