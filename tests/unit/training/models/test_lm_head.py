"""The LM head alone: a position may have many targets, including duplicates."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.logprobs import logprobs, logprobs_and_gradient

ROWS, HIDDEN_SIZE, VOCAB_SIZE = 6, 4, 50


def a_layer(dtype: torch.dtype = torch.float32) -> tuple[LMHead, Tensor]:
    """Return an output layer and what enters it."""
    torch.manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).to(dtype)
    hidden = torch.randn(ROWS, HIDDEN_SIZE).to(dtype)
    return LMHead(FrozenLinear(weight, None), ()), hidden


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation returns."""

    elements = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
def test_capped_logits_have_the_logprobs_and_gradients_of_autograd(
    dtype: torch.dtype, tolerance: float
) -> None:
    uncapped, hidden = a_layer(dtype)
    layer = replace(uncapped, cap=1.5)
    targets = torch.randint(0, VOCAB_SIZE, (ROWS, 2))
    coefficients = torch.randn(ROWS, 2)
    coefficients[2] = 0.0

    ours, gradient = logprobs_and_gradient(
        layer, hidden, targets, lambda rows, _lp: coefficients[rows]
    )

    leaf = hidden.float().requires_grad_()
    logits = 1.5 * (leaf @ layer.linear.weight.float().T / 1.5).tanh()
    expected = logits.log_softmax(1).gather(1, targets)
    (sought,) = torch.autograd.grad((expected * coefficients).sum(), leaf)
    torch.testing.assert_close(ours, expected.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(ours, logprobs(layer, hidden, targets))
    assert (gradient.float() - sought).norm() <= tolerance * sought.norm()


def test_no_tensor_is_larger_than_the_logits_however_many_targets_a_position_has() -> None:
    layer, hidden = a_layer()
    targets = torch.arange(VOCAB_SIZE).repeat(ROWS, 1)
    coefficients = torch.randn(ROWS, VOCAB_SIZE)

    with LargestTensor() as largest:
        logprobs_and_gradient(layer, hidden, targets, lambda rows, _lp: coefficients[rows])

    assert largest.elements == ROWS * VOCAB_SIZE


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
def test_targets_that_a_position_names_several_times_add_up(
    dtype: torch.dtype, tolerance: float
) -> None:
    layer, hidden = a_layer(dtype)
    targets = torch.randint(0, 4, (ROWS, 9))
    coefficients = torch.randn(ROWS, 9)

    ours, gradient = logprobs_and_gradient(
        layer, hidden, targets, lambda rows, _lp: coefficients[rows]
    )

    leaf = hidden.float().requires_grad_()
    logits = leaf @ layer.linear.weight.float().T
    expected = logits.log_softmax(1).gather(1, targets)
    (sought,) = torch.autograd.grad((expected * coefficients).sum(), leaf)
    torch.testing.assert_close(ours, expected.detach(), rtol=tolerance, atol=tolerance)
    assert (gradient.float() - sought).norm() <= tolerance * sought.norm()
