"""What bounds a pass on a CPU: the products with the model's matrices alone."""

from collections.abc import Callable

import torch

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.model.base_model import TorchBaseModel


def products(base: TorchBaseModel, rows: int) -> Callable[[], None]:
    """Return work that multiplies some rows by each adaptable matrix and by the LM head."""
    pairs = [(layer, torch.randn(rows, layer.weight.shape[1])) for layer in _layers(base)]

    def compute() -> None:
        for layer, x in pairs:
            layer.product(x)

    return compute


def gradients(base: TorchBaseModel, rows: int) -> Callable[[], None]:
    """Return work that multiplies the gradients of some rows by each of these matrices."""
    pairs = [(layer, torch.randn(rows, layer.weight.shape[0])) for layer in _layers(base)]

    def compute() -> None:
        for layer, dy in pairs:
            layer.gradient(dy)

    return compute


def _layers(base: TorchBaseModel) -> list[FrozenLinear]:
    weights = base.named_weights()
    matrices = [weights[f"{each.name}.weight"] for each in base.targets if each.group != "unembed"]
    return [*(FrozenLinear(each, None) for each in matrices), base.frozen_lm_head]
