"""A linear layer with a frozen weight, computed by oneDNN from a prepacked copy.

torch multiplies float32 matrices on a CPU through MKL, which repacks the weight in every call and
leaves half or more of an AMD CPU unused. Measured on two Zen 5 cores (2026-11): 450 instead of 185
GFLOP/s for large batches, and three times the speed for the few rows of a decoding step. A frozen
weight can be packed once for the forward product and once, transposed, for the gradient of the
input. The two copies take twice the memory of the weight, in addition to the weight.

These are the operators that torch's compiler uses for frozen weights. If this build of torch lacks
them, or the weight is not float32, the layer uses torch's ordinary product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tinkercloud_worker.device.matmul import matmul_float32

_PACKED_FOR_ROWS = 256
"""The row count hint for oneDNN; any number of rows works."""


class FrozenLinear:
    """x @ weight^T + bias, differentiable with respect to x only."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        """Wrap the weights of a layer.

        Args:
            weight: [out, in].
            bias: [out], or None.
            packed: whether to keep prepacked copies, which take memory.
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
        """Return the product, without recording a graph."""
        if self._forward is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return _multiply(x, self._forward, self.bias)

    def matmul_float32(self, x_RD: Tensor) -> Tensor:
        """Return the product [R, out] in float32, without recording a graph."""
        if self._forward is not None:
            return self.product(x_RD)
        product = matmul_float32(x_RD, self.weight.T)
        return product if self.bias is None else product.add_(self.bias)

    def gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of the product."""
        if self._backward is None:
            return dy.to(self.weight.dtype) @ self.weight
        return _multiply(dy, self._backward, None)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch has the operators and they support this weight."""
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
