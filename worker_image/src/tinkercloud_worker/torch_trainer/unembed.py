"""From hidden states to target logprobs and their gradient, a few rows at a time.

Logits of a whole batch would be the largest tensor of a step by far (positions x vocabulary). Here
they exist for one of `_chunks` at a time: logprobs are read off, the loss's derivative is formed,
and the gradient with respect to the hidden states, the adapter and (full fine-tuning) the weight
itself is accumulated before the next rows' logits overwrite them.

With z = h W^T + s (h A^T) B^T and c = dL/dlp, the derivative of the loss with respect to the
logits of one row is sum_k c_k (onehot(t_k) - softmax(z)).

Shape legend: R positions, D hidden size, V vocabulary, K targets per position, r LoRA rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinkercloud_worker.engine.parameters import gradient_of
from tinkercloud_worker.frozen_linear import FrozenLinear
from tinkercloud_worker.kernels import compiled_on_gpu
from tinkercloud_worker.products import add_float32_product, float32_product

_LOGITS_BYTES = 64 << 20
"""Size of the logits held at a time on a CPU."""
_ACCELERATOR_LOGITS_BYTES = 320 << 20
"""The same on an accelerator, which needs more rows to be busy."""


Adapters = Sequence[tuple[slice, Tensor, Tensor, float]]
"""Rows, A [r, D], B [V, r] and scale of each adapter that adapts the output layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Unembedding:
    """The output layer a pass runs through: frozen or trained weight, adapters of some rows."""

    linear: FrozenLinear
    """[V, D]."""
    adapters: Adapters
    """Gradients are added to the `.grad` of A and B."""
    gradients: tuple[Tensor, Tensor | None] | None = None
    """Float32 [V, D] and [V]: what those of weight and bias are added to, if these are trained."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V]."""
        logits_RV = self.linear.float32_product(hidden_RD)
        for rows, a, b, scale in self.adapters:
            logits_RV[rows].addmm_(hidden_RD[rows].float() @ a.T, b.T, alpha=scale)
        return logits_RV

    def of_rows(self, rows: slice) -> "Unembedding":
        """Return the layer for some of the rows, which are counted from 0 there."""
        own = [
            (slice(start, stop), a, b, scale)
            for (adapted, a, b, scale) in self.adapters
            if (start := max(adapted.start, rows.start) - rows.start)
            < (stop := min(adapted.stop, rows.stop) - rows.start)
        ]
        return replace(self, adapters=own)

    def of_active(self, active_R: Tensor) -> "Unembedding":
        """Return the layer for the rows that are marked, which are counted from 0 there."""
        before_R = [0, *active_R.cumsum(0).tolist()]
        own = [
            (slice(before_R[rows.start], before_R[rows.stop]), a, b, scale)
            for (rows, a, b, scale) in self.adapters
        ]
        return replace(self, adapters=own)


Derivative = Callable[[slice, Tensor], Tensor]
"""From rows and their logprobs [rows, K] to dL/dlp [rows, K]."""


@torch.no_grad()
def logprobs(layer: Unembedding, hidden_RD: Tensor, targets_RK: Tensor) -> Tensor:
    """Return the logprobs [R, K] of targets."""
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    for rows in _chunks(layer, len(targets_RK)):
        logits_RV = layer.of_rows(rows).logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        out_RK[rows] = chosen_RK - logits_RV.logsumexp(1, keepdim=True)
    return out_RK


