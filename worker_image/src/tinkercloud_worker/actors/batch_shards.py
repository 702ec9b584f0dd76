"""Splits a batch into shards for replicas, and merges their outputs."""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import LossOutput


def assign_examples(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """Assign examples to replicas so that all have about the same number of tokens.

    Examples are assigned from the longest on, each to the replica with the fewest tokens so far.
    The result depends on the lengths alone, so equal requests give bitwise equal results. With
    fewer examples than replicas, some replicas get none.

    Returns:
        The shard of each replica: indices of its examples, in batch order.
    """
    shards: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, lightest = loads[0]
        shards[lightest].append(index)
        heapq.heapreplace(loads, (load + lengths[index], lightest))
    return [sorted(shard) for shard in shards]


def select_examples(batch: Batch, shard: Sequence[int]) -> Batch:
    """Return a batch of only these examples."""
    return replace(batch, examples=[batch.examples[index] for index in shard])


def merge_outputs(shards: Sequence[Sequence[int]], outputs: Sequence[LossOutput]) -> LossOutput:
    """Merge the outputs of all replicas, in the order of the whole batch.

    All metrics of a pass are sums, and so are the token counts of experts.
    """
    logprobs: dict[int, FloatArray] = {}
    metrics: dict[str, float] = {}
    for shard, output in zip(shards, outputs, strict=True):
        logprobs.update(zip(shard, output.logprobs, strict=True))
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    counts = [output.expert_tokens for output in outputs if output.expert_tokens is not None]
    return LossOutput(
        [logprobs[index] for index in range(len(logprobs))],
        metrics,
        np.sum(counts, axis=0) if counts else None,
    )
