"""The low-rank term of an adapted linear layer.

A and B are float32, whatever the base's type. Over a base of lower precision they are rounded to it
and the products are the base's kind of products: what enters the layer is then kept for the
backward pass as it is, and not a second time in float32, which would be most of what a layer keeps.
Gradients are added up in float32.

Shape legend: N rows of all sequences, r rank.
"""

from typing import Any

import torch
from torch import Tensor


def add_low_rank(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale * (x @ a^T) @ b^T.

    Args:
        x: [..., in], what enters the layer.
        y: [..., out], what comes out of it, of the same type.
        a: float32 [r, in].
        b: float32 [out, r].
        scale: of the term.
    """
    if y.dtype == torch.float32:
        x_in, y_out = x.flatten(0, -2), y.flatten(0, -2)
        return torch.addmm(y_out, x_in @ a.T, b.T, alpha=scale).view_as(y)
    result: Tensor = _Rounded.apply(x, y, a, b, scale)  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no names
        ctx: Any,  # noqa: ANN401 - torch's
        x: Tensor,
        y: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        u_Nr = x.flatten(0, -2) @ a.to(x.dtype).T
        ctx.save_for_backward(x, u_Nr, a, b)
        ctx.scale = scale
        return torch.addmm(y.flatten(0, -2), u_Nr, b.to(x.dtype).T, alpha=scale).view_as(y)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        dy: Tensor,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, None]:
        x, u_Nr, a, b = ctx.saved_tensors
        x_in, dy_out = x.flatten(0, -2), dy.flatten(0, -2)
        du_Nr = dy_out @ b.to(x.dtype)
        wants_dx = ctx.needs_input_grad[0]
        dx = (du_Nr @ a.to(x.dtype)).mul_(ctx.scale).view_as(x) if wants_dx else None
        da = (du_Nr.T @ x_in).float().mul_(ctx.scale)
        db = (dy_out.T @ u_Nr).float().mul_(ctx.scale)
        return dx, dy, da, db, None
