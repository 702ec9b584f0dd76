"""Many runs on one head: each learns as it would alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import ADAM, a_text
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
NUM_RUNS, NUM_OWNERS, STEPS = 64, 4, 3
RANKS = (1, 2, 4, 8, 16, 32)
ATTENTION, MLP, UNEMBED = 1, 2, 4
LAYERS = (ATTENTION | MLP | UNEMBED, ATTENTION | UNEMBED, MLP, ATTENTION | MLP)
"""Layers with adapters."""


@dataclass(frozen=True)
class Run:
    """One run: its adapter, loss and data depend on its number."""

    number: int

    def create(self, client: tinker.ServiceClient) -> tinker.TrainingClient:
        layers = LAYERS[self.number % len(LAYERS)]
        made = client.create_lora_training_client(
            MODEL,
            rank=RANKS[self.number % len(RANKS)],
            seed=self.number,
            train_attn=bool(layers & ATTENTION),
            train_mlp=bool(layers & MLP),
            train_unembed=bool(layers & UNEMBED),
        )
        return made.result()

    @property
    def loss(self) -> types.LossFnType:
        return "cross_entropy" if self.number % 3 else "importance_sampling"

    @property
    def data(self) -> list[types.Datum]:
        chance = np.random.default_rng(self.number)
        texts = [chance.integers(1, 90, size) for size in chance.integers(3, 40, 2)]
        return [self._datum(list(map(int, text))) for text in texts]

    def _datum(self, tokens: list[int]) -> types.Datum:
        count = len(tokens) - 1
        if self.loss == "cross_entropy":
            return a_text(tokens, weights=[1.0] * count)
        return a_text(tokens, logprobs=[-4.0] * count, advantages=[1.0] * count)

    def send_step(self, training: tinker.TrainingClient) -> "Step":
        sent = training.forward_backward(self.data, self.loss)
        return Step(sent, training.optim_step(ADAM))


@dataclass(frozen=True)
class Step:
    """The pending results of one step."""

    gradient: tinker.APIFuture[types.ForwardBackwardOutput]
    update: tinker.APIFuture[types.OptimStepResponse]

    def loss(self) -> float:
        self.update.result()
        return self.gradient.result().metrics["loss:sum"]


@pytest.mark.long
def test_64_runs_of_four_owners_with_mixed_adapters_learn_as_alone(server: Server) -> None:
    clients = [server.client(server.new_key(f"owner-{number}")) for number in range(NUM_OWNERS)]
    runs = [Run(number) for number in range(NUM_RUNS)]

    alone = []
    for run in runs:
        training = run.create(clients[run.number % NUM_OWNERS])
        pending = [run.send_step(training) for _ in range(STEPS)]
        alone.append([step.loss() for step in pending])
    trainings = [run.create(clients[run.number % NUM_OWNERS]) for run in runs]
    sent = [
        [run.send_step(training) for run, training in zip(runs, trainings, strict=True)]
        for _ in range(STEPS)
    ]

    together = [[step[run.number].loss() for step in sent] for run in runs]
    for run in runs:
        assert together[run.number] == pytest.approx(alone[run.number], rel=1e-5), run
        assert together[run.number][0] != together[run.number][-1]
