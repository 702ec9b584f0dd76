"""A linear layer with a frozen float32 weight, computed by oneDNN on a CPU.

torch multiplies float32 matrices on a CPU through MKL, which leaves half or more of an AMD CPU
unused, and is slow for the few rows of a decoding step on any. oneDNN multiplies by the weight as
it is stored, in both directions, so no copy of it is needed: on two cores of an Intel Xeon with
AVX-512, the layers of SmolLM2-135M took 107 ms with MKL and 81 ms with oneDNN for 8 rows, and
1,254 and 1,098 ms for 512 (2026-11).

A weight can also be packed, once for the forward product and once, transposed, for the gradient of
the input. The two copies take twice the memory of the weight, in addition to the weight, and saved
a tenth of the time for 8 rows and nothing for one or for 512. The first product of a number of rows
also takes 0.5 instead of 3 ms longer than later ones, for each shape of weights.

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
            packed: whether to keep packed copies, which take memory.
        """
        self.weight = weight
        self.bias = bias
        self._forward: Tensor | None = None
        self._backward: Tensor | None = None
        if has_kernels(weight):
            frozen = weight.detach()
            self._forward = _pack(frozen) if packed else frozen
            self._backward = _pack(frozen.T.contiguous()) if packed else frozen.T

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product; x is [..., in]."""
        if self._forward is None:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
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


def has_kernels(weight: Tensor) -> bool:
    """Whether this build of torch has the operators and they support this weight."""
    return (
        type(weight) in {Tensor, nn.Parameter}
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, bias, "none", [], ""
    )
    return product


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's
        return ctx.layer.gradient(gradients[0]), None
