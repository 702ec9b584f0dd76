"""The SDK's training loop on a real model, against the same trainer called directly."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, cpu_seconds, medians
from benchmarks.suites.service import a_datum, encoded
from benchmarks.suites.training import LORA, RANK
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_protocol.requests.payloads import decode_forward_backward
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

MODEL = "measured/model"
STEPS = 3


def measure(folder: str) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as scratch:
        with a_server(Path(scratch) / "real", {MODEL: Path(folder)}) as server:
            yield _loop(server, folder)
        model = save(tiny_llama(), Path(scratch) / "tiny")
        with a_server(Path(scratch) / "state", {MODEL: model}) as server:
            yield _request_cost(server)


def _loop(server: Server, folder: str) -> Measurement:
    data = [a_datum(128)] * 4
    trainer = TorchTrainer(TorchBaseModel.load(folder, torch.float32), max_batch_tokens=2048)
    trainer.add_model("m", LORA)
    batch = prepare(decode_forward_backward(encoded(data)), trainer.limits)
    training = server.client().create_lora_training_client(MODEL, RANK, train_unembed=False)
    remote = training.result()

    def direct() -> None:
        for _ in range(STEPS):
            trainer.forward_backward("m", batch)
            trainer.optim_step("m", AdamParams())

    def through_the_sdk() -> None:
        futures: list[tinker.APIFuture[Any]] = []
        for _ in range(STEPS):
            futures.append(remote.forward_backward(data, "cross_entropy"))
            futures.append(remote.optim_step(types.AdamParams()))
        for future in futures:
            future.result()

    alone, through = medians(direct, through_the_sdk)
    note = f"a step takes {1e3 * alone / STEPS:.0f} ms"
    return Measurement(
        "C4", "steps through the SDK / in process", through / alone, "x", "<= 1.1", "<= 1.03", note
    )


def _request_cost(server: Server, requests: int = 30) -> Measurement:
    """Return the CPU time of the API server for a request body plus the head's parsing time."""
    data = [a_datum(512)] * 64
    body = encoded(data)
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    assert server.process is not None
    training.forward(data, "cross_entropy").result()
    before = cpu_seconds(server.process.pid)
    for _ in range(requests):
        training.forward(data, "cross_entropy").result()
    proxied = (cpu_seconds(server.process.pid) - before) / requests
    (parsed,) = medians(lambda: decode_forward_backward(body), rounds=21)
    return Measurement(
        "C21",
        "processor time for a request, without the model",
        1e3 * (proxied + parsed),
        "ms",
        "<= 5",
        "<= 1.5",
        f"{len(body)} bytes; API server {1e3 * proxied:.2f}, parsing in the head {1e3 * parsed:.2f}",
    )
