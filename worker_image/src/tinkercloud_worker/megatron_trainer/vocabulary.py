"""Logprobs over a vocabulary that is divided over ranks.

No rank ever holds the logits of the whole vocabulary: three numbers of each position are exchanged.

Shape legend: R positions, V this rank's part of the vocabulary, K targets per position.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        logits_RV: Tensor,
        targets_RK: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        part = logits_RV.shape[1]
        top_R1 = logits_RV.amax(1, keepdim=True)
        dist.all_reduce(top_R1, op=dist.ReduceOp.MAX, group=group)
        shifted_RV = logits_RV - top_R1
        local_RK = targets_RK - dist.get_rank(group) * part
        is_here_RK = (local_RK >= 0) & (local_RK < part)
        local_RK = local_RK.clamp(0, part - 1)
        chosen_RK = shifted_RV.gather(1, local_RK) * is_here_RK
        dist.all_reduce(chosen_RK, group=group)
        exp_RV = shifted_RV.exp_()
        sum_R1 = exp_RV.sum(1, keepdim=True)
        dist.all_reduce(sum_R1, group=group)
        ctx.save_for_backward(exp_RV.div_(sum_R1), local_RK, is_here_RK)
        return chosen_RK - sum_R1.log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's
        probs_RV, local_RK, is_here_RK = ctx.saved_tensors
        (c_RK,) = gradients
        dlogits_RV = probs_RV * -c_RK.sum(1, keepdim=True)
        dlogits_RV.scatter_add_(1, local_RK, c_RK * is_here_RK)
        return dlogits_RV, None, None


def logprobs(logits_RV: Tensor, targets_RK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the logprobs [R, K] of targets, differentiable with respect to the logits.

    Args:
        logits_RV: float32, of this rank's part of the vocabulary; all parts are of one size.
        targets_RK: int64 ids in the whole vocabulary.
        group: the ranks the vocabulary is divided over, in order.
    """
    result: Tensor = _VocabParallelLogprobs.apply(logits_RV, targets_RK, group)
    return result
