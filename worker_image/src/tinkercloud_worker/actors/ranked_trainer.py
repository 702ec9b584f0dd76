"""One trainer made of the ranks of a group.

Each rank holds a trainer of its own, its part of the whole; every call here is one command to all
of them. A pass is divided over the replicas of the model: ranks that hold one replica between them
get the same share of the batch, and one of them answers for it.

When a rank is lost, its group is, and the command that ran fails. Models that are whole at each of
the other ranks are salvaged, as of their last optim_step. The next command starts another group,
which goes on with them. Gradients that were not applied yet had a part at the lost rank: each
model's client is told so once, in answer to the first request that would have built on one. A model
of which no living rank holds all is lost, and calls about it raise StateLost from then on. What is
salvaged can be saved without another group, for which there may be no room any more.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from tinkercloud_protocol.errors import StateLost, Unavailable
from tinkercloud_protocol.hyperparameters import AdamParams, LoraConfig
from tinkercloud_worker.actors.batch_shards import deal, join, part
from tinkercloud_worker.actors.group import RankGroup, RanksLost, RanksUnavailable
from tinkercloud_worker.actors.rank_weight_host import RankWeightHost, waited
from tinkercloud_worker.engine.batch import Batch, padded_lengths
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import (
    Gradient,
    GradientLost,
    LossOutput,
    Publication,
    TrainingState,
    WeightsSnapshot,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")
Ask = Callable[[RankGroup, str, str], Any]
"""Has the ranks of a group call a method about a model: `RankGroup.call`, or one like it."""


class RankedTrainer:
    """See `engine.trainer.Trainer`, whose contract this class fulfils."""

    def __init__(
        self,
        start: Callable[[threading.Event], RankGroup],
        weight_host: RankWeightHost | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            start: starts a group whose worker objects are RankTrainers, unless the event is set
                meanwhile; called again after a loss.
            weight_host: where published whole models stay; None: they come to the head.

        Raises:
            RanksUnavailable: the group could not be started.
        """
        self._start = start
        self._weight_host = weight_host
        self._models: set[str] = set()
        self._whole: set[str] = set()
        """Those of `_models` that are no adapters."""
        self._no_more_starts = threading.Event()
        self._salvaged: dict[str, TrainingState] = {}
        """States of the models of a lost group, until another group has them."""
        self._unapplied: set[str] = set()
        """Models that have a gradient."""
        self._untold_gradient_losses: dict[str, str] = {}
        """Models that have lost a gradient, and why, until their client is told."""
        self._lost: dict[str, str] = {}
        """Models that are lost, and why."""
        self._group = start(self._no_more_starts)
        try:
            self._memberships = _memberships(self._group)
            _check_one_base(self._memberships, self._memberships[0].base_fingerprint)
            if weight_host is not None:
                weight_host.attach_to(self._group)
        except BaseException:
            self._group.close()
            raise
        self.limits = self._memberships[0].limits
        self.base_fingerprint = self._memberships[0].base_fingerprint

    @property
    def batcher(self) -> None:
        """See `Trainer.batcher`: each pass runs by itself."""
        return None

    def close(self) -> None:
        """End the ranks."""
        self._models.clear()
        if self._weight_host is not None:
            self._weight_host.close()
        self._group.close()

    def stop_waiting(self) -> None:
        """See `Trainer.stop_waiting`: no other group is started after this one."""
        self._no_more_starts.set()

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`.

        Raises:
            RanksLost: a rank was lost meanwhile; the model does not exist.
            RanksUnavailable: the last group was lost and no other could be started.
        """
        self._command(lambda group: group.call("add_model", model_id, lora_config))
        self._models.add(model_id)
        (self._whole.add if lora_config is None else self._whole.discard)(model_id)
        self._lost.pop(model_id, None)

    def remove_model(self, model_id: str) -> None:
        """See `Trainer.remove_model`."""
        self._lost.pop(model_id, None)
        if model_id in self._models:
            self._models.remove(model_id)
            self._salvaged.pop(model_id, None)
            self._forget_gradient(model_id)
            self._call_if_alive("remove_model", model_id)

    def memory_bytes(self, model_id: str) -> int:  # noqa: ARG002 - part of the interface
        """See `Trainer.memory_bytes`: the ranks hold all models."""
        return 0

    def forward(self, model_id: str, batch: Batch, yield_point: Callable[[], None]) -> LossOutput:
        """See `Trainer.forward`."""
        return self._pass("forward", model_id, batch, yield_point)

    def forward_backward(
        self, model_id: str, batch: Batch, yield_point: Callable[[], None]
    ) -> LossOutput:
        """See `Trainer.forward_backward`."""
        self._tell_of_lost_gradient(model_id)
        self._unapplied.add(model_id)
        try:
            return self._pass("forward_backward", model_id, batch, yield_point)
        except GradientLost:
            self._forget_gradient(model_id)
            raise

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `Trainer.optim_step`. A rank lost meanwhile leaves it undone, or done everywhere."""
        self._tell_of_lost_gradient(model_id)
        self._unapplied.discard(model_id)
        self._model_command(model_id, lambda group: group.call("sum_gradient", model_id))
        metrics = self._model_command(
            model_id, lambda group: group.call_independently("optim_step", model_id, params)
        )
        return cast("Mapping[str, float]", metrics)

    def discard_gradient(self, model_id: str) -> None:
        """See `Trainer.discard_gradient`. What is lost has no gradient."""
        self._forget_gradient(model_id)
        if model_id in self._models:
            self._call_if_alive("discard_gradient", model_id)

    def release_memory(self) -> None:
        """See `Trainer.release_memory`. A rank that is lost is reported by the next command."""
        if self._group.is_alive:
            with suppress(RanksLost):
                self._command(lambda group: group.call_independently("release_memory"))

    def snapshot(self, model_id: str) -> WeightsSnapshot:
        """See `Trainer.snapshot`."""
        return self._copy_of("snapshot", model_id)

    def publication(self, model_id: str) -> Callable[[], Publication]:
        """See `Trainer.publication`. A whole model stays with the ranks, if it has a host there."""
        if self._weight_host is not None and model_id in self._whole:
            host = self._weight_host
            reference = self._model_result("published", model_id, RankGroup.call_by_reference)
            with suppress(GradientLost):
                if reference is not None:
                    self._model_command(model_id, host.attach_to)
                    return partial(_stored, host, reference)
        weights = self._copy_of("published", model_id)
        return lambda: weights

    def export_state(self, model_id: str) -> TrainingState:
        """See `Trainer.export_state`. It takes room in Ray's store while it is referenced."""
        state = self._model_result("export_state", model_id) or self._salvaged[model_id]
        return cast("TrainingState", state)

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """See `Trainer.import_state`."""
        self._model_command(
            model_id, lambda group: group.call_independently("import_state", model_id, state)
        )
        self._forget_gradient(model_id)

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`. Ranks sum their parts only if there is one.

        Raises:
            GradientLost: a lost rank took its part along, and the model has not been told.
        """
        gradient = None
        if model_id in self._unapplied:
            gradient = self._model_result("export_gradient", model_id)
        if model_id in self._untold_gradient_losses:
            raise GradientLost(self._untold_gradient_losses[model_id])
        return cast("Gradient | None", gradient)

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`."""
        self._model_command(
            model_id, lambda group: group.call_independently("import_gradient", model_id, gradient)
        )
        self._forget_gradient(model_id)
        self._unapplied.add(model_id)

    def _pass(
        self, method: str, model_id: str, batch: Batch, yield_point: Callable[[], None]
    ) -> LossOutput:
        replicas = 1 + max(membership.replica for membership in self._memberships)
        lengths = [len(example.tokens) for example in batch.examples]
        shares = deal(padded_lengths(lengths, self._memberships[0].pad_to_multiple_of), replicas)
        parts = [part(batch, share) for share in shares]
        arguments = [(model_id, parts[m.replica], _nothing) for m in self._memberships]
        outputs = self._model_command(model_id, lambda group: group.call_each(method, arguments))
        yield_point()
        answers: dict[int, LossOutput] = {
            membership.replica: output
            for membership, output in zip(self._memberships, outputs, strict=True)
            if membership.answers
        }
        return join(shares, [answers[replica] for replica in range(replicas)])

    def _copy_of(self, method: str, model_id: str) -> WeightsSnapshot:
        """Return a model's weights from a method of the ranks, or salvaged from a lost group."""
        weights: WeightsSnapshot = (
            self._model_result(method, model_id) or self._salvaged[model_id].weights
        )
        return _own(weights)

    def _model_result(self, method: str, model_id: str, ask: Ask = RankGroup.call) -> Any:  # noqa: ANN401 - the method's own result
        """Return what a method returns about a model; None if the group is lost, then or before.

        Args:
            method: of the ranks' trainers.
            model_id: of the model.
            ask: how the group calls it.

        Raises:
            StateLost: the model is lost.
        """
        self._check_exists(model_id)
        if self._group.is_alive:
            with suppress(GradientLost):
                return self._model_command(model_id, lambda group: ask(group, method, model_id))
        return None

    def _model_command(self, model_id: str, command: Callable[[RankGroup], T]) -> T:
        """Give a command about a model.

        Raises:
            StateLost: the model is lost.
            GradientLost: a rank was lost meanwhile; the model goes on without a gradient.
        """
        self._check_exists(model_id)
        try:
            return self._command(command)
        except RanksLost as error:
            self._check_exists(model_id)
            raise GradientLost(_consequence(error.message)) from error

    def _command(self, command: Callable[[RankGroup], T]) -> T:
        """Give a command, to another group if the last was lost; salvage states if this one is."""
        if not self._group.is_alive:
            self._take_over()
        group = self._group
        try:
            return command(group)
        finally:
            if not group.is_alive:
                self._note_loss(group)

    def _call_if_alive(self, method: str, model_id: str) -> None:
        """Run a command unless the group is lost; a lost group needs no clean-up."""
        if self._group.is_alive:
            self._command(lambda group: group.call_independently(method, model_id))

    def _note_loss(self, group: RankGroup) -> None:
        states: Mapping[str, TrainingState] = group.salvaged or {}
        reason = group.loss or ""
        self._lost |= dict.fromkeys(self._models - states.keys(), reason)
        self._models &= states.keys()
        self._salvaged = {model_id: states[model_id] for model_id in self._models}
        self._untold_gradient_losses |= dict.fromkeys(
            self._unapplied & self._models, _consequence(reason)
        )
        self._unapplied.clear()

    def _take_over(self) -> None:
        """Start another group with the models of the lost one; repeating it after failure is fine.

        Raises:
            RanksUnavailable: it could not be started, or was lost at once.
        """
        group = self._start(self._no_more_starts)
        try:
            for model_id in self._models & self._salvaged.keys():
                state = self._salvaged[model_id]
                group.call("add_model", model_id, state.weights.lora)
                group.call("import_state", model_id, state)
            memberships = _memberships(group)
            _check_one_base(memberships, self.base_fingerprint)
            if self._weight_host is not None:
                self._weight_host.attach_to(group)
        except BaseException as error:
            group.close()
            if isinstance(error, RanksLost):
                raise RanksUnavailable(f"the ranks were started and lost: {error}") from error
            raise
        self._group, self._memberships, self._salvaged = group, memberships, {}

    def _check_exists(self, model_id: str) -> None:
        if model_id not in self._models:
            reason = self._lost.get(model_id, self._group.loss)
            raise StateLost(
                f"model {model_id} was lost when ranks that held it ended ({reason}); create it"
                " again from its last checkpoint"
            )

    def _tell_of_lost_gradient(self, model_id: str) -> None:
        reason = self._untold_gradient_losses.pop(model_id, None)
        if reason is not None:
            raise GradientLost(reason)

    def _forget_gradient(self, model_id: str) -> None:
        self._unapplied.discard(model_id)
        self._untold_gradient_losses.pop(model_id, None)


