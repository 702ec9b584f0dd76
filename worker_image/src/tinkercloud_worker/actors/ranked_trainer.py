"""One trainer made of the ranks of a group.

Each rank holds a trainer of its own, its part of the whole; every call here is one command to all
of them. A pass is divided over the replicas of the model: ranks that hold one replica between them
get the same share of the batch, and one of them answers for it.

When the group is lost, so are its models: calls about them raise StateLost from then on, which is
final. The next model that is added starts another group.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import cast

from tinkercloud_protocol.errors import StateLost
from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_worker.actors.group import RankGroup, RanksLost
from tinkercloud_worker.actors.shares import deal, join, part
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.ranks import Membership
from tinkercloud_worker.engine.trainer import (
    Gradient,
    LossOutput,
    TrainingState,
    WeightsSnapshot,
)


class RankedTrainer:
    """See `engine.trainer.Trainer`, whose contract this class fulfils."""

    def __init__(self, start: Callable[[], RankGroup]) -> None:
        """Start the ranks.

        Args:
            start: starts a group whose worker objects are RankTrainers; called again after a loss.

        Raises:
            RanksUnavailable: the group could not be started.
        """
        self._start = start
        self._models: set[str] = set()
        self._group = start()
        self._memberships = self._ask_memberships()
        self.limits = self._memberships[0].limits

    def close(self) -> None:
        """End the ranks."""
        self._models.clear()
        self._group.close()

    def add_model(self, model_id: str, lora: LoraConfig | None) -> None:
        """See `Trainer.add_model`.

        Raises:
            RanksUnavailable: the last group was lost and no other could be started.
        """
        if not self._group.is_alive:
            self._models.clear()
            self._group = self._start()
            self._memberships = self._ask_memberships()
        self._group.call("add_model", model_id, lora)
        self._models.add(model_id)

    def remove_model(self, model_id: str) -> None:
        """See `Trainer.remove_model`."""
        if model_id in self._models:
            self._models.remove(model_id)
            with contextlib.suppress(RanksLost):
                self._group.call("remove_model", model_id)

    def forward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> LossOutput:
        """See `Trainer.forward`."""
        return self._pass("forward", model_id, batch, between)

    def forward_backward(
        self, model_id: str, batch: Batch, between: Callable[[], None]
    ) -> LossOutput:
        """See `Trainer.forward_backward`."""
        return self._pass("forward_backward", model_id, batch, between)

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `Trainer.optim_step`."""
        return cast("Mapping[str, float]", self._of(model_id).call("optim_step", model_id, params))

    def discard_gradient(self, model_id: str) -> None:
        """See `Trainer.discard_gradient`. What is lost has no gradient."""
        with contextlib.suppress(StateLost):
            self._of(model_id).call("discard_gradient", model_id)

    def snapshot(self, model_id: str) -> WeightsSnapshot:
        """See `Trainer.snapshot`."""
        return cast("WeightsSnapshot", self._of(model_id).call("snapshot", model_id))

    def export_state(self, model_id: str) -> TrainingState:
        """See `Trainer.export_state`."""
        return cast("TrainingState", self._of(model_id).call("export_state", model_id))

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """See `Trainer.import_state`."""
        self._of(model_id).call("import_state", model_id, state)

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`."""
        return cast("Gradient | None", self._of(model_id).call("export_gradient", model_id))

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`."""
        self._of(model_id).call("import_gradient", model_id, gradient)

    def _ask_memberships(self) -> list[Membership]:
        return self._group.call_each("membership", [()] * self._group.shape.ranks)

    def _of(self, model_id: str) -> RankGroup:
        """Return the group that holds a model.

        Raises:
            StateLost: none does any more.
        """
        if model_id not in self._models:
            raise StateLost(
                f"model {model_id} was lost when a rank of its trainer ended; create it again from"
                " its last checkpoint"
            )
        return self._group

    def _pass(
        self, method: str, model_id: str, batch: Batch, between: Callable[[], None]
    ) -> LossOutput:
        replicas = 1 + max(membership.replica for membership in self._memberships)
        shares = deal([len(example.tokens) for example in batch.examples], replicas)
        parts = [part(batch, share) for share in shares]
        outputs = self._of(model_id).call_each(
            method, [(model_id, parts[m.replica], _nothing) for m in self._memberships]
        )
        between()
        answers: dict[int, LossOutput] = {
            membership.replica: output
            for membership, output in zip(self._memberships, outputs, strict=True)
            if membership.answers
        }
        return join(shares, [answers[replica] for replica in range(replicas)])


def _nothing() -> None:
    """Stand for the sampler, which doesn't run where ranks do."""
