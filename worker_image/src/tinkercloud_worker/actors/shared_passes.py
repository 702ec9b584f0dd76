"""Passes and optimizer steps that several models share at the ranks of one group.

The examples of all requests are divided together over the replicas, so that each has about the same
number of tokens, and every replica runs its part as one micro-batch. `engine.ranks.SharingRank`
says what a failure costs. A request that runs alone is divided as always: its bits do not depend on
this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

from tinkercloud_worker.actors.batch_shards import assign_examples, merge_outputs, select_examples
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine.batch import Batch, padded_lengths
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import DirectTrainer, LossOutput, OptimizerStep, TrainingPass
from tinkercloud_worker.engine.turns.engine_thread import PieceLimit, Pieces

Shards = Sequence[Sequence[int]]
"""The indices, within a batch, of the examples of each replica."""


def number_of_replicas(memberships: Sequence[Membership]) -> int:
    """Return how many replicas of the model the ranks are."""
    return 1 + max(membership.replica for membership in memberships)


def divided(batches: Sequence[Batch], memberships: Sequence[Membership]) -> list[Shards]:
    """Divide the examples of several batches over the replicas; return the shards of each batch."""
    lengths = [_lengths(batch, memberships[0].pad_to_multiple_of) for batch in batches]
    replicas = number_of_replicas(memberships)
    mixed = assign_examples([each for own in lengths for each in own], replicas)
    bounds = pairwise(accumulate((len(own) for own in lengths), initial=0))
    return [
        [[index - start for index in shard if start <= index < stop] for shard in mixed]
        for start, stop in bounds
    ]


def most_tokens(batches: Sequence[Batch], shards: Sequence[Shards], pad_to_multiple_of: int) -> int:
    """Return the tokens, with padding, of the replica that has the most of a shared pass."""
    lengths = [_lengths(batch, pad_to_multiple_of) for batch in batches]
    return max(
        sum(
            own[index]
            for own, of_batch in zip(lengths, shards, strict=True)
            for index in of_batch[replica]
        )
        for replica in range(len(shards[0]))
    )


def _lengths(batch: Batch, pad_to_multiple_of: int) -> tuple[int, ...]:
    """Return the tokens of each example, with padding."""
    return padded_lengths([len(example.tokens) for example in batch.examples], pad_to_multiple_of)


def parts_of_ranks(
    items: Sequence[TrainingPass], shards: Sequence[Shards], memberships: Sequence[Membership]
) -> list[list[TrainingPass]]:
    """Return what each rank computes of a shared pass: a part of every item, some without data."""
    parts = [
        [
            replace(item, batch=select_examples(item.batch, shard))
            for item, shard in zip(items, of_replica, strict=True)
        ]
        for of_replica in zip(*shards, strict=True)
    ]
    return [parts[membership.replica] for membership in memberships]


def outputs_of(
    answers: Sequence[Sequence[LossOutput]],
    shards: Sequence[Shards],
    memberships: Sequence[Membership],
) -> list[LossOutput]:
    """Merge what the ranks return of a shared pass into one output for each item."""
    of_replica = {
        membership.replica: outputs
        for membership, outputs in zip(memberships, answers, strict=True)
        if membership.answers
    }
    return [
        merge_outputs(of_item, [of_replica[replica][index] for replica in range(len(of_item))])
        for index, of_item in enumerate(shards)
    ]


class SharingTrainer(DirectTrainer, Protocol):
    """What this module needs of the trainer that runs the ranks."""

    def may_share(self, model_id: str) -> bool:
        """Whether this is a LoRA adapter with no unreported gradient loss."""

    def memberships(self) -> Sequence[Membership]:
        """Return the places of all ranks."""

    def custom_pieces(
        self, model_id: str, batch: Batch, uploaded: UploadedLoss
    ) -> Pieces[LossOutput]:
        """Run a pass with an uploaded loss."""

    def shared_pass(
        self, items: Sequence[TrainingPass], shards: Sequence[Shards]
    ) -> list[LossOutput]:
        """Run passes of different models as one.

        An exception means that the pass changed no gradient, so that each can run again alone. If
        ranks were lost, so were earlier gradients: passes of their models then say so.
        """

    def shared_step(self, steps: Sequence[OptimizerStep]) -> list[Mapping[str, float]]:
        """Run the steps of different models; an exception means that none was applied."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a batch adds to a shared pass, in tokens with the padding of each example."""

    kind: tuple[bool, int] | None
    """Passes of one kind can share; None: this one runs alone."""
    tokens: int
    longest: int
    """Tokens of the longest example."""

    @classmethod
    def of(cls, batch: Batch, multiple: int) -> "_Part":
        lengths = _lengths(batch, multiple)
        # A replica may not get the widest targets, and could not join them with those of others.
        is_regular = len({example.targets.shape[1] for example in batch.examples}) == 1
        can_share = batch.uploaded is None and batch.loss.is_token_local and is_regular
        kind = (batch.forward_only, batch.num_targets) if can_share else None
        return cls(kind, sum(lengths), max(lengths))


