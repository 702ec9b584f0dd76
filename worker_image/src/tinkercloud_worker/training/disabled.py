"""What stands for a trainer in a head that samples only."""

from collections.abc import Callable
from typing import Never

from typing_extensions import override

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.training.adam import AdamTrainer


class NoTrainer(AdamTrainer):
    """See `engine.trainer.Trainer`. It begins no model, so it is asked about none."""

    def _new_model(self, lora_config: LoraConfig | None) -> Never:  # noqa: ARG002 - part of the interface
        raise InvalidRequest(
            "this session head samples only (trainer.backend none): create the model in a session"
            " that trains"
        )

    @override
    def forward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> Never:
        raise KeyError(model_id)

    @override
    def forward_backward(self, model_id: str, batch: Batch, between: Callable[[], None]) -> Never:
        raise KeyError(model_id)
