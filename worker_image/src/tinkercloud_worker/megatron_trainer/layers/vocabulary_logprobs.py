"""Vocabulary-parallel logprobs, a few positions at a time.

No rank ever holds the logits of the full vocabulary: ranks exchange three numbers per position. No
rank holds the logits of all positions either: they are recomputed in the backward pass. Logits are
always float32, as in the torch trainer.

The gradients of hidden states and of an adapter's A on each rank are partial sums over its part of
the vocabulary.

Shape legend: R positions, D hidden size, V this rank's part of the vocabulary, K targets per
position.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkercloud_worker.device.frozen_linear import FrozenLinear
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.lora.parameters import gradient_of
from tinkercloud_worker.megatron_trainer.layers.megatron_adapters import Active, part_of
from tinkercloud_worker.model.lm_head import LMHead

_LOGITS_BYTES = 256 << 20
"""Bytes of float32 logits held at a time."""


def frozen_output_layer(
    weight_VD: Tensor, target: Target, adapters: Sequence[tuple[slice, Active]]
) -> LMHead:
    """Return the LM head of the base, with the adapters that cover it.

    Args:
        weight_VD: this rank's part of the weight.
        target: the full layer.
        adapters: the adapters of the pass, each with the range of its rows.
    """
    own = []
    for rows, active in adapters:
        if target.a_name in active.tensors:
            a, b = active.tensors[target.a_name], active.tensors[target.b_name]
            own_b = part_of(b, 0).detach()
            own_b.grad = part_of(gradient_of(b), 0)
            own.append((rows, a, own_b, active.scale))
    return LMHead(FrozenLinear(weight_VD, None), own)


def trained_output_layer(weight: Tensor, dtype: torch.dtype) -> LMHead:
    """Return a trained LM head.

    Its gradient sums over many calls with a few positions each, and accumulates in float32.
    Autograd would accumulate it in the dtype of passes.

    Args:
        weight: this rank's part of the weight, float32 [V, D], from a `Trainable`.
        dtype: the dtype of passes.
    """
    linear = FrozenLinear(weight.detach().to(dtype), None)
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
        # Computed in place: logits are the largest tensor.
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
        # Computed only for this pass, and as large as everything else here.
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

    Differentiable with respect to hidden states, whose gradient is this rank's partial sum over the
    group. Trainable tensors of the layer accumulate their gradients at the same time.

    Args:
        layer: this rank's LM head, with ranges of rows of each adapter; all parts of the
            vocabulary have the same size.
        hidden_RD: its input, the same on all ranks of the group.
        targets_RK: int64 ids in the full vocabulary.
        group: the ranks that share the vocabulary, in order.
        vocab_size: the size of the full vocabulary.
    """
    if not hidden_RD.requires_grad:
        # The LM head may be the only trained layer.
        hidden_RD = hidden_RD.detach().requires_grad_()

    def some(hidden_RD: Tensor, targets_RK: Tensor, own: LMHead) -> Tensor:
        result: Tensor = _VocabParallelLogprobs.apply(hidden_RD, targets_RK, own, group)
        return result

    rows = max(1, _LOGITS_BYTES * group.size() // (4 * vocab_size))
    results = []
    for start, *part in zip(
        range(0, max(1, len(hidden_RD)), rows),
        hidden_RD.split(rows),
        targets_RK.split(rows),
        strict=True,
    ):
        own = layer.of_rows(slice(start, start + len(part[0])))
        results.append(checkpoint(some, *part, own, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(results)
