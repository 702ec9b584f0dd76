"""The models of a group of ranks, and what the loss of a group has cost them."""

from collections.abc import Collection, Mapping

from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_worker.engine.trainer import GradientLost, TrainingState


class HeldModels:
    """Which models exist, which of them have a gradient, and what of them was lost.

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
        self._lost_gradients |= dict.fromkeys(
            self.names.intersection(models), consequence_of(reason)
        )

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


def consequence_of(reason: str) -> str:
    """Return the message about a gradient that was lost for this reason."""
    return (
        f"{reason}; other ranks continue the model from its last optim_step. The gradient"
        " accumulated since then was lost: send the data of this step again"
    )