def _stored(host: RankWeightHost, reference: Any) -> Publication:  # noqa: ANN401 - Ray's references are of any type
    """Store weights beside the ranks, if they can be; else copy them here. Raises as `waited`."""
    try:
        return host.store(reference)
    except Unavailable as error:
        log.warning("a published model comes to the head", reason=error.message)
    return _own(waited(reference))


def _own(weights: WeightsSnapshot) -> WeightsSnapshot:
    """Return a copy of weights that are in Ray's store.

    They may be sampled from for long, and the store has room for what is in transit only.
    """
    return replace(weights, tensors={n: each.clone() for n, each in weights.tensors.items()})


def _memberships(group: RankGroup) -> list[Membership]:
    return group.call_each("membership", [()] * group.shape.ranks)


def _check_one_base(memberships: Sequence[Membership], expected: str | None) -> None:
    """Check that all ranks have loaded the same base model, as those of the group before had.

    Raises:
        RanksUnavailable: some have another.
    """
    loaded = [each.base_fingerprint for each in memberships]
    for rank, fingerprint in enumerate(loaded):
        if None not in {fingerprint, expected} and fingerprint != expected:
            raise RanksUnavailable(
                f"the model's folder holds other files at rank {rank} (fingerprint {fingerprint})"
                f" than where the model was loaded first ({expected}); put the same files at every"
                " node, or restart the session if the model was replaced"
            )


def _consequence(reason: str) -> str:
    return (
        f"{reason}; the model goes on, in another group of ranks, as its last optim_step left it."
        " The gradient since then was dropped: send the data of this step again"
    )


def _nothing() -> None:
    """Stand for the sampler, which doesn't run where ranks do."""
