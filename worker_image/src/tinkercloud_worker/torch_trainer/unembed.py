"""From hidden states to target logprobs and their gradient, a few rows at a time.

Logits of a whole batch would be the largest tensor of a step by far (positions x vocabulary). Here
they exist for `_chunk_rows` positions at a time: logprobs are read off, the loss's derivative
is formed, and the gradient with respect to the hidden states, the adapter and (full fine-tuning)
the weight itself is accumulated before the next rows' logits overwrite them.

With z = h W^T + s (h A^T) B^T and c = dL/dlp, the derivative of the loss with respect to the
logits of one row is sum_k c_k (onehot(t_k) - softmax(z)).

Shape legend: R positions, D hidden size, V vocabulary, K targets per position, r LoRA rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud_worker.frozen_linear import FrozenLinear

_LOGITS_BYTES = 64 << 20
"""Size of the logits held at a time on a CPU."""
_ACCELERATOR_LOGITS_BYTES = 256 << 20
"""The same on an accelerator, which needs more rows to be busy."""


@dataclass(frozen=True, slots=True, eq=False)
class Unembedding:
    """The output layer a batch runs through: frozen or trained weight, optional adapter."""

    linear: FrozenLinear
    """[V, D]; if its weight requires grad after all, the weight's `.grad` receives the gradient."""
    lora: tuple[Tensor, Tensor, float] | None
    """A [r, D], B [V, r] and scale; gradients are added to their `.grad`."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V]."""
        logits_RV = self.linear.product(hidden_RD).float()
        if self.lora is not None:
            a, b, scale = self.lora
            logits_RV.addmm_(hidden_RD.float() @ a.T, b.T, alpha=scale)
        return logits_RV


Derivative = Callable[[slice, Tensor], Tensor]
"""From rows and their logprobs [rows, K] to dL/dlp [rows, K]."""


@torch.no_grad()
def logprobs(layer: Unembedding, hidden_RD: Tensor, targets_RK: Tensor) -> Tensor:
    """Return the logprobs [R, K] of targets."""
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    for rows in _chunks(layer, len(targets_RK)):
        logits_RV = layer.logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        out_RK[rows] = chosen_RK - logits_RV.logsumexp(1, keepdim=True)
    return out_RK


@torch.no_grad()
def logprobs_and_gradient(
    layer: Unembedding, hidden_RD: Tensor, targets_RK: Tensor, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """Return logprobs [R, K] and the loss's gradient [R, D] with respect to the hidden states.

    Gradients of the layer's own trained tensors are added to their `.grad`. Rows whose derivative
    is zero (a prompt's weights, say) cost no backward pass.
    """
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    gradient_RD = torch.zeros_like(hidden_RD)
    for rows in _chunks(layer, len(targets_RK)):
        logits_RV = layer.logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        probs_RV, log_normalizer_R1 = _softmax_in_place(logits_RV)
        out_RK[rows] = chosen_RK - log_normalizer_R1
        c_RK = derivative(rows, out_RK[rows])
        active_R = c_RK.any(dim=1)
        if not active_R.any():
            continue
        h_RD, t_RK = hidden_RD[rows], targets_RK[rows]
        if not active_R.all():
            probs_RV, c_RK = probs_RV[active_R], c_RK[active_R]
            h_RD, t_RK = h_RD[active_R], t_RK[active_R]
        dlogits_RV = probs_RV.mul_(-c_RK.sum(1, keepdim=True)).scatter_add_(1, t_RK, c_RK)
        gradient_RD[rows][active_R] = _backward(layer, h_RD, dlogits_RV)
    return out_RK, gradient_RD


def _softmax_in_place(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities; return them and the log of their normaliser [R, 1]."""
    top_R1 = logits_RV.amax(1, keepdim=True)
    exp_RV = logits_RV.sub_(top_R1).exp_()
    sum_R1 = exp_RV.sum(1, keepdim=True)
    return exp_RV.div_(sum_R1), sum_R1.log() + top_R1


def _backward(layer: Unembedding, h_RD: Tensor, dlogits_RV: Tensor) -> Tensor:
    """Return the gradient [R, D] of the hidden states; add those of the trained tensors."""
    linear = layer.linear
    if linear.weight.requires_grad:
        _grad(linear.weight).addmm_(dlogits_RV.T, h_RD)
        if linear.bias is not None:
            _grad(linear.bias).add_(dlogits_RV.sum(0))
    dh_RD = linear.gradient(dlogits_RV)
    if layer.lora is not None:
        a, b, scale = layer.lora
        h32_RD = h_RD.float()
        back_Rr = dlogits_RV @ b
        _grad(b).addmm_(dlogits_RV.T, h32_RD @ a.T, alpha=scale)
        _grad(a).addmm_(back_Rr.T, h32_RD, alpha=scale)
        dh_RD = dh_RD + (back_Rr @ a * scale).to(dh_RD.dtype)
    return dh_RD


def _grad(tensor: Tensor) -> Tensor:
    gradient = tensor.grad
    assert gradient is not None  # noqa: S101 - `Trainable` gives every tensor one
    return gradient


def _chunks(layer: Unembedding, num_rows: int) -> list[slice]:
    weight = layer.linear.weight
    size = _LOGITS_BYTES if weight.device.type == "cpu" else _ACCELERATOR_LOGITS_BYTES
    rows = max(1, size // (4 * weight.shape[0]))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
