"""Frozen layers on a CPU compute with the weights of the model's file, without copies of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.model.base_model import TorchBaseModel


def mapped_files(tensor: Tensor) -> set[str]:
    """Return the names of files whose mapping contains a tensor's memory."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            found.add(Path(name).name)
    return found


def test_layers_compute_with_the_weights_of_the_mapped_file(tmp_path: Path) -> None:
    base = TorchBaseModel.load(str(save(tiny_llama(), tmp_path)), torch.float32)
    assert {name for weight in base.named_weights().values() for name in mapped_files(weight)} == {
        "model.safetensors"
    }
    layer = base.frozen_lm_head
    held = [each for each in vars(layer).values() if isinstance(each, Tensor)]
    assert {each.data_ptr() for each in held} == {layer.weight.data_ptr()}


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_products_and_gradients_are_exact_up_to_rounding(rows: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    x, dy = torch.randn(rows, 40, requires_grad=True), torch.randn(rows, 24)
    product = FrozenLinear(weight, bias)(x)
    torch.autograd.backward(product, dy)
    torch.testing.assert_close(product, (x.double() @ weight.double().T + bias.double()).float())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (dy.double() @ weight.double()).float())