@torch.no_grad()
def logprobs_and_gradient(
    layer: Unembedding, hidden_RD: Tensor, targets_RK: Tensor, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """Return logprobs [R, K] and the loss's gradient [R, D] with respect to the hidden states.

    Gradients of what is trained of the layer are added where it says. Rows whose derivative
    is zero (a prompt's weights, say) cost no backward pass.
    """
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    gradient_RD = torch.zeros_like(hidden_RD)
    for rows in _chunks(layer, len(targets_RK)):
        own = layer.of_rows(rows)
        logits_RV = own.logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        probs_RV, log_normalizer_R1 = _softmax_in_place(logits_RV)
        out_RK[rows] = chosen_RK - log_normalizer_R1
        c_RK = derivative(rows, out_RK[rows])
        h_RD, t_RK = hidden_RD[rows], targets_RK[rows]
        if c_RK.is_cuda:
            # It would have to wait for the answer which rows can be left out.
            gradient_RD[rows] = _backward(own, h_RD, _dlogits(probs_RV, t_RK, c_RK, h_RD.dtype))
            continue
        active_R = c_RK.any(dim=1)
        if not active_R.any():
            continue
        if not active_R.all():
            own = own.of_active(active_R)
            probs_RV, c_RK = probs_RV[active_R], c_RK[active_R]
            h_RD, t_RK = h_RD[active_R], t_RK[active_R]
        dlogits_RV = _dlogits(probs_RV, t_RK, c_RK, h_RD.dtype)
        gradient_RD[rows][active_R] = _backward(own, h_RD, dlogits_RV)
    return out_RK, gradient_RD


def _dlogits(probs_RV: Tensor, t_RK: Tensor, c_RK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the derivative with respect to the logits [R, V]; takes the probabilities' memory."""
    sum_R1 = c_RK.sum(1, keepdim=True)
    # Near the target the two terms all but cancel: their difference is taken before it is rounded.
    # Of a target that a position names several times, the derivatives are added up where its
    # probability was: pairs of targets would be the largest tensor of all.
    term_RK = sum_R1 * probs_RV.gather(1, t_RK)
    added_RV = probs_RV.scatter_(1, t_RK, 0.0).scatter_add_(1, t_RK, c_RK)
    own_RK = added_RV.gather(1, t_RK) - term_RK
    return _scaled(probs_RV, -sum_R1, dtype).scatter_(1, t_RK, own_RK.to(dtype))


@compiled_on_gpu
def _scaled(values_RV: Tensor, factor_R1: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == values_RV.dtype:
        return values_RV.mul_(factor_R1)
    return (values_RV * factor_R1).to(dtype)


@compiled_on_gpu
def _softmax_in_place(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities; return them and the log of their normaliser [R, 1]."""
    top_R1 = logits_RV.amax(1, keepdim=True)
    exp_RV = logits_RV.sub_(top_R1).exp_()
    sum_R1 = exp_RV.sum(1, keepdim=True)
    return exp_RV.div_(sum_R1), sum_R1.log() + top_R1


def _backward(layer: Unembedding, h_RD: Tensor, dlogits_RV: Tensor) -> Tensor:
    """Return the gradient [R, D] of the hidden states; add those of the trained tensors."""
    if layer.gradients is not None:
        weight_gradient, bias_gradient = layer.gradients
        add_float32_product(weight_gradient, dlogits_RV.T, h_RD)
        if bias_gradient is not None:
            bias_gradient.add_(dlogits_RV.sum(0, dtype=torch.float32))
    dh_RD = layer.linear.gradient(dlogits_RV)
    for rows, a, b, scale in layer.adapters:
        own_h, own_dlogits = h_RD[rows], dlogits_RV[rows]
        rounded_a, rounded_b = a.to(h_RD.dtype), b.to(h_RD.dtype)
        back_Rr = own_dlogits @ rounded_b
        gradient_of(b).add_(float32_product(own_dlogits.T, own_h @ rounded_a.T), alpha=scale)
        gradient_of(a).add_(float32_product(back_Rr.T, own_h), alpha=scale)
        dh_RD[rows].addmm_(back_Rr, rounded_a, alpha=scale)
    return dh_RD


def _chunks(layer: Unembedding, num_rows: int) -> list[slice]:
    weight = layer.linear.weight
    size = _ACCELERATOR_LOGITS_BYTES if weight.is_cuda else _LOGITS_BYTES
    rows = max(1, size // (4 * weight.shape[0]))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
