"""A custom loss computed by the head adds the gradient that a trainer's own computation adds."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from tinkercloud_protocol.custom_losses import CustomLoss
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_protocol.tensors import Datum
from tinkercloud_testing.data import a_request
from tinkercloud_testing.models import tiny_llama
from tinkercloud_testing.trainers import assert_close, gradient_of
from tinkercloud_worker.engine import custom_passes
from tinkercloud_worker.engine.batch import Batch, prepare_custom
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer


def uploaded(fn: Any, **ranks: int) -> bytes:
    """Return a function as the SDK uploads it."""
    all_ranks: Any = {"logprobs": 1, **ranks}
    handle = trace_loss(fn, all_ranks, "s")
    inputs = [{"name": each.name, "rank": each.rank} for each in handle.inputs]
    graph = encode_graph(handle).model_dump()
    loss = CustomLoss.model_validate({"name": "test", "inputs": inputs, "graph": graph})
    return loss.model_dump_json().encode()


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


def passes(trainer: TorchTrainer) -> tuple[custom_passes.Pass, custom_passes.Pass]:
    """Return a forward pass and one that adds to the gradient."""

    def score(batch: Batch) -> LossOutput:
        return trainer.forward("m", batch, lambda: None)

    def run(batch: Batch) -> LossOutput:
        return trainer.forward_backward("m", batch, lambda: None)

    return score, run


def test_the_linear_loss_has_the_value_and_the_gradient_of_the_custom_one() -> None:
    here, there = a_trainer(), a_trainer()
    data = [a_datum(length) for length in (5, 9)]
    batch = prepare_custom(a_request(data, "custom"), uploaded(curved), here.limits)
    score, run = passes(here)

    ours = custom_passes.forward_backward(batch, score, run)
    theirs = there.forward_backward("m", batch, lambda: None)

    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-6)
    assert custom_passes.forward(batch, score).metrics["loss:sum"] == ours.metrics["loss:sum"]
    for found, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert_close(gradient_of(here), gradient_of(there), rtol=1e-5)


def test_a_loss_that_fails_for_one_datum_reaches_no_backward_pass() -> None:
    trainer = a_trainer()
    data = [a_datum(5, places=np.array([place])) for place in (1, 99)]
    request = a_request(data, "custom")
    batch = prepare_custom(request, uploaded(picked, places=1), trainer.limits)
    score, _ = passes(trainer)

    def never(_batch: Batch) -> LossOutput:
        raise AssertionError("the ranks ran a loss that fails")

    with pytest.raises(InvalidRequest, match="out of bounds"):
        custom_passes.forward_backward(batch, score, never)
