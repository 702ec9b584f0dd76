"""The placeholder for a trainer in a session head that only samples."""

from typing import Never

from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.training.adam import AdamTrainer


class NoTrainer(AdamTrainer, Trainer):
    """A trainer that rejects every new model."""

    def _new_model(self, lora_config: LoraConfig | None) -> Never:  # noqa: ARG002 - part of the interface
        raise InvalidRequest(
            "this session has no trainer (trainer.backend is none) and only samples; create"
            " the model in a session with a trainer"
        )

    @property
    @override
    def batcher(self) -> Never:
        raise NotImplementedError("no model has passes")
