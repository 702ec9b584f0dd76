"""A trainer that runs on a group of ranks.

Each rank has its own trainer; every call here is one command to all ranks. The batch of a pass is
split over the replicas of the model: the ranks of one replica get the same shard of the batch, and
one of them returns its output.

When a rank is lost, the group is lost, and the running command fails. Models that the surviving
ranks hold completely are salvaged in the state after their last optim_step, and the next command
starts another group with them. Unapplied gradients are lost, since part of each was at the lost
rank: the first request that would use such a gradient fails with the reason. A model that no
surviving rank holds completely is lost, and calls about it raise StateLost from then on. Salvaged
models can be saved without another group, for which the cluster may lack resources.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import Unavailable, WireError
from tinkercloud_worker.actors.rank_group import RankGroup, RanksLost
from tinkercloud_worker.actors.rank_weight_host import RankWeightHost
from tinkercloud_worker.actors.replaceable_group import ReplaceableGroup
from tinkercloud_worker.actors.shared_passes import (
    RankedPasses,
    RankedSteps,
    Shards,
    divided,
    outputs_of,
    parts_of_ranks,
)
from tinkercloud_worker.actors.shares import Shares
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine import custom_passes
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import (
    Gradient,
    GradientLost,
    LossOutput,
    OptimizerStep,
    Publication,
    TrainingPass,
    TrainingState,
    WeightsCopy,
)
from tinkercloud_worker.engine.turns.engine_thread import Pieces

T = TypeVar("T")


class RankedTrainer:
    """Implements `engine.trainer.Trainer`."""

    def __init__(
        self,
        start: Callable[[threading.Event], RankGroup],
        weight_host: RankWeightHost | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            start: starts a group whose worker objects are RankTrainers, and fails if the event is
                set meanwhile; called again after a loss.
            weight_host: where published full models are stored; None to copy them to the head.

        Raises:
            RanksUnavailable: the group could not be started.
        """
        self._weight_host = weight_host
        self.group = ReplaceableGroup(start, weight_host)
        self._held = self.group.held
        self._passes, self._steps = RankedPasses(self), RankedSteps(self)
        first = self.group.memberships[0]
        self.limits = first.limits
        self.base_fingerprint = first.base_fingerprint
        self.reads_images = first.reads_images

    @property
    def batcher(self) -> RankedPasses:
        """See `Trainer.batcher`."""
        return self._passes

    @property
    def stepper(self) -> RankedSteps:
        """See `Trainer.stepper`."""
        return self._steps

    def memberships(self) -> Sequence[Membership]:
        """Return the places of all ranks in the group."""
        return self.group.memberships

    def may_share(self, model_id: str) -> bool:
        """Whether this is a LoRA adapter in memory with no unreported gradient loss."""
        return self._held.may_share(model_id) and not self.group.memory.is_out(model_id)

    def close(self) -> None:
        """End the ranks."""
        self._held.names.clear()
        if self._weight_host is not None:
            self._weight_host.close()
        self.group.current.close()

    def stop_waiting(self) -> None:
        """See `Trainer.stop_waiting`: no other group is started."""
        self.group.no_more_starts.set()

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`.

        Raises:
            Overloaded: a rank has no room for it.
            RanksLost: a rank was lost meanwhile; the model was not created.
            RanksUnavailable: the last group was lost, and no other could be started.
        """
        self.group.command(lambda group: self.group.memory.add(group, model_id, lora_config))
        self._held.add(model_id, is_whole=lora_config is None)

    def remove_model(self, model_id: str) -> None:
        """See `Trainer.remove_model`."""
        if self._held.remove(model_id):
            self.group.memory.remove(model_id)
            self.group.call_if_alive("remove_model", model_id)
            self.group.measure_if_due()

    @property
    def capacity(self) -> HeadCapacity | None:
        """See `Trainer.capacity`: that of the rank with the least room."""
        return self.group.memory.capacity

    def memory_bytes(self, model_id: str) -> int:
        """See `Trainer.memory_bytes`: those at the rank where it takes the most."""
        return self.group.memory.bytes_of(model_id)

    def forward(self, model_id: str, batch: Batch) -> LossOutput:
        """See `DirectTrainer.forward`."""
        return self._pass("forward", model_id, batch)

    def forward_backward(self, model_id: str, batch: Batch) -> LossOutput:
        """See `DirectTrainer.forward_backward`."""
        self._report_lost_gradient(model_id)
        with self._forgetting_gradient(model_id):
            return self._adding_pass(model_id, batch)

    def custom_pieces(
        self, model_id: str, batch: Batch, uploaded: UploadedLoss
    ) -> Pieces[LossOutput]:
        """Run a pass with an uploaded loss (`engine.custom_passes`), in one piece with a pause.

        Raises:
            GradientLost: a rank was lost meanwhile; the model continues without a gradient.
        """

        def score(linear: Batch) -> LossOutput:
            return self._pass("forward", model_id, linear)

        if batch.forward_only:
            return (yield from custom_passes.forward(batch, uploaded, score))
        self._report_lost_gradient(model_id)

        def run(linear: Batch) -> LossOutput:
            # A rank may have been lost during the pause.
            self._report_lost_gradient(model_id)
            return self._adding_pass(model_id, linear)

        with self._forgetting_gradient(model_id):
            return (yield from custom_passes.forward_backward(batch, uploaded, score, run))

    def _adding_pass(self, model_id: str, batch: Batch) -> LossOutput:
        self._held.unapplied.add(model_id)
        return self._pass("forward_backward", model_id, batch)

    @contextmanager
    def _forgetting_gradient(self, model_id: str) -> Iterator[None]:
        """Forget the gradient of a model if it is lost within the context."""
        try:
            yield
        except GradientLost:
            self._held.forget_gradient(model_id)
            raise

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `DirectTrainer.optim_step`. If a rank is lost, it is done nowhere or everywhere."""
        self._report_lost_gradient(model_id)
        with self._forgetting_gradient(model_id):
            self._bring_in(model_id)
        self._held.unapplied.discard(model_id)
        self.group.model_command(model_id, lambda group: group.call("sum_gradient", model_id))
        metrics = self.group.model_command(
            model_id, lambda group: group.call_independently("optim_step", model_id, params)
        )
        return cast("Mapping[str, float]", metrics)

    def discard_gradient(self, model_id: str) -> None:
        """See `Trainer.discard_gradient`. A lost model has no gradient."""
        self._held.forget_gradient(model_id)
        if model_id in self._held.names:
            self.group.call_if_alive("discard_gradient", model_id)

    def release_memory(self) -> None:
        """See `Trainer.release_memory`. The next command reports a lost rank."""
        with suppress(RanksLost):
            self.group.call_if_alive("release_memory")

    def copy_weights(self, model_id: str) -> WeightsCopy:
        """See `Trainer.copy_weights`. If a node is lost meanwhile, surviving ranks may have it."""

        def assembled() -> WeightsCopy:
            shares = self._shares("share_weights", model_id)
            return shares.weights() if shares is not None else self._salvaged_weights(model_id)

        try:
            return assembled()
        except Unavailable:
            # A node was lost. The next command notices that, and salvages what others have.
            return assembled()

    def publication(self, model_id: str) -> Callable[[], Publication]:
        """See `Trainer.publication`. Full models stay at rank 0 if there is a weight host."""
        shares = self._shares("share_published", model_id)
        if shares is None:
            weights = self._salvaged_weights(model_id)
            return lambda: weights
        if self._weight_host is not None and model_id in self._held.whole:
            with suppress(GradientLost):
                self.group.model_command(model_id, self._weight_host.attach_to)
                return partial(self._weight_host.store_or_copy, shares)
        return shares.weights

    def export_state(self, model_id: str) -> TrainingState:
        """See `Trainer.export_state`."""
        return self.begin_export(model_id)()

    def begin_export(self, model_id: str) -> Callable[[], TrainingState]:
        """See `Trainer.begin_export`.

        Ranks copy their parts at once, to the stores of their nodes; the callable assembles them,
        also if the ranks were lost meanwhile. It raises Unavailable if a node was lost: another
        call then gives the state that surviving ranks have, if they have all of it.
        """
        shares = self._shares("share_state", model_id)
        if shares is not None:
            return shares.state
        state = self._held.salvaged[model_id]
        return lambda: state

    def begin_reading(self, model_id: str, read: Callable[[TrainingState], T]) -> Callable[[], T]:
        """See `Trainer.begin_reading`. The function reads a copy of the state at that moment."""
        take = self.begin_export(model_id)
        return lambda: read(take())

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """See `Trainer.import_state`."""
        self._bring_in(model_id)
        self.group.model_command(
            model_id, lambda group: group.call_independently("import_state", model_id, state)
        )
        self._held.forget_gradient(model_id)

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`. Ranks sum their parts only if there is a gradient.

        Raises:
            GradientLost: it was lost with a rank, and no request has reported it.
        """
        shares = None
        if model_id in self._held.unapplied:
            shares = self._shares("share_gradient", model_id)
        self._held.check_gradient(model_id)
        return shares.gradient() if shares is not None else None

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`."""
        self._bring_in(model_id)
        self.group.model_command(
            model_id, lambda group: group.call_independently("import_gradient", model_id, gradient)
        )
        self._held.forget_gradient(model_id)
        self._held.unapplied.add(model_id)

    def shared_pass(
        self, items: Sequence[TrainingPass], shards: Sequence[Shards]
    ) -> list[LossOutput]:
        """Run passes of different adapters as one micro-batch at every replica.

        Args:
            items: the passes, all with or all without a gradient.
            shards: of each pass, the examples of every replica.

        Raises:
            RanksLost: a rank was lost, and with it the gradients from before. A model that had none
                has lost nothing: its pass can run again.
            SharedPassFailed: a rank could not compute it. No gradient has changed.
        """
        parts = parts_of_ranks(items, shards, self.group.memberships)
        models = [item.model_id for item in items]
        self.group.bring_in(models)
        answers = self.group.command(
            lambda group: group.call_each("shared_pass", [(part,) for part in parts])
        )
        # Only now: a pass that fails is repeated, so it must not count as a lost gradient.
        if not items[0].batch.forward_only:
            self._held.unapplied.update(models)
        self.group.measure_if_due()
        return outputs_of(answers, shards, self.group.memberships)

    def shared_step(self, steps: Sequence[OptimizerStep]) -> list[Mapping[str, float]]:
        """Apply the gradients of different adapters with two commands in all.

        Raises:
            RanksLost: a rank was lost, and nothing was applied; the models have lost their
                gradients.
            InvalidRequest: a gradient is not finite. Nothing was applied, and all gradients are
                kept.
        """
        models = [step.model_id for step in steps]
        self.group.bring_in(models)
        self.group.command(lambda group: group.call("sum_gradients", models))
        self._held.unapplied.difference_update(models)
        try:
            metrics = self.group.command(
                lambda group: group.call_independently("optim_steps", steps)
            )
        except Exception as error:
            if isinstance(error, WireError) and self.group.current.is_alive:
                self._held.unapplied.update(models)
            else:
                # Another group has none of these gradients: a step there would apply nothing. If
                # the ranks did not fail, theirs are sums, and another step would sum them again.
                reason = error.message if isinstance(error, WireError) else repr(error)
                self._held.note_gradients_lost(models, reason)
            raise
        return cast("list[Mapping[str, float]]", metrics)

    def _pass(self, method: str, model_id: str, batch: Batch) -> LossOutput:
        self._bring_in(model_id)
        item = TrainingPass(model_id, batch)
        shards = divided([batch], self.group.memberships)
        parts = parts_of_ranks([item], shards, self.group.memberships)
        arguments = [(model_id, part.batch) for [part] in parts]
        outputs = self.group.model_command(
            model_id, lambda group: group.call_each(method, arguments)
        )
        self.group.measure_if_due()
        [merged] = outputs_of([[output] for output in outputs], shards, self.group.memberships)
        return merged

    def _shares(self, method: str, model_id: str) -> Shares | None:
        """Return what the ranks export of a model; None if the group is lost.

        Args:
            method: method of the ranks' trainers that returns a share.
            model_id: the model.

        Raises:
            StateLost: the model is lost.
        """
        self.group.check_exists(model_id)
        if self.group.current.is_alive:
            with suppress(GradientLost):
                return self.group.model_command(
                    model_id, lambda group: Shares.of(group.call_in_parts(method, model_id))
                )
        return None

    def _salvaged_weights(self, model_id: str) -> WeightsCopy:
        """Return weights that may be sampled from for long.

        They are copied out of Ray's store, which has space only for data in transit.
        """
        weights = self._held.salvaged[model_id].weights
        return replace(weights, tensors={n: each.clone() for n, each in weights.tensors.items()})

    def _bring_in(self, model_id: str) -> None:
        """Page a model in at all ranks; raises as `model_command`, and Overloaded if it can't."""
        self.group.model_command(
            model_id, lambda group: self.group.memory.bring_in(group, [model_id])
        )

    def _report_lost_gradient(self, model_id: str) -> None:
        try:
            self._held.check_gradient(model_id)
        except GradientLost:
            # The data is sent again: what may be left at the ranks must not be added to it.
            self.group.call_if_alive("discard_gradient", model_id)
            self._held.forget_gradient(model_id)
            raise
