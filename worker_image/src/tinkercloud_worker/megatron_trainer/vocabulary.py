"""Logprobs over a vocabulary that is divided over ranks, a few positions at a time.

No rank ever holds the logits of the whole vocabulary: three numbers of each position are exchanged.
Nor those of all positions: they are computed again in the backward pass.

Shape legend: R positions, D hidden size, V this rank's part of the vocabulary, K targets per
position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkercloud_worker.products import add_float32_product

OutputLayer = Callable[[Tensor], Tensor]
"""From hidden states [R, D] to the logits [R, V] of this rank's part of the vocabulary; all parts
are of one size."""

_LOGITS_BYTES = 256 << 20
"""Size of the logits held at a time, in float32."""


class _TrainedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        hidden_RD: Tensor,
        weight_VD: Tensor,
        gradient_VD: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden_RD, weight_VD)
        ctx.gradient_VD = gradient_VD
        return hidden_RD @ weight_VD.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's
        hidden_RD, weight_VD = ctx.saved_tensors
        (dlogits_RV,) = gradients
        add_float32_product(ctx.gradient_VD, dlogits_RV.T, hidden_RD)
        return dlogits_RV @ weight_VD, None, None


@dataclass(frozen=True, slots=True, eq=False)
class TrainedOutputLayer:
    """An `OutputLayer` whose weight is trained.

    Its gradient is a sum over all that call it, a few positions at a time, and is added up in
    float32. Autograd would add up what has the weight's dtype.
    """

    weight_VD: Tensor
    """In the dtype of hidden states, not under autograd."""
    gradient_VD: Tensor
    """What the gradient is added to, float32."""

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """Return logits [R, V]."""
        spread_RD = copy_to_tensor_model_parallel_region(hidden_RD)
        logits_RV: Tensor = _TrainedProduct.apply(spread_RD, self.weight_VD, self.gradient_VD)
        return logits_RV


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
        shifted_RV = logits_RV.to(torch.float32, copy=True).sub_(top_R1)
        local_RK = targets_RK - dist.get_rank(group) * part
        is_here_RK = (local_RK >= 0) & (local_RK < part)
        local_RK = local_RK.clamp(0, part - 1)
        chosen_RK = shifted_RV.gather(1, local_RK) * is_here_RK
        dist.all_reduce(chosen_RK, group=group)
        exp_RV = shifted_RV.exp_()
        sum_R1 = exp_RV.sum(1, keepdim=True)
        dist.all_reduce(sum_R1, group=group)
        ctx.dtype = logits_RV.dtype
        ctx.save_for_backward(exp_RV, sum_R1, local_RK, is_here_RK)
        return chosen_RK - sum_R1.log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's
        exp_RV, sum_R1, local_RK, is_here_RK = ctx.saved_tensors
        (c_RK,) = gradients
        # Computed for this pass alone, and as large as all else here together.
        dlogits_RV = exp_RV.mul_(-c_RK.sum(1, keepdim=True) / sum_R1)
        dlogits_RV.scatter_add_(1, local_RK, c_RK * is_here_RK)
        return dlogits_RV.to(ctx.dtype), None, None


def logprobs(
    output_layer: OutputLayer,
    hidden_RD: Tensor,
    targets_RK: Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
) -> Tensor:
    """Return the logprobs [R, K] of targets, float32, differentiable by hidden states and weights.

    Args:
        output_layer: of this rank.
        hidden_RD: what enters it, the same at all ranks of the group.
        targets_RK: int64 ids in the whole vocabulary.
        group: the ranks the vocabulary is divided over, in order.
        vocab_size: of the whole.
    """

    def some(hidden_RD: Tensor, targets_RK: Tensor) -> Tensor:
        result: Tensor = _VocabParallelLogprobs.apply(output_layer(hidden_RD), targets_RK, group)
        return result

    rows = max(1, _LOGITS_BYTES * group.size() // (4 * vocab_size))
    parts = zip(hidden_RD.split(rows), targets_RK.split(rows), strict=True)
    return torch.cat(
        [checkpoint(some, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    )
