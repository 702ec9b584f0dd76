"""Custom losses of trainers with several ranks: the head computes them, ranks a linear loss.

A custom loss may fail because of values that only one rank has, or take too long on one rank only.
Ranks must not fail separately: their group would end, and with it the models of all owners. So the
ranks first compute logprobs, the head differentiates the loss with respect to them, and the ranks
compute the backward pass of the cross-entropy whose weights are the negative derivatives.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tinkercloud_protocol.tensors import FloatArray
from tinkercloud_worker import custom_losses
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import LossOutput

_LINEAR_LOSS = "cross_entropy"

Pass = Callable[[Batch], LossOutput]
"""Runs a batch that has no custom loss at all ranks."""


def forward(batch: Batch, run: Pass) -> LossOutput:
    """Return the result of a forward pass.

    Raises:
        InvalidRequest: the custom loss failed.
    """
    if batch.definition is None:
        return run(batch)
    output = run(_unweighted(batch))
    loss, _ = _differentiated(batch, batch.definition, output.logprobs)
    return _with_loss(output, loss)


def forward_backward(batch: Batch, score: Pass, run: Pass) -> LossOutput:
    """Return the result of a pass that adds to the gradient.

    Args:
        batch: the examples and their loss.
        score: computes logprobs.
        run: adds to the gradient; not called if a custom loss fails.

    Raises:
        InvalidRequest: the custom loss failed.
    """
    if batch.definition is None:
        return run(batch)
    logprobs = score(_unweighted(batch)).logprobs
    loss, derivatives = _differentiated(batch, batch.definition, logprobs)
    return _with_loss(run(_weighted(batch, [-each for each in derivatives])), loss)


def _differentiated(
    batch: Batch, definition: bytes, logprobs: Sequence[FloatArray]
) -> tuple[float, list[FloatArray]]:
    """Return the sum of a loss, and its derivatives with respect to the logprobs of each datum."""
    data = [example.custom for example in batch.examples if example.custom is not None]
    leaves = [torch.from_numpy(array).clone().requires_grad_() for array in logprobs]
    with torch.enable_grad():
        losses, _ = custom_losses.losses_of_data(definition, leaves, data)
        total = losses.sum()
        derivatives = torch.autograd.grad(total, leaves)
    return float(total.detach()), [each.numpy() for each in derivatives]


def _unweighted(batch: Batch) -> Batch:
    return _weighted(batch, [np.zeros(e.targets.shape, np.float32) for e in batch.examples])


def _weighted(batch: Batch, weights: Sequence[FloatArray]) -> Batch:
    """Return a batch with a linear loss: weights are float32, [N] or [N, K]."""
    examples = [
        replace(example, inputs={"weights": each.reshape(example.targets.shape)}, custom=None)
        for example, each in zip(batch.examples, weights, strict=True)
    ]
    return Batch(examples, _LINEAR_LOSS, batch.forward_only)


def _with_loss(output: LossOutput, loss: float) -> LossOutput:
    return replace(output, metrics={**output.metrics, "loss:sum": loss})