class RankedPasses:
    """Implements `engine.thread.Batcher` for passes."""

    def __init__(self, trainer: SharingTrainer) -> None:
        self._trainer = trainer
        self._joined: list[tuple[TrainingPass, _Part]] = []
        """The passes of the last call that may share one; so each of many is measured once."""

    def can_batch(self, items: Sequence[TrainingPass], item: TrainingPass) -> bool:
        """See `engine.thread.Batcher`: adapters share a pass that is one micro-batch everywhere.

        Custom losses run alone: the head differentiates them between two passes of the ranks
        (`engine.custom_passes`).
        """
        memberships = self._trainer.memberships()
        multiple = memberships[0].pad_to_multiple_of
        if [id(each) for each in items] != [id(each) for each, _ in self._joined]:
            self._joined = [(each, _Part.of(each.batch, multiple)) for each in items]
        joined = [*self._joined, (item, _Part.of(item.batch, multiple))]
        parts = [part for _, part in joined]
        may_join = (
            parts[-1].kind is not None
            and len({part.kind for part in parts}) == 1
            and len({each.model_id for each, _ in joined}) == len(joined)
            and all(self._trainer.may_share(each.model_id) for each, _ in joined)
            and self._fit([each.batch for each, _ in joined], parts, memberships)
        )
        if may_join:
            self._joined = joined
        return may_join

    @staticmethod
    def _fit(
        batches: Sequence[Batch], parts: Sequence["_Part"], memberships: Sequence[Membership]
    ) -> bool:
        """Whether no replica gets too many tokens of a shared pass."""
        most = min(membership.max_shared_tokens for membership in memberships)
        replicas = number_of_replicas(memberships)
        tokens, longest = sum(part.tokens for part in parts), max(part.longest for part in parts)
        # When a replica gets its last example it has the fewest tokens: at most the mean of the
        # others. Only passes that are nearly full are divided to see.
        if tokens > most * replicas:
            return False
        return (
            tokens + (replicas - 1) * longest <= most * replicas
            or most_tokens(
                batches, divided(batches, memberships), memberships[0].pad_to_multiple_of
            )
            <= most
        )

    def run_batch(
        self, items: Sequence[TrainingPass], yield_point: Callable[[], None]
    ) -> list[LossOutput]:
        """See `engine.thread.Batcher`."""
        self._joined = []
        shards = divided([item.batch for item in items], self._trainer.memberships())
        outputs = self._trainer.shared_pass(items, shards)
        yield_point()
        return outputs

    def pieces(self, item: TrainingPass, limit: PieceLimit) -> Pieces[LossOutput]:
        """See `engine.thread.Batcher`: a pass is one piece, unless the limit asks for smaller ones.

        Between two pieces only the gradient of its own model has changed. A custom loss needs all
        of its data at once.
        """
        self._joined = []
        batch = item.batch
        if batch.uploaded is not None:
            return (yield from self._trainer.custom_pieces(item.model_id, batch, batch.uploaded))
        compute = self._trainer.forward if batch.forward_only else self._trainer.forward_backward
        shards: list[range] = []
        outputs: list[LossOutput] = []
        start, examples = 0, len(batch.examples)
        while True:
            shard = range(start, self._end_of_piece(batch, start, limit))
            part = batch if len(shard) == examples else select_examples(batch, shard)
            outputs.append(compute(item.model_id, part))
            shards.append(shard)
            start = shard.stop
            if start == examples:
                return outputs[0] if len(outputs) == 1 else merge_outputs(shards, outputs)
            yield part.num_tokens

    def _end_of_piece(self, batch: Batch, start: int, limit: PieceLimit) -> int:
        """Return where a piece ends that begins with an example: as late as the limit permits."""
        memberships = self._trainer.memberships()
        may_differ = all(membership.max_shared_tokens for membership in memberships)
        most = limit() if may_differ else None
        if most is None:
            return len(batch.examples)
        at_once = max(most, *(membership.efficient_tokens for membership in memberships))
        left = at_once * number_of_replicas(memberships) - len(batch.examples[start].tokens)
        for stop in range(start + 1, len(batch.examples)):
            left -= len(batch.examples[stop].tokens)
            if left < 0:
                return stop
        return len(batch.examples)


class RankedSteps:
    """Implements `engine.thread.Batcher` for optimizer steps."""

    def __init__(self, trainer: SharingTrainer) -> None:
        self._trainer = trainer

    def can_batch(self, items: Sequence[OptimizerStep], item: OptimizerStep) -> bool:
        """See `engine.thread.Batcher`: the steps of different adapters."""
        return all(self._trainer.may_share(each.model_id) for each in (*items, item)) and all(
            each.model_id != item.model_id for each in items
        )

    def run_batch(
        self, items: Sequence[OptimizerStep], yield_point: Callable[[], None]
    ) -> list[Mapping[str, float]]:
        """See `engine.thread.Batcher`."""
        metrics = self._trainer.shared_step(items)
        yield_point()
        return metrics

    def pieces(self, item: OptimizerStep, _limit: PieceLimit) -> Pieces[Mapping[str, float]]:
        """See `engine.thread.Batcher`: a step is one piece."""
        yield from ()
        return self._trainer.optim_step(item.model_id, item.params)
