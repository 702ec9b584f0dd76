"""One product for all experts of a layer equals separate products, even for experts without
rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import in_dtype, tiny_qwen3_moe
from tinkercloud_testing.training.trainers import gradient_of, run
from tinkercloud_worker.lora import experts
from tinkercloud_worker.lora.experts import grouped_linear
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer


def one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()[:-1]]
    parts = zip(starts, ends.tolist(), weights, strict=True)
    return torch.cat([x[start:end] @ weight.T for start, end, weight in parts])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).requires_grad_()


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    inner=st.integers(1, 9),
    outer=st.integers(1, 9),
)
@settings(deadline=None, max_examples=60)
def test_products_and_gradients_are_those_of_each_expert(
    counts: list[int], inner: int, outer: int
) -> None:
    torch.manual_seed(0)
    x, weights = random(sum(counts), inner), random(len(counts), outer, inner)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    sought = random(sum(counts), outer).detach()

    got, expected = grouped_linear(x, weights, ends), one_by_one(x, weights, ends)

    torch.testing.assert_close(got, expected)
    of_got = torch.autograd.grad((got * sought).sum(), (x, weights))
    of_expected = torch.autograd.grad((expected * sought).sum(), (x, weights))
    torch.testing.assert_close(of_got, of_expected)


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's product leave gradients of experts without rows as their memory was."""
    product = torch.nn.functional.grouped_mm

    def leaving(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        return product(x, Unwritten.apply(weights, counts), offs=offs)

    for where in (experts, torch.nn.functional):
        monkeypatch.setattr(where, "grouped_mm", leaving)


class Unwritten(torch.autograd.Function):
    """What torch's product does on some GPUs: gradients of experts without rows are never set."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return gradient.masked_fill((counts == 0)[:, None, None], torch.nan), None


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows_have_no_gradient_whatever_is_in_its_memory(
    dtype: torch.dtype,
) -> None:
    counts = torch.tensor([3, 0, 2, 0])
    x, weights = random(5, 8).to(dtype), random(4, 8, 8)

    (grouped_linear(x, weights, counts.cumsum(0).to(torch.int32)) ** 2).sum().backward()

    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    assert (weights.grad.abs().sum((1, 2)) > 0).tolist() == [True, False, True, False]


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fully_fine_tuned_mixture_whose_experts_see_no_token_has_no_gradient_of_them(
    dtype: torch.dtype,
) -> None:
    trainer = TorchTrainer(TorchBaseModel(in_dtype(tiny_qwen3_moe(), dtype)), max_batch_tokens=8)
    trainer.add_model("m", None)

    run(trainer, random_data([2]))

    gradients = gradient_of(trainer)
    of_experts = [gradients[name] for name in gradients if ".experts." in name]
    assert all(gradient.isfinite().all() for gradient in of_experts)
    seen = torch.stack([gradient.abs().sum((1, 2)) > 0 for gradient in of_experts])
    assert seen.any(dim=1).all()
    assert not seen.all()
