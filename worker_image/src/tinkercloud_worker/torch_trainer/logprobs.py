"""Computes target logprobs and their gradient from hidden states, a few rows at a time.

The logits of a whole batch would be by far the largest tensor of a step (positions x vocabulary).
Here they exist for one of `_chunks` at a time: the logprobs and the derivative of the loss are
computed, and the gradients of the hidden states, the adapter and (in full fine-tuning) the weight
itself are accumulated before the logits of the next rows overwrite them.

With z = h W^T + s (h A^T) B^T and c = dL/dlp, the derivative of the loss with respect to the
logits of one row is sum_k c_k (onehot(t_k) - softmax(z)).

Shape legend: R positions, D hidden size, V vocabulary, K targets per position.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tinkercloud_worker.device import accelerator
from tinkercloud_worker.model.fused_kernels import compiled_on_gpu
from tinkercloud_worker.model.lm_head import LMHead

_LOGITS_BYTES = 64 << 20
"""Bytes of logits held at a time on a CPU."""
_ACCELERATOR_LOGITS_BYTES = 320 << 20
"""Bytes of logits held at a time on an accelerator, which needs more rows to be fully used."""


Derivative = Callable[[slice, Tensor], Tensor]
"""Maps rows and their logprobs [rows, K] to dL/dlp [rows, K]."""


@torch.no_grad()
def logprobs(layer: LMHead, hidden_RD: Tensor, targets_RK: Tensor) -> Tensor:
    """Return the logprobs [R, K] of targets."""
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    for rows in _chunks(layer, len(targets_RK)):
        logits_RV = layer.of_rows(rows).logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        out_RK[rows] = chosen_RK - logits_RV.logsumexp(1, keepdim=True)
    return out_RK


@torch.no_grad()
def logprobs_and_gradient(
    layer: LMHead, hidden_RD: Tensor, targets_RK: Tensor, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """Return logprobs [R, K] and the loss's gradient [R, D] with respect to the hidden states.

    Gradients of the layer's trainable tensors accumulate as described in `LMHead`. Rows whose
    derivative is zero, such as prompt rows, need no backward pass.
    """
    out_RK = torch.empty(targets_RK.shape, dtype=torch.float32, device=targets_RK.device)
    gradient_RD = torch.zeros_like(hidden_RD)
    for rows in _chunks(layer, len(targets_RK)):
        own = layer.of_rows(rows)
        logits_RV = own.logits(hidden_RD[rows])
        chosen_RK = logits_RV.gather(1, targets_RK[rows])
        slope_RV = own.slope(logits_RV)
        probs_RV, log_normalizer_R1 = _softmax_in_place(logits_RV)
        out_RK[rows] = chosen_RK - log_normalizer_R1
        c_RK = derivative(rows, out_RK[rows])
        h_RD, t_RK = hidden_RD[rows], targets_RK[rows]
        if accelerator.syncs_on_read(c_RK):
            # Finding the rows to skip would make the host wait for the device.
            dlogits_RV = _before_cap(_dlogits(probs_RV, t_RK, c_RK, h_RD.dtype), slope_RV)
            gradient_RD[rows] = own.backward(h_RD, dlogits_RV)
            continue
        active_R = c_RK.any(dim=1)
        if not active_R.any():
            continue
        if not active_R.all():
            own = own.of_active(active_R)
            probs_RV, c_RK = probs_RV[active_R], c_RK[active_R]
            h_RD, t_RK = h_RD[active_R], t_RK[active_R]
            slope_RV = None if slope_RV is None else slope_RV[active_R]
        dlogits_RV = _before_cap(_dlogits(probs_RV, t_RK, c_RK, h_RD.dtype), slope_RV)
        gradient_RD[rows][active_R] = own.backward(h_RD, dlogits_RV)
    return out_RK, gradient_RD


def _dlogits(probs_RV: Tensor, t_RK: Tensor, c_RK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the derivative with respect to the logits [R, V]; takes the probabilities' memory."""
    sum_R1 = c_RK.sum(1, keepdim=True)
    # Near the target the two terms almost cancel, so they are subtracted before rounding. If a
    # position names a target several times, the derivatives accumulate in place of its probability:
    # a tensor of target pairs would be the largest of all.
    term_RK = sum_R1 * probs_RV.gather(1, t_RK)
    added_RV = probs_RV.scatter_(1, t_RK, 0.0).scatter_add_(1, t_RK, c_RK)
    own_RK = added_RV.gather(1, t_RK) - term_RK
    return _scaled(probs_RV, -sum_R1, dtype).scatter_(1, t_RK, own_RK.to(dtype))


def _before_cap(dlogits_RV: Tensor, slope_RV: Tensor | None) -> Tensor:
    """Return the derivative with respect to the logits before their cap, in place."""
    return dlogits_RV if slope_RV is None else dlogits_RV.mul_(slope_RV)


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


def _chunks(layer: LMHead, num_rows: int) -> list[slice]:
    weight = layer.linear.weight
    size = _ACCELERATOR_LOGITS_BYTES if accelerator.wants_many_rows(weight) else _LOGITS_BYTES
    if layer.cap is not None:
        size //= 2  # the slope of the cap takes as much
    rows = max(1, size // (4 * weight.shape[0]))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
