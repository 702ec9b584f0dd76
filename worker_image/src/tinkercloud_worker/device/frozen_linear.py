"""A linear layer with a frozen float32 weight, computed by oneDNN on a CPU.

torch multiplies float32 matrices on a CPU through MKL, which leaves half or more of an AMD CPU
unused, and is slow for the few rows of a decoding step on any. oneDNN multiplies by the weight as
it is stored, in both directions, so no copy of it is needed: on two cores of an Intel Xeon with
AVX-512, the layers of SmolLM2-135M took 107 ms with MKL and 81 ms with oneDNN for 8 rows, and
1,254 and 1,098 ms for 512 (2026-11).

The operator is the one that torch's compiler uses for frozen weights. If this build of torch lacks
it, or the weight is not float32, the layer uses torch's ordinary product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tinkercloud_worker.device.matmul import matmul_float32


class FrozenLinear:
    """x @ weight^T + bias, differentiable with respect to x only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Wrap the weights of a layer.

        Args:
            weight: [out, in].
            bias: [out], or None.
        """
        self.weight = weight
        self.bias = bias
        self._frozen = weight.detach() if has_kernels(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product; x is [..., in]."""
        if self._frozen is None:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
            return result
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the product, without recording a graph."""
        if self._frozen is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return _multiply(x, self._frozen, self.bias)

    def matmul_float32(self, x_RD: Tensor) -> Tensor:
        """Return the product [R, out] in float32, without recording a graph."""
        if self._frozen is not None:
            return self.product(x_RD)
        product = matmul_float32(x_RD, self.weight.T)
        return product if self.bias is None else product.add_(self.bias)

    def gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of the product."""
        if self._frozen is None:
            return dy.to(self.weight.dtype) @ self.weight
        return _multiply(dy, self._frozen.T, None)


def has_kernels(weight: Tensor) -> bool:
    """Whether this build of torch has the operator and it supports this weight."""
    return (
        type(weight) in {Tensor, nn.Parameter}
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


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
