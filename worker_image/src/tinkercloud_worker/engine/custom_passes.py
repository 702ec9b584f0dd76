"""Custom losses of trainers with several ranks: the head has them computed, ranks a linear loss.

A custom loss may fail because of values that only one rank has, or take too long on one rank only.
Ranks must not fail separately: their group would end, and with it the models of all owners. So the
ranks first compute logprobs, a process of the head differentiates the loss with respect to them,
and the ranks compute the backward pass of the cross-entropy whose weights are the negative
derivatives. The ranks are free for others while the loss is computed.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_worker.custom_losses.messages import LossValues
from tinkercloud_worker.custom_losses.uploaded import LossIsComputing, UploadedLoss
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.engine.turns.engine_thread import Pause, Pieces

_LINEAR_LOSS = "cross_entropy"

Pass = Callable[[Batch], LossOutput]
"""Runs a batch that has no custom loss at all ranks."""


def forward(batch: Batch, uploaded: UploadedLoss, run: Pass) -> Pieces[LossOutput]:
    """Compute a forward pass.

    Raises:
        InvalidRequest: the custom loss failed.
        LossEnded: it was ended.
    """
    output = run(_unweighted(batch))
    values = yield from _values(batch, uploaded, output.logprobs)
    return _with_loss(output, values)


def forward_backward(
    batch: Batch, uploaded: UploadedLoss, score: Pass, run: Pass
) -> Pieces[LossOutput]:
    """Compute a pass that adds to the gradient.

    Args:
        batch: the examples.
        uploaded: their loss.
        score: computes logprobs.
        run: adds to the gradient; not called if a custom loss fails.

    Raises:
        InvalidRequest: the custom loss failed.
        LossEnded: it was ended.
    """
    logprobs = score(_unweighted(batch)).logprobs
    values = yield from _values(batch, uploaded, logprobs)
    return _with_loss(run(_weighted(batch, [-each for each in values.gradients])), values)


def _values(
    batch: Batch, uploaded: UploadedLoss, logprobs: Sequence[FloatArray]
) -> Pieces[LossValues]:
    data = batch.custom_data
    while True:
        try:
            return uploaded.values(logprobs, data)
        except LossIsComputing as error:
            pause = Pause(error.done)
        yield pause


def _unweighted(batch: Batch) -> Batch:
    return _weighted(batch, [np.zeros(e.targets.shape, np.float32) for e in batch.examples])


def _weighted(batch: Batch, weights: Sequence[FloatArray]) -> Batch:
    """Return a batch with a linear loss: weights are float32, [N] or [N, K]."""
    examples = [
        replace(example, inputs={"weights": each.reshape(example.targets.shape)}, custom=None)
        for example, each in zip(batch.examples, weights, strict=True)
    ]
    return Batch(examples, _LINEAR_LOSS, batch.forward_only)


def _with_loss(output: LossOutput, values: LossValues) -> LossOutput:
    loss = float(torch.from_numpy(values.losses).sum())
    return replace(output, metrics={**output.metrics, "loss:sum": loss})
