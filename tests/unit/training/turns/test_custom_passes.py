"""A custom loss computed by the head adds the gradient that a trainer's own computation adds."""

from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum, ForwardBackwardRequest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_request
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import assert_close, gradient_of
from tinkercloud_testing.training.uploaded_losses import processes, uploaded
from tinkercloud_worker.custom_losses import uploaded as uploaded_loss
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine import custom_passes
from tinkercloud_worker.engine.batch import Batch, prepare_custom
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass
from tinkercloud_worker.engine.turns.engine_thread import Pause, Pieces, run_through
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

# The first loss waits until a process that computes losses has imported torch.
pytestmark = pytest.mark.timeout(180)


def prepared(request: ForwardBackwardRequest, definition: bytes, trainer: TorchTrainer) -> Batch:
    loss = UploadedLoss(processes(), "owner", definition)
    return prepare_custom(request, loss, trainer.limits)


def curved(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs.exp() * logprobs).sum() + torch.logsumexp(logprobs, 0), {}


def picked(logprobs: Tensor, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.gather(0, places).sum(), {}


def a_datum(length: int, **inputs: np.ndarray[Any, Any]) -> Datum:
    tokens = np.arange(3, 3 + length)
    return Datum(tokens.astype(np.int32), {"target_tokens": tokens + 1, **inputs})


def a_trainer() -> TorchTrainer:
    trainer = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=64)
    trainer.add_model("m", LoraConfig(rank=4, seed=1))
    return trainer


def completed(pieces: Pieces[LossOutput]) -> LossOutput:
    return run_through(pieces, lambda: None)


def passes(trainer: TorchTrainer) -> tuple[custom_passes.Pass, custom_passes.Pass]:
    """Return a forward pass and one that adds to the gradient."""

    def score(batch: Batch) -> LossOutput:
        return trainer.forward("m", batch)

    def run(batch: Batch) -> LossOutput:
        return trainer.forward_backward("m", batch)

    return score, run


def test_the_linear_loss_has_the_value_and_the_gradient_of_the_custom_one() -> None:
    here, there = a_trainer(), a_trainer()
    data = [a_datum(length) for length in (5, 9)]
    batch = prepared(a_request(data, "custom"), uploaded(curved), here)
    score, run = passes(here)

    assert batch.uploaded is not None
    ours = completed(custom_passes.forward_backward(batch, batch.uploaded, score, run))
    theirs = there.forward_backward("m", batch)

    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-6)
    scored = completed(custom_passes.forward(batch, batch.uploaded, score))
    assert scored.metrics["loss:sum"] == ours.metrics["loss:sum"]
    for found, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert_close(gradient_of(here), gradient_of(there), rtol=1e-5)


def test_a_loss_that_fails_for_one_datum_reaches_no_backward_pass() -> None:
    trainer = a_trainer()
    data = [a_datum(5, places=np.array([place])) for place in (1, 99)]
    request = a_request(data, "custom")
    batch = prepared(request, uploaded(picked), trainer)
    assert batch.uploaded is not None
    score, _ = passes(trainer)

    def never(_batch: Batch) -> LossOutput:
        raise AssertionError("the ranks ran a loss that fails")

    with pytest.raises(InvalidRequest, match="out of bounds"):
        completed(custom_passes.forward_backward(batch, batch.uploaded, score, never))


def mixed(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs.exp() * logprobs).sum(), {"custom/length:sum": logprobs.detach().exp().sum()}


def test_a_loss_that_takes_long_leaves_the_trainer_free_and_has_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, later = a_trainer(), a_trainer()
    request = a_request([a_datum(length) for length in (40, 5, 60)], "custom")
    batches = [prepared(request, uploaded(mixed), trainer) for trainer in (at_once, later)]
    expected = at_once.forward_backward("m", batches[0])

    monkeypatch.setattr(uploaded_loss, "_PATIENCE_SECONDS", 0.0)
    pieces = later.pieces(TrainingPass("m", batches[1]), lambda: None)
    pauses = []
    found: LossOutput | None = None
    while found is None:
        try:
            step = next(pieces)
        except StopIteration as stop:
            found = stop.value
        else:
            if isinstance(step, Pause):
                pauses.append(step.tokens)
                wait([step.until])

    assert pauses
    assert found.metrics == expected.metrics
    assert_close(gradient_of(later), gradient_of(at_once), rtol=0.0)
    assert batches[0].custom_metrics() == batches[1].custom_metrics()
