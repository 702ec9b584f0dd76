"""The LM head, for a few rows at a time: float32 logits and their backward pass.

Shape legend: R positions, D hidden size, V vocabulary or a rank's part of it, r LoRA rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.device.matmul import addmm_float32_, matmul_float32
from tinkercloud_worker.lora.parameters import gradient_of

Adapters = Sequence[tuple[slice, Tensor, Tensor, float]]
"""Rows, A [r, D], B [V, r] and scale of each adapter that adapts the LM head."""


@dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """The LM head of a pass: a frozen or trained weight, with adapters for some rows."""

    linear: FrozenLinear
    """[V, D]."""
    adapters: Adapters
    """Gradients accumulate in the `.grad` of A and B."""
    gradients: tuple[Tensor, Tensor | None] | None = None
    """Accumulated gradients of weight and bias, float32 [V, D] and [V], if these are trained."""
    cap: float | None = None
    """The soft cap of the logits (Gemma 2): cap * tanh(product / cap). None: no cap."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V]."""
        logits_RV = self.linear.matmul_float32(hidden_RD)
        for rows, a, b, scale in self.adapters:
            logits_RV[rows].addmm_(hidden_RD[rows].float() @ a.T, b.T, alpha=scale)
        if self.cap is not None:
            logits_RV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_RV

    def slope(self, logits_RV: Tensor) -> Tensor | None:
        """Return the derivative [R, V] of capped logits with respect to the product; None: 1."""
        if self.cap is None:
            return None
        # The derivative of tanh is 1 - tanh^2.
        return (logits_RV / self.cap).square_().neg_().add_(1)

    def backward(self, hidden_RD: Tensor, dlogits_RV: Tensor) -> Tensor:
        """Return the gradient [R, D] of the hidden states; accumulate those of trained tensors.

        Args:
            hidden_RD: the hidden states of the logits.
            dlogits_RV: the gradient of the logits before their cap, in the dtype of the hidden
                states.
        """
        if self.gradients is not None:
            weight_gradient, bias_gradient = self.gradients
            addmm_float32_(weight_gradient, dlogits_RV.T, hidden_RD)
            if bias_gradient is not None:
                bias_gradient.add_(dlogits_RV.sum(0, dtype=torch.float32))
        dh_RD = self.linear.gradient(dlogits_RV)
        for rows, a, b, scale in self.adapters:
            own_h, own_dlogits = hidden_RD[rows], dlogits_RV[rows]
            rounded_a, rounded_b = a.to(own_h.dtype), b.to(own_h.dtype)
            back_Rr = own_dlogits @ rounded_b
            gradient_of(b).add_(matmul_float32(own_dlogits.T, own_h @ rounded_a.T), alpha=scale)
            gradient_of(a).add_(matmul_float32(back_Rr.T, own_h), alpha=scale)
            dh_RD[rows].addmm_(back_Rr, rounded_a, alpha=scale)
        return dh_RD

    def of_rows(self, rows: slice) -> "LMHead":
        """Return the layer for some of the rows, renumbered from 0."""
        own = [
            (slice(start, stop), a, b, scale)
            for (adapted, a, b, scale) in self.adapters
            if (start := max(adapted.start, rows.start) - rows.start)
            < (stop := min(adapted.stop, rows.stop) - rows.start)
        ]
        return replace(self, adapters=own)

    def of_active(self, active_R: Tensor) -> "LMHead":
        """Return the layer for the marked rows, renumbered from 0."""
        before_R = [0, *active_R.cumsum(0).tolist()]
        own = [
            (slice(before_R[rows.start], before_R[rows.stop]), a, b, scale)
            for (rows, a, b, scale) in self.adapters
        ]
        return replace(self, adapters=own)
