"""How a batch is divided over replicas, and their results put together again."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tinkercloud_protocol.tensors import FloatArray
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import LossOutput


def deal(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """Divide examples over replicas so that each has about as many tokens.

    The longest example goes first, each to the replica with the fewest tokens so far. It depends
    on the lengths alone, so equal requests give equal bits. With fewer examples than replicas some
    get none.

    Returns:
        Indices of each replica's examples, in the order of the batch.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = min(range(replicas), key=lambda replica: (loads[replica], replica))
        shares[lightest].append(index)
        loads[lightest] += lengths[index]
    return [sorted(share) for share in shares]


def part(batch: Batch, share: Sequence[int]) -> Batch:
    """Return the batch of some of the examples."""
    return replace(batch, examples=[batch.examples[index] for index in share])


def join(shares: Sequence[Sequence[int]], outputs: Sequence[LossOutput]) -> LossOutput:
    """Put the replicas' results together, in the order of the whole batch.

    Every metric of a pass is a sum, and so is what experts were sent.
    """
    logprobs: dict[int, FloatArray] = {}
    metrics: dict[str, float] = {}
    for share, output in zip(shares, outputs, strict=True):
        logprobs.update(zip(share, output.logprobs, strict=True))
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    counts = [output.expert_tokens for output in outputs if output.expert_tokens is not None]
    return LossOutput(
        [logprobs[index] for index in range(len(logprobs))],
        metrics,
        np.sum(counts, axis=0) if counts else None,
    )
