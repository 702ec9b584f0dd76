"""The norm of a gradient includes every element, for any number of elements."""

import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.lora.parameters import TensorLayout, TensorSpec, Trainable, norm_of
from tinkercloud_worker.training.no_trainer import NoTrainer
from tinkercloud_worker.training.trained_model import TrainedModel

MANY = (1 << 24) + 3
"""Number of elements for which a single float32 sum would lose the last ones."""


class TrainerOfOneTensor(NoTrainer):
    """A trainer whose models have one long tensor."""

    def _new_model(self, lora_config: LoraConfig | None) -> TrainedModel:  # type: ignore[override]
        return TrainedModel(lora_config, Trainable(TensorLayout([TensorSpec("weight", (MANY,))])))


def test_a_step_reports_and_clips_by_the_norm_of_all_elements() -> None:
    trainer = TrainerOfOneTensor(ModelLimits(vocab_size=2, max_context_length=2))
    trainer.add_model("m", None)
    held_models(trainer)["m"].trainable.gradient.fill_(1e-3)
    expected = 1e-3 * MANY**0.5

    reported = trainer.optim_step("m", AdamParams(grad_clip_norm=expected / 2, beta1=0.0))

    assert reported["grad_norm"] == pytest.approx(expected, rel=1e-5)
    moments = trainer.export_state("m").moments
    assert moments is not None
    assert float(moments["weight.exp_avg"][0]) == pytest.approx(5e-4, rel=1e-5)


@pytest.mark.parametrize("elements", [0, 1, 4095, 4096, 4097, 10_000])
def test_vectors_of_any_length_have_a_norm(elements: int) -> None:
    torch.manual_seed(0)
    flat = torch.randn(elements)

    assert float(norm_of(flat)) == pytest.approx(float(flat.double().norm()), rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, -1])
def test_a_non_finite_vector_has_no_finite_norm(value: float, place: int) -> None:
    flat = torch.ones(5000)
    flat[place] = value

    assert not norm_of(flat).isfinite()
