"""The training loop of RLVE on tasks with known answers: what is rewarded becomes likely."""

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import tinker

from tinkercloud_programs.rlve import loop
from tinkercloud_programs.rlve.batches import data_of
from tinkercloud_programs.rlve.problems import Problem
from tinkercloud_programs.server import ProgramServer
from tinkercloud_protocol.programs import program_messages as names
from tinkercloud_protocol.programs.program_messages import (
    ProgramInfo,
    ProgramPhase,
    ProgramProgress,
)
from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_testing.clients.sdk_clients import SdkClients
from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID

MODEL = "tiny/llama"
END = "<|end|>"
STEPS = 14
CONFIG = {
    "enabled": True,
    "environment_list": ["Division"],
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 24,
    "over_sampling_batch_size": 2,
    "rollout_max_response_len": 12,
    "num_rollout": STEPS,
    "save_every_steps": STEPS,
    "learning_rate": 0.03,
}


class Verifier:
    """Rewards responses that satisfy a condition."""

    def __init__(self, is_right: Callable[[str], bool]) -> None:
        self._is_right = is_right

    def verifier(self, response: str) -> dict[str, float]:
        found = float(self._is_right(response))
        return {"reward": found, "accuracy": found}


class OneTask:
    """Problems that all have the same verifier."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def generate(self, environment: str, difficulty: int, chance: random.Random) -> Problem:
        return Problem(environment, difficulty, chance.choice("abcd"), self._verifier)


class RecordingServer(ProgramServer):
    """Records the progress of a program that has just started."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            {names.PROGRAM_ID: "p", names.BASE_URL: server.url, names.API_KEY: API_KEY}
        )
        self.accuracies: list[float] = []

    def record(self) -> ProgramInfo:
        return ProgramInfo(
            program_id=self.program_id,
            owner="somebody",
            name="rlve",
            phase=ProgramPhase.RUNNING,
            created_at=datetime.now(UTC),
        )

    def report(self, progress: ProgramProgress) -> None:
        if progress.metrics:
            self.accuracies.append(progress.metrics["accuracy"])


def ends_by_itself(response: str) -> bool:
    return response.endswith(END)


def starts_with_an_even_byte(response: str) -> bool:
    return bool(response) and ord(response[0]) % 2 == 0


@pytest.fixture
def started(
    server: Server, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make training loops on a task, each with a model of its own."""
    monkeypatch.setenv(names.BASE_URL, server.url)
    monkeypatch.setenv(names.API_KEY, API_KEY)
    made: list[loop.Trainer] = []

    def start(is_right: Callable[[str], bool]) -> tuple[loop.Trainer, RecordingServer]:
        training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
        monkeypatch.setenv(names.MODEL_ID, str(training.model_id))
        monkeypatch.setattr(loop, "Problems", lambda _config: OneTask(Verifier(is_right)))
        recording = RecordingServer(server)
        made.append(loop.Trainer(RlveConfig.model_validate(CONFIG), recording))
        return made[-1], recording

    yield start
    SdkClients([trainer._service for trainer in made]).close()


@pytest.mark.parametrize("is_right", [ends_by_itself, starts_with_an_even_byte])
@pytest.mark.long
def test_what_is_rewarded_becomes_likely(
    started: Callable[..., Any], is_right: Callable[[str], bool]
) -> None:
    trainer, recording = started(is_right)

    trainer.run()

    accuracies = recording.accuracies
    assert len(accuracies) == STEPS
    assert accuracies[0] < 0.7
    assert sum(accuracies[-3:]) / 3 > 0.9


def test_the_first_update_is_on_policy_and_only_on_responses(started: Callable[..., Any]) -> None:
    trainer, _ = started(ends_by_itself)
    groups = trainer._sample_step()
    data = data_of(groups)

    result = trainer._training.forward(data, "importance_sampling").result()

    responses = [each for group in groups if not group.is_uniform for each in group.responses]
    assert len(data) == len(responses) > 0
    assert any(each.outcome.accuracy for each in responses)
    for datum, output, response in zip(data, result.loss_fn_outputs, responses, strict=True):
        number = len(response.tokens)
        assert list(datum.loss_fn_inputs["target_tokens"].data)[-number:] == list(response.tokens)
        assert (response.tokens[-1] == EOS_TOKEN_ID) == bool(response.outcome.accuracy)
        trained = list(output["logprobs"].data)[-number:]
        assert trained == pytest.approx(list(response.logprobs), abs=1e-4)
        advantages = list(datum.loss_fn_inputs["advantages"].data)
        assert not any(advantages[:-number])
        assert all(each > 0 for each in advantages[-number:]) == bool(response.outcome.accuracy)
