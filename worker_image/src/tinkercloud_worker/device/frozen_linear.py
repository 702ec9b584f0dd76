"""A linear layer whose weight never changes, computed by oneDNN from a packed copy of it.

torch multiplies float32 matrices on a CPU through MKL, which packs the weight anew in every call
and leaves half or more of an AMD CPU unused: measured on two Zen 5 cores (2026-11), 450 against 185
GFLOP/s for large batches, three times the speed for the few rows of a decoding step. The weight of
a frozen layer can be packed once: for the forward product, and transposed for the gradient with
respect to the input. That takes twice the weight's memory on top of the weight.

The operators are the ones torch's own compiler uses for frozen weights. Where this build of torch
has none, or the weight is not float32, the layer computes as torch would.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tinkercloud_worker.device.matmul import matmul_float32

_PACKED_FOR_ROWS = 256
"""A hint to oneDNN; any number of rows can be multiplied."""


class FrozenLinear:
    """x @ weight^T + bias, differentiable with respect to x only."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        """Wrap the weights of a layer.

        Args:
            weight: [out, in].
            bias: [out], or None.
            packed: whether to keep packed copies, which take memory.
        """
        self.weight = weight
        self.bias = bias
        self._forward: Tensor | None = None
        self._backward: Tensor | None = None
        if packed and can_pack(weight):
            self._forward = _pack(weight)
            self._backward = _pack(weight.T.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product; x is [..., in]."""
        if self._forward is None:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _PackedProduct.apply(x, self)  # type: ignore[no-untyped-call]
            return result
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the product, without a graph."""
        if self._forward is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return _multiply(x, self._forward, self.bias)

    def matmul_float32(self, x_RD: Tensor) -> Tensor:
        """Return the product [R, out] in float32, without a graph."""
        if self._forward is not None:
            return self.product(x_RD)
        product = matmul_float32(x_RD, self.weight.T)
        return product if self.bias is None else product.add_(self.bias)

    def gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient with respect to x, given the one with respect to the product."""
        if self._backward is None:
            return dy.to(self.weight.dtype) @ self.weight
        return _multiply(dy, self._backward, None)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch has the operators, and a use for them with this weight."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), packed, bias, "none", [], ""
    )
    return product


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's
        return ctx.layer.gradient(gradients[0]), None
