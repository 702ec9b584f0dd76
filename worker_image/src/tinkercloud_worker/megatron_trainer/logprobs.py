"""Logprobs over a vocabulary that is divided over ranks, a few positions at a time.

No rank ever holds the logits of the whole vocabulary: three numbers of each position are exchanged.
Nor those of all positions: they are computed again in the backward pass. They are float32, whatever
the base is, as the torch trainer's are.

What a rank's part of the vocabulary makes of a gradient, be it of hidden states or of an adapter's
A, is a part of a sum over the ranks.

Shape legend: R positions, D hidden size, V this rank's part of the vocabulary, K targets per
position.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.parameters import gradient_of
from tinkercloud_worker.megatron_trainer.adapters import Active, part_of
from tinkercloud_worker.model.lm_head import LMHead

_LOGITS_BYTES = 256 << 20
"""Size of the logits held at a time, in float32."""


def frozen_output_layer(weight_VD: Tensor, target: Target, active: Active | None) -> LMHead:
    """Return the output layer of the base, with an adapter's term if that has one.

    Args:
        weight_VD: this rank's part.
        target: the whole layer.
        active: the adapter.
    """
    linear = FrozenLinear(weight_VD, None, packed=False)
    if active is None or target.a_name not in active.tensors:
        return LMHead(linear, ())
    a, b = active.tensors[target.a_name], active.tensors[target.b_name]
    own_b = part_of(b, 0).detach()
    own_b.grad = part_of(gradient_of(b), 0)
    return LMHead(linear, [(slice(None), a, own_b, active.scale)])


def trained_output_layer(weight: Tensor, dtype: torch.dtype) -> LMHead:
    """Return an output layer that is trained.

    Its gradient is a sum over all that call it, a few positions at a time, and is added up in
    float32. Autograd would add up what has the dtype of passes.

    Args:
        weight: this rank's part, float32 [V, D], of a `Trainable`.
        dtype: of passes.
    """
    linear = FrozenLinear(weight.detach().to(dtype), None, packed=False)
    return LMHead(linear, (), (gradient_of(weight), None))


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        hidden_RD: Tensor,
        targets_RK: Tensor,
        layer: LMHead,
        group: dist.ProcessGroup,
    ) -> Tensor:
        # One tensor all the way: they are the largest there is.
        logits_RV = layer.logits(hidden_RD)
        part = logits_RV.shape[1]
        top_R1 = logits_RV.amax(1, keepdim=True)
        dist.all_reduce(top_R1, op=dist.ReduceOp.MAX, group=group)
        shifted_RV = logits_RV.sub_(top_R1)
        local_RK = targets_RK - dist.get_rank(group) * part
        is_here_RK = (local_RK >= 0) & (local_RK < part)
        local_RK = local_RK.clamp(0, part - 1)
        chosen_RK = shifted_RV.gather(1, local_RK) * is_here_RK
        dist.all_reduce(chosen_RK, group=group)
        exp_RV = shifted_RV.exp_()
        sum_R1 = exp_RV.sum(1, keepdim=True)
        dist.all_reduce(sum_R1, group=group)
        ctx.layer = layer
        ctx.save_for_backward(hidden_RD, exp_RV, sum_R1, local_RK, is_here_RK)
        return chosen_RK - sum_R1.log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 - torch's
        hidden_RD, exp_RV, sum_R1, local_RK, is_here_RK = ctx.saved_tensors
        (c_RK,) = gradients
        # Computed for this pass alone, and as large as all else here together.
        dlogits_RV = exp_RV.mul_(-c_RK.sum(1, keepdim=True) / sum_R1)
        dlogits_RV.scatter_add_(1, local_RK, c_RK * is_here_RK)
        dh_RD = ctx.layer.backward(hidden_RD, dlogits_RV.to(hidden_RD.dtype))
        return dh_RD, None, None, None


def logprobs(
    layer: LMHead,
    hidden_RD: Tensor,
    targets_RK: Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
) -> Tensor:
    """Return the logprobs [R, K] of targets, float32.

    They are differentiable by hidden states, whose gradient is this rank's part of a sum over the
    group. What is trained of the layer gets its gradient meanwhile.

    Args:
        layer: of this rank; all parts of the vocabulary are of one size.
        hidden_RD: what enters it, the same at all ranks of the group.
        targets_RK: int64 ids in the whole vocabulary.
        group: the ranks the vocabulary is divided over, in order.
        vocab_size: of the whole.
    """
    if not hidden_RD.requires_grad:
        # The output layer may be all that is trained.
        hidden_RD = hidden_RD.detach().requires_grad_()

    def some(hidden_RD: Tensor, targets_RK: Tensor) -> Tensor:
        result: Tensor = _VocabParallelLogprobs.apply(hidden_RD, targets_RK, layer, group)
        return result

    rows = max(1, _LOGITS_BYTES * group.size() // (4 * vocab_size))
    parts = zip(hidden_RD.split(rows), targets_RK.split(rows), strict=True)
    return torch.cat(
        [checkpoint(some, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    )
