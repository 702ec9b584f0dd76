"""The low-rank term over a base of lower precision."""

import torch
from torch import Tensor

from tinkercloud_worker.low_rank import add_low_rank

SCALE = 4.0


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, y, A and B, each of which wants a gradient; A and B are float32 masters."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 48), torch.randn(2, 5, 64)
    a, b = torch.randn(8, 48) / 7, torch.randn(64, 8) / 3
    return (
        x.to(torch.bfloat16).to(dtype).requires_grad_(),
        y.to(torch.bfloat16).to(dtype).requires_grad_(),
        a.requires_grad_(),
        b.requires_grad_(),
    )


def results(dtype: torch.dtype) -> list[Tensor]:
    """Return the sum with the term, and the gradients of a sum of its squares, in float32."""
    inputs = tensors(dtype)
    output = add_low_rank(*inputs, scale=SCALE)
    output.float().square().sum().backward()
    gradients = [tensor.grad for tensor in inputs]
    assert all(gradient is not None for gradient in gradients)
    return [t.detach().float() for t in (output, *gradients) if t is not None]


def test_term_and_gradients_are_those_of_float32_but_for_rounding() -> None:
    rounded, exact = results(torch.bfloat16), results(torch.float32)

    errors = [
        float((one - other).norm() / other.norm())
        for one, other in zip(rounded, exact, strict=True)
    ]
    assert len(errors) == 5
    assert max(errors) < 0.01


def test_gradients_of_the_masters_are_float32() -> None:
    _, _, a, b = inputs = tensors(torch.bfloat16)

    add_low_rank(*inputs, scale=SCALE).sum().backward()

    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.dtype, b.grad.dtype) == (torch.float32, torch.float32)


def test_a_fresh_adapter_changes_no_bit() -> None:
    x, y, a, b = tensors(torch.bfloat16)

    output = add_low_rank(x, y, a, torch.zeros_like(b), SCALE)

    assert torch.equal(output, y)
