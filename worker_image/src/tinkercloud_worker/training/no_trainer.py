"""The placeholder for a trainer in a session head that only samples."""

from collections.abc import Callable
from typing import Never

from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.training.adam import AdamTrainer


class NoTrainer(AdamTrainer):
    """A trainer that rejects every new model."""

    def _new_model(self, lora_config: LoraConfig | None) -> Never:  # noqa: ARG002 - part of the interface
        raise InvalidRequest(
            "this session has no trainer (trainer.backend is none) and only samples; create"
            " the model in a session with a trainer"
        )

    @override
    def forward(self, model_id: str, batch: Batch, yield_point: Callable[[], None]) -> Never:
        raise KeyError(model_id)

    @override
    def forward_backward(
        self, model_id: str, batch: Batch, yield_point: Callable[[], None]
    ) -> Never:
        raise KeyError(model_id)
