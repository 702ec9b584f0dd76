"""A group of ranks that is replaced when it is lost, with the models that survived.

The states of these are salvaged when the loss is noticed; the next command starts another group
with them. `HeldModels` records what else the loss has cost.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_worker.actors.rank_group import RankGroup, RanksLost, RanksUnavailable
from tinkercloud_worker.actors.rank_memory import RankMemory
from tinkercloud_worker.actors.rank_weight_host import RankWeightHost
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import GradientLost, TrainingState

T = TypeVar("T")


class HeldModels:
    """Which models exist, which have a gradient, and which have lost it or are lost themselves.

    A gradient that was lost is reported once, by the first request that would use it.
    """

    def __init__(self) -> None:
        """Start without models."""
        self.names: set[str] = set()
        """The models that exist."""
        self.whole: set[str] = set()
        """Those of them that are fully fine-tuned."""
        self.salvaged: dict[str, TrainingState] = {}
        """States of the models of a lost group, until they are in another group."""
        self.unapplied: set[str] = set()
        """Models with an unapplied gradient."""
        self._lost_gradients: dict[str, str] = {}
        """Models that have lost a gradient, and why, until a request has reported it."""
        self._lost: dict[str, str] = {}
        """Lost models, and why."""

    def may_share(self, model_id: str) -> bool:
        """Whether this is a LoRA adapter with no unreported gradient loss."""
        return (
            model_id in self.names
            and model_id not in self.whole
            and model_id not in self._lost_gradients
        )

    def add(self, model_id: str, *, is_whole: bool) -> None:
        """Record a new model."""
        self.names.add(model_id)
        (self.whole.add if is_whole else self.whole.discard)(model_id)
        self._lost.pop(model_id, None)

    def remove(self, model_id: str) -> bool:
        """Forget a model; return whether it existed."""
        self._lost.pop(model_id, None)
        if model_id not in self.names:
            return False
        self.names.remove(model_id)
        self.salvaged.pop(model_id, None)
        self.forget_gradient(model_id)
        return True

    def check_exists(self, model_id: str, loss: str | None) -> None:
        """Check that a model exists.

        Args:
            model_id: the model.
            loss: how the group was lost, for a model of which nothing is known.

        Raises:
            StateLost: it was lost.
        """
        if model_id not in self.names:
            raise StateLost(
                f"model {model_id} was lost when ranks that held it ended"
                f" ({self._lost.get(model_id, loss)}); create a training client from its last"
                " checkpoint"
            )

    def note_group_lost(self, states: Mapping[str, TrainingState], reason: str) -> None:
        """Record that a group was lost, and with it all models but these, and all gradients."""
        self._lost |= dict.fromkeys(self.names - states.keys(), reason)
        self.names &= states.keys()
        self.salvaged = {model_id: states[model_id] for model_id in self.names}
        self.note_gradients_lost(self.unapplied, reason)
        self.unapplied.clear()

    def note_gradients_lost(self, models: Collection[str], reason: str) -> None:
        """Record that models, those of them that exist, have lost their gradients."""
        self._lost_gradients |= dict.fromkeys(self.names.intersection(models), _consequence(reason))

    def forget_gradient(self, model_id: str) -> None:
        """Record that a model has no gradient, nor a loss to report."""
        self.unapplied.discard(model_id)
        self._lost_gradients.pop(model_id, None)

    def check_gradient(self, model_id: str) -> None:
        """Check that no gradient of a model was lost without a report.

        Raises:
            GradientLost: one was.
        """
        if model_id in self._lost_gradients:
            raise GradientLost(self._lost_gradients[model_id])


class ReplaceableGroup:
    """See the module. All commands to the ranks go through it."""

    def __init__(
        self,
        start: Callable[[threading.Event], RankGroup],
        weight_host: RankWeightHost | None,
    ) -> None:
        """Start the ranks; the arguments are those of `RankedTrainer`.

        Raises:
            RanksUnavailable: the group could not be started.
        """
        self._start = start
        self._weight_host = weight_host
        self.held = HeldModels()
        self.no_more_starts = threading.Event()
        """Set it, on any thread, to start no other group."""
        self.memory = RankMemory()
        self.current = start(self.no_more_starts)
        """The group of the last start, which may be lost."""
        try:
            self.memberships: Sequence[Membership] = _memberships_of(self.current)
            if weight_host is not None:
                weight_host.attach_to(self.current)
        except BaseException:
            self.current.close()
            raise
        self._base_fingerprint = self.memberships[0].base_fingerprint

    def bring_in(self, models: Sequence[str]) -> None:
        """Page models in at all ranks.

        Raises:
            Overloaded: there is no room for all of them.
            RanksLost: a rank was lost meanwhile.
        """
        self.command(lambda group: self.memory.bring_in(group, models))

    def check_exists(self, model_id: str) -> None:
        """Check that a model exists.

        Raises:
            StateLost: the model is lost.
        """
        self.held.check_exists(model_id, self.current.loss)

    def model_command(self, model_id: str, command: Callable[[RankGroup], T]) -> T:
        """Run a command for a model.

        Raises:
            StateLost: the model is lost.
            GradientLost: a rank was lost meanwhile; the model continues without a gradient.
        """
        self.check_exists(model_id)
        try:
            return self.command(command)
        except RanksLost as error:
            self.check_exists(model_id)
            raise GradientLost(_consequence(error.message)) from error

    def command(self, command: Callable[[RankGroup], T]) -> T:
        """Run a command, in a new group if the last was lost; salvage states if this one is.

        Raises:
            RanksLost: a rank was lost meanwhile.
            RanksUnavailable: the last group was lost, and no other could be started.
        """
        if not self.current.is_alive:
            self._replace()
        group = self.current
        try:
            return command(group)
        finally:
            if not group.is_alive:
                states: Mapping[str, TrainingState] = group.salvaged or {}
                self.held.note_group_lost(states, group.loss or "")
                self.memory.note_loss()

    def call_if_alive(self, method: str, *args: object) -> None:
        """Run a command unless the group is lost: a lost group needs no cleanup."""
        if self.current.is_alive:
            self.command(lambda group: group.call_independently(method, *args))

    def measure_if_due(self) -> None:
        """Measure the memory of the ranks now and then. The next command reports a lost rank."""
        if self.current.is_alive and self.memory.is_due:
            with suppress(RanksLost):
                self.command(self.memory.measure)

    def _replace(self) -> None:
        """Start another group with the models of the lost one. It can be repeated after a failure.

        Raises:
            RanksUnavailable: the group could not be started, or was lost immediately.
        """
        group, salvaged = self._start(self.no_more_starts), self.held.salvaged
        try:
            for model_id in self.memory.restart(self.held.names & salvaged.keys()):
                state = salvaged[model_id]
                self.memory.add_back(group, model_id, state.weights.lora)
                group.call("import_state", model_id, state)
            memberships = _memberships_of(group, self._base_fingerprint)
            if self._weight_host is not None:
                self._weight_host.attach_to(group)
        except BaseException as error:
            group.close()
            self.memory.note_loss()
            if isinstance(error, RanksLost):
                raise RanksUnavailable(f"the ranks started but were lost: {error}") from error
            raise
        self.current, self.memberships, self.held.salvaged = group, memberships, {}


def _consequence(reason: str) -> str:
    return (
        f"{reason}; other ranks continue the model from its last optim_step. The gradient"
        " accumulated since then was lost: send the data of this step again"
    )


def _memberships_of(group: RankGroup, base: str | None = None) -> list[Membership]:
    """Return the places of all ranks, which must have loaded the same base.

    Args:
        group: the ranks.
        base: fingerprint of the base model of the previous group; None: any that all have loaded.

    Raises:
        RanksUnavailable: a rank has a different base model.
        RanksLost: a rank was lost.
    """
    memberships: list[Membership] = group.call_each("membership", [()] * group.shape.ranks)
    loaded = [each.base_fingerprint for each in memberships]
    expected = base or loaded[0]
    for rank, fingerprint in enumerate(loaded):
        if None not in {fingerprint, expected} and fingerprint != expected:
            raise RanksUnavailable(
                f"the model files at rank {rank} (fingerprint {fingerprint}) differ from those that"
                f" were loaded first ({expected}); put the same files on every node, or restart the"
                " session if the model was replaced"
            )
    return memberships
